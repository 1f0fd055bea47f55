"""Backends of several ranks for tests: composed as a run composes them, so that the other ranks compose the same. Tiny
models are those of the tests of training.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import pytest

from rollouts.config.render import to_toml
from rollouts.config.resolving import resolve
from rollouts.plugins.signature import call_with
from rollouts.runs.plan import make_plan
from rollouts.training.batching import make_batch

TRAINING = Path(__file__).parents[3] / "tests" / "training" / "conftest.py"
_spec = importlib.util.spec_from_file_location("conftest_of_training", TRAINING)
_training = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_training)
tiny = _training.tiny


class Ranks:
    """A backend, the plan that it was composed from, and what a test does with both."""

    def __init__(self, model: str, settings: dict) -> None:
        tree = {
            "env": "calculator",
            "loss": "grpo",
            "lr": 1e-2,
            "tokens_per_microbatch": 120,
            "eval_tasks": 0,
            **settings,
        }
        plan = make_plan(resolve({**tree, "model": model}))
        self.plan = plan
        chosen = plan.one("training")
        available = {**plan.training_arguments(), "config": to_toml(plan.resolved)}
        self.backend = call_with(chosen.component, available, chosen.settings)

    def batch(self, samples, stage: int = 0, **settings):
        """The samples as a batch of a stage's algorithm, advantages of both signs."""
        count = 1 + max(sample.rollout_index for sample in samples)
        chosen = self.plan.schedule[stage]
        return make_batch(
            samples,
            [math.sin(3.0 * n + 1) for n in range(count)],
            aggregation=chosen.algorithm.aggregation,
            step=0,
            max_tokens=16,
            algorithm=chosen.name,
            **settings,
        )

    def train(self, batch, steps: int = 3):
        """So many steps; what each said of loss and gradient."""
        said = []
        for _ in range(steps):
            metrics = self.backend.forward_backward(batch)
            result = self.backend.optim_step().wait(60)
            kept = {name: value for name, value in metrics.wait(60).items() if not name.startswith("perf/")}
            said.append(kept | result.metrics)
        return said


@pytest.fixture
def ranks_of(monkeypatch, forked_ranks):
    """Makes backends of several ranks, and ends their ranks after the test."""
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    made = []

    def make(model, processes: int = 1, *, training=(), **settings):
        # A large eps: Adam would blow the rounding of gradients near 0 up to whole steps.
        backend = {"name": "fsdp", "processes": processes, "warmup_steps": 0, "eps": 1e-4, **dict(training)}
        if processes == 0:
            del backend["processes"]
            backend["name"] = "torch"
        made.append(Ranks(str(model), {"training": backend, **settings}))
        return made[-1]

    yield make
    for ranks in made:
        ranks.backend.close()
