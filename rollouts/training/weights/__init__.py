"""Where weights are written, sent and proved.

store.py       the checkpoints of a run: written whole, checked, found, kept
checkpoint.py  what the trainer keeps in one: the optimizer's tensors, random states
files.py       models and adapters as transformers, peft and servers load them
sync.py        one update of every engine; `groups.py` sends it over a process group
probe.py       the proof that new weights are served
"""
