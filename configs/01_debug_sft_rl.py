"""Both phases with the tiny model, to try a change: a few steps on demonstrations, then a few of reinforcement.

    rollouts configs/01_debug_sft_rl.py
    rollouts configs/01_debug_sft_rl.py --dry-run

Hardware: a laptop's CPU, in a few seconds, offline.
"""

mode = "sft+rl"
model = "tiny"
env = {"name": "calculator", "digits": 1}
loss = "grpo"
steps = 5
sft = {"steps": 5}
prompts_per_step = 4
samples_per_prompt = 4
max_tokens = 64
eval_tasks = 16
