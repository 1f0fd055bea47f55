"""Where training data comes from: `buffer` (DataBuffer: which task comes next), `mixing` (MixedBuffer: from which of
several sources), `sft` (supervised rows as padded tensors).
"""
