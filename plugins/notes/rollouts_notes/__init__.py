"""Training with plain objects: your own model, optimizer and loss function, metrics as dicts. The engine imports
nothing of it.

supervised          datasets and conversations as samples; samples as padded tensors
pytorch_factory     a backend for your own torch objects, losses over logits; the engine's in one line
endpoint            which model plays, and where; its episodes of an environment
rollout_generation  batches from a generate_fn, without a manager
loops               run_sft_training, run_rl_training: they fill in what the loops need, and call them
checkpoint_servers  servers that load checkpoints (SGLangEngine, VLLMEngine)
primitives/         reinforcement learning as plain functions

Import the names from `rollouts.training`, `rollouts.primitives` and `rollouts`.
"""
