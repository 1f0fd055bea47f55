"""Supervised training of Qwen3-0.6B on conversations, all weights, on one GPU.

    rollouts sft configs/sft_qwen.py --env.data conversations.jsonl --dry-run
    rollouts sft configs/sft_qwen.py --env.data conversations.jsonl

The data is a local file: rows from a hub have to be written to it first. A row is a conversation:

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello, what can I do?"}]}

The replies of the assistant are trained, and nothing else. There is no reward, so nothing is evaluated.
Hardware: one GPU with 24 GB (RTX 4090, L4, A10).
Memory of training, estimated: 15.71 GiB.
Not run on this hardware yet.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts import Task
from rollouts.errors import ConfigError


@dataclass
class Conversations:
    """Conversations from the rows of a file."""

    data: str = "conversations.jsonl"  # a .jsonl file

    def tasks(self, split: str, rng: random.Random) -> list[Task]:
        return [Task(conversation[0]["content"]) for conversation in self.demonstrations(split, rng)]

    def demonstrations(self, split: str, rng: random.Random) -> list[Any]:
        if not Path(self.data).is_file():
            raise ConfigError(f"--env.data {self.data}: there is no such file; give a .jsonl file of conversations")
        rows = Path(self.data).read_text(encoding="utf-8").splitlines()
        return [json.loads(row)["messages"] for row in rows]


mode = "sft"
loss = "sft"
model = "Qwen/Qwen3-0.6B"
env = Conversations
template = {"enable_thinking": False}

steps = 500
prompts_per_step = 32  # conversations of a step
lr = 1e-5
tokens_per_microbatch = 16384
eval_tasks = 0
checkpoint_every = 100

inference = {"name": "hf", "context_tokens": 2048, "cache_gib": 1.0}
training = {
    "name": "fsdp",  # one rank: the computation in bfloat16, the weights in float32
    "processes": 1,
    "dtype": "bfloat16",
    "lr_schedule": "cosine",
    "gradient_checkpointing": True,
}
