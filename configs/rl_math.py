"""Reinforcement on math questions: Qwen3-0.6B with LoRA on one GPU. A vLLM server samples on the same GPU.

    rollouts run configs/rl_math.py --dry-run
    rollouts run configs/rl_math.py --inference.python ~/venvs/vllm
    rollouts run configs/rl_math.py --data math.jsonl

The data is GSM8K on the hub. `--data` takes any other dataset or file whose answers end in a number:

    {"prompt": "A box holds 12 eggs. How many eggs are in 7 boxes?", "answer": "84"}

Hardware: one GPU with 24 GB (RTX 4090, L4, A10). vLLM takes 45 % of its memory.
Memory of training, estimated: 4.58 GiB.
Not run as a whole yet. What was measured on a GPU: docs/benchmarks.md.
"""

import re

from rollouts import Task, Trajectory


def correct(task: Task, trajectory: Trajectory) -> float:
    """1 if the last number of the reply is the last number of the answer, else 0."""
    said, right = (
        re.findall(r"-?\d+(?:\.\d+)?", str(text).replace(",", "")) for text in (trajectory.last_text, task.answer)
    )
    return float(bool(said) and float(said[-1]) == float(right[-1]))


model = "Qwen/Qwen3-0.6B"
lora_rank = 32
env = "prompts"
data = {"name": "openai/gsm8k", "config": "main", "prompt": "question"}
system = "Think step by step. End your reply with the answer, as a number."
template = {"enable_thinking": False}
reward = [correct]
loss = "grpo"
filter = ["nonzero_std"]  # groups whose replies are all right or all wrong have no gradient

steps = 300
prompts_per_step = 32
samples_per_prompt = 8
max_tokens = 1024
lr = 1e-5
tokens_per_microbatch = 16384
eval_every = 50
eval_tasks = 256
checkpoint_every = 50

inference = {"name": "vllm", "memory_share": 0.45, "context_tokens": 4096}
training = {"name": "torch", "dtype": "bfloat16", "gradient_checkpointing": True}
