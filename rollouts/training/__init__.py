"""Everything between rollouts and new weights.

types samples batching filters   plain data: samples, rows, batches; which groups are kept
algorithms/                      losses, advantages, aggregation: pure functions on tensors
models backends/                 loading a model; holding it with its optimizer; futures, LoRA, checkpoints
datasets/ rollout_gen/ loops/    which task is next; many rollouts at once; generate, train, sync
"""
