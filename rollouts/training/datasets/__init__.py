"""Training data: `buffer` (DataBuffer: the next task), `mixing` (MixedBuffer: tasks of several sources), `sft`
(supervised rows as padded tensors).
"""
