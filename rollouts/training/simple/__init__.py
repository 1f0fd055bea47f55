"""Training with plain objects: samples with tensors, your own model, optimizer and loss function, metrics as dicts.

batches        rewards and advantages; samples to one batch of tensors
losses         losses over logits
conversations  conversations and datasets to samples
config         one configuration of nested dataclasses, as the settings of a run
sharded        create_fsdp_backend
configs        the settings of the training functions
sft rl         run_sft_training, run_rl_training: they fill in what the loops need, and call them
endpoint       which model plays, where, and how; `environments`: CalculatorEnvironment
metrics        a logger for your own program
progress       printed lines, checkpoints, weights for servers that load checkpoints

The names are in `rollouts.training`.
"""
