"""Offline rejection fine-tuning: sample once, keep the rollouts with a reward of 1, and train on those.

    python examples/offline_rft.py               # half a minute on a laptop's CPU, offline
    python examples/offline_rft.py --steps 5 --tasks 16

While it trains, nothing is sampled. The rollouts come from the files of an evaluation, which hold every token and
reward. The files may be older than the model, and may come from another one with the same tokenizer. It prints:

    sampled 512 rollouts with a mean reward of 0.27; training on 138 of them
    loss 0.064 at first, 0.000 at last
    reward on other tasks: 0.95
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import trio

import rollouts
from rollouts import Sample
from rollouts.training import SFTTrainingConfig, create_pytorch_backend, run_sft_training


def read_samples(file: Path, threshold: float = 1.0) -> list[Sample]:
    """The rollouts with a reward of at least `threshold`, exactly as they were sampled."""
    episodes = map(json.loads, file.read_text().splitlines())
    good = [episode for episode in episodes if (episode["reward"] or 0.0) >= threshold]
    segments = [segment for episode in good for segment in episode["segments"]]
    return [Sample(tokens=segment["tokens"], loss_mask=segment["loss_mask"]) for segment in segments]


def evaluate(model: str, out: str, tasks: int, samples: int = 1, seed: int = 0) -> float:
    summary = rollouts.run(
        mode="eval", env="calculator", model=model, eval_tasks=tasks, samples_per_prompt=samples, seed=seed, out=out
    )
    return float(summary["reward_mean"])


async def train(samples: list[Sample], steps: int, folder: str) -> None:
    backend = create_pytorch_backend("tiny", lr=1e-3, num_steps=steps, algorithm="sft")
    history = await run_sft_training(backend, samples, SFTTrainingConfig(steps, batch_size=32))
    await backend.save(folder, {})
    backend.close()
    print(f"loss {history[0]['policy/loss']:.3f} at first, {history[-1]['policy/loss']:.3f} at last")


def main(steps: int = 40, tasks: int = 64, out: str = "") -> tuple[float, float]:
    out = out or tempfile.mkdtemp()
    before = evaluate("tiny", f"{out}/sampled", tasks, samples=8)
    samples = read_samples(Path(out, "sampled", "trajectories", "eval.jsonl"))
    print(f"sampled {8 * tasks} rollouts with a mean reward of {before:.2f}; training on {len(samples)} of them")

    trio.run(train, samples, steps, f"{out}/model")
    after = evaluate(f"{out}/model", f"{out}/tested", tasks, seed=1)  # another seed: other tasks
    print(f"reward on other tasks: {after:.2f}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=64)
    main(**vars(parser.parse_args()))
