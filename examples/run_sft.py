"""Supervised training with your own model, optimizer and loss, from conversations to the last metric.

    python examples/run_sft.py               # ten seconds on a laptop's CPU, offline
    python examples/run_sft.py --steps 10

Only the replies of the assistant are trained: `compute_loss_mask` is 0 on everything that the user says. It prints:

    Starting SFT training...
      Samples: 6
      Steps: 60
      Batch size: 4
    Step 0: loss=16.8449, grad_norm=51.2438, lr=1.0000e-03
    Step 20: loss=2.8815, grad_norm=3.1555, lr=1.0000e-03
    Step 40: loss=1.4857, grad_norm=1.8082, lr=1.0000e-03
      Saved checkpoint to /tmp/.../step_000060
    Training complete!
    Total steps: 60
    Final loss: 0.9116
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import trio

from rollouts.models.loading import load_tokenizer
from rollouts.training import (
    PyTorchTrainingBackend,
    Sample,
    SFTTrainingConfig,
    compute_loss_mask,
    create_cross_entropy_loss,
    load_hf_model,
    run_sft_training,
    tokenize_conversation,
)

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Cuba": "Havana"}


async def main(steps: int = 60, out: str = "") -> list[dict[str, float]]:
    out = out or tempfile.mkdtemp()
    # 1. The conversations.
    conversations = [
        [{"role": "user", "content": f"The capital of {country}?"}, {"role": "assistant", "content": f"{city}."}]
        for country, city in CAPITALS.items()
    ]

    # 2. Tokens and masks.
    tokenizer = load_tokenizer("tiny")
    samples = []
    for conversation in conversations:
        tokens, user_spans = tokenize_conversation(conversation, tokenizer)
        loss_mask = compute_loss_mask(tokens, user_spans)
        samples.append(Sample(input_ids=torch.tensor(tokens), loss_mask=torch.tensor(loss_mask)))

    # 3. The training backend: your own torch objects.
    model = load_hf_model("tiny", device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    backend = PyTorchTrainingBackend(
        model=model, optimizer=optimizer, loss_fn=create_cross_entropy_loss(), checkpoint_dir=out
    )

    # 4. The loop.
    config = SFTTrainingConfig(num_steps=steps, batch_size=4, log_every=20, checkpoint_every=60)
    metrics = await run_sft_training(backend, samples, config)
    backend.close()

    print(f"Total steps: {len(metrics)}")
    print(f"Final loss: {metrics[-1]['loss']:.4f}")
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    trio.run(main, parser.parse_args().steps)
