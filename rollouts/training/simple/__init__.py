"""Training with plain objects: your own model, optimizer and loss function, metrics as dicts. The engine imports
nothing of it.

batches        rewards and advantages; samples to one batch of tensors
losses         losses over logits
sharded        create_fsdp_backend
configs        the settings of the training functions
sft rl         run_sft_training, run_rl_training: they fill in what the loops need, and call them
metrics        a logger for your own program
progress       printed lines, checkpoints, weights for servers that load checkpoints

The names are in `rollouts.training`.
"""
