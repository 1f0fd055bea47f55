"""Training on plain text, such as OpenWebText: all weights of SmolLM2-135M, on one GPU.

    rollouts sft configs/sft_openwebtext.py --dry-run
    rollouts sft configs/sft_openwebtext.py --env.data texts.jsonl

The data are the first texts of OpenWebText on the hub. `--env.data` takes what `--data` takes, such as a file with rows
of the form

    {"text": "The town lies on the river, between two hills. ..."}

A text becomes a conversation: the first words are the question, and the model learns to write the rest. So the model
also learns the chat template. There is no reward, so nothing is evaluated.
Hardware: one GPU with 16 GB or more.
Memory of training, estimated: 6.40 GiB.
Not run as a whole yet. What was measured on a GPU: docs/benchmarks.md.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rollouts import Message, Task
from rollouts.data.source import open_rows


@dataclass
class Texts:
    """Texts from the rows of a dataset."""

    data: str = "Skylion007/openwebtext"  # a file, or a dataset on the hub
    count: int = 32_000  # how many texts
    words: int = 16  # the first words of a text, which are given
    words_max: int = 700  # longer texts are cut

    def tasks(self, split: str, rng: random.Random) -> list[Task]:
        return [Task(conversation[0].text) for conversation in self.demonstrations(split, rng)]

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        for row in open_rows({"name": self.data, "limit": self.count, "streaming": True}):
            words = row.value["text"].split(" ")[: self.words_max]
            given, rest = " ".join(words[: self.words]), " ".join(words[self.words :])
            if rest:
                yield [Message("user", f"Continue: {given}"), Message("assistant", rest)]


mode = "sft"
loss = "sft"
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
env = Texts

steps = 1000
prompts_per_step = 32  # texts of a step
lr = 5e-5
tokens_per_microbatch = 16384
eval_tasks = 0
checkpoint_every = 200

inference = {"name": "hf", "context_tokens": 2048, "cache_gib": 1.0}
training = {"name": "torch", "lr_schedule": "cosine", "gradient_checkpointing": True}
