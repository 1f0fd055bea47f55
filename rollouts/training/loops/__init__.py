"""The loops, pure functions over stateful parts: `rl_loop` (generate, train, sync; its batches are made in `rl_batch`)
and `sft_loop`.
"""
