"""The training loops: `rl_loop` (its batches come from `rl_batch`) and `sft_loop`."""
