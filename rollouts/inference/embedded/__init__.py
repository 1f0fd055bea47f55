"""The engine in this process: it shares the trainer's parameters and is reproducible by seed.

hf.py         `HFInference`, the engine
scheduler.py  when a batch forms (trio side)
decode.py     the torch side: one wave of requests, in batches that fit; sampling; scores of given tokens
decode_slots.py      rows decoded side by side, in one of two ways, and which of them a model takes
cache.py      keys and values: one padded buffer for rows under way, and what sessions keep between turns
"""
