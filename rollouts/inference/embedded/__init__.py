"""The engine in this process: it shares the trainer's parameters and is reproducible by seed.

hf.py            `HFInference`, the engine
scheduler.py     starts batches of requests (runs in trio's thread)
decode.py        samples a batch of requests and scores given tokens (runs in the torch thread)
decode_slots.py  the rows that decode side by side, with or without our own cache
cache.py         keys and values: one padded buffer for decoding rows, and saved copies for sessions between turns
"""
