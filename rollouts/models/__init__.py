"""Causal language models, for inference and training alike: loading, adapters, sizes.

loading        a model or a tokenizer by name, with its adapters merged in
folders        what folders hold: adapters, a tokenizer, files of weights, checkpoints
revisions      the commits of models and data of a hub that a run uses
lora           adapters through peft
estimates      memory and operations, from shapes
futures        TrainFuture, the one thread that does all torch work in order, and what to type if memory is too small
"""
