"""The engine in this process: it shares the trainer's parameters and is reproducible by seed.

hf.py            `HFInference`, the engine
decode.py        samples a batch of requests and scores given tokens (runs in the torch thread)
decode_slots.py  starts batches of requests (in trio's thread); rows that decode side by side, with or without our cache
cache.py         keys and values: one padded buffer for decoding rows, and saved copies for sessions between turns
"""
