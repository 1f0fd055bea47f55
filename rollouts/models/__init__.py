"""Causal language models, for inference and training alike: loading, adapters, sizes.

loading        a model or a tokenizer by name, with its adapters merged in
folders        what folders hold: adapters, a tokenizer, files of weights, checkpoints
revisions      the commits of models and data of a hub that a run uses
lora           adapters through peft
estimates      memory and operations, from shapes
futures        TrainFuture, and the one thread that does all torch work in order
out_of_memory  what to type if a device has too little memory
"""
