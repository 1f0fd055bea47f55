"""Checkpoints, and new weights for engines.

store.py       the checkpoints of a run: written completely, checked, found, removed
checkpoint.py  the trainer's part of a checkpoint: optimizer tensors, random states
files.py       models and adapters in the format of transformers, peft and servers
sync.py        updates every engine; `sending.py` those with a copy of the weights, `broadcast.py` over a process group
probe.py       tests that engines serve the new weights
"""
