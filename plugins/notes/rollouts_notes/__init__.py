"""Training with plain objects: your own model, optimizer and loss function, metrics as dicts. The engine imports
nothing of it.

batches             rewards and advantages; samples to one batch of tensors
losses              losses over logits
supervised          conversations as tokens and masks; samples as padded tensors
dataset_loaders     datasets as samples
pytorch_factory     a backend for your own torch objects, and its checkpoints (pytorch_checkpoint)
sharded             create_fsdp_backend
endpoint            which model plays, and where; its episodes of an environment
rollout_generation  batches from a generate_fn, without a manager
configs             the settings of the training functions
sft rl              run_sft_training, run_rl_training: they fill in what the loops need, and call them
metrics             a logger for your own program
checkpoint_servers  servers that load checkpoints (SGLangEngine, VLLMEngine)
progress            printed lines, checkpoints, weights for servers that load checkpoints
primitives/         reinforcement learning as plain functions

Import the names from `rollouts.training`, `rollouts.primitives` and `rollouts`.
"""
