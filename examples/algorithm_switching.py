"""Algorithm switching: GRPO with a KL term, then GRPO alone, then CISPO, in one run.

    python examples/algorithm_switching.py               # half a minute on a laptop's CPU, offline
    python examples/algorithm_switching.py --steps 6

A `schedule` is a list of changes. Each one begins at a step, and names only what changes. It prints one line for each
tenth step. `kl_coef` is there only while the KL term is:

    step  0  grpo + KL  reward 0.11  kl_coef 0.2
    step  5  grpo + KL  reward 0.33  kl_coef 0.2
    step 10  grpo + KL  reward 0.62  kl_coef 0.2
    step 15  grpo       reward 0.70  kl_coef -
    step 20  grpo       reward 0.88  kl_coef -
    step 25  grpo       reward 0.88  kl_coef -
    step 30  cispo      reward 0.91  kl_coef -
    step 35  cispo      reward 1.00  kl_coef -
    step 40  cispo      reward 0.97  kl_coef -
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import rollouts


def main(steps: int = 45, out: str = "") -> dict[str, Any]:
    out = out or tempfile.mkdtemp()
    third = max(1, steps // 3)
    changes = [{"step": third, "kl": "none"}, {"step": 2 * third, "loss": {"name": "cispo", "clip_high": 3.0}}]
    summary = rollouts.run(
        env="calculator",
        loss="grpo",
        kl={"name": "rk3_loss", "coef": 0.2},
        schedule=[change for change in changes if change["step"] < steps],
        steps=steps,
        eval_tasks=0,
        out=out,
    )
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    for metrics in map(json.loads, lines[:: max(1, steps // 9)]):
        step = metrics["step"]
        algorithm = "grpo + KL" if step < third else "grpo" if step < 2 * third else "cispo"
        coefficient = metrics.get("policy/kl_coef", "-")
        print(f"step {step:2}  {algorithm:9}  reward {metrics['reward/mean']:.2f}  kl_coef {coefficient}")
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=45)
    main(**vars(parser.parse_args()))
