"""What a training loop prints and saves, if its config asks for it; and weights for servers that load checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError
from rollouts.training.weights.engines import InferenceEngine, sync_weights_to_engines

_NAMES = {
    "mean_reward": "reward/mean",
    "loss": "policy/loss",
    "grad_norm": "optim/grad_norm",
    "lr": "optim/lr",
}
"""The short names of metrics, and the names that the loops give them."""

_SHOWN = {"mean_reward": "reward={:.2f}", "loss": "loss={:.4f}", "grad_norm": "grad_norm={:.4f}", "lr": "lr={:.4e}"}
"""The metrics of a printed line, and what is printed of each."""


class Checkpoints:
    """Saves a backend, once for each step: with its `save_checkpoint`, else with `save` into `folder`."""

    def __init__(self, backend: Any, folder: str) -> None:
        self._backend, self._folder = backend, Path(folder)
        self._saved: tuple[int, Path] | None = None

    async def save(self, step: int, metrics: Mapping[str, float]) -> Path:
        """Write `step_000010` and return its path. Raises CheckpointError."""
        if self._saved is None or self._saved[0] != step:
            if hasattr(self._backend, "save_checkpoint"):
                path = Path(await self._backend.save_checkpoint(step, metrics))
            else:
                path = self._folder.absolute() / f"step_{step:06d}"
                await self._backend.save(str(path), {"step": step, "metrics": dict(metrics)})
            self._saved = (step, path)
        return self._saved[1]


class CheckpointSync:
    """Gives servers new weights through a checkpoint, as `WeightSyncManager` does through an engine's own ways."""

    def __init__(self, engines: Sequence[InferenceEngine], checkpoints: Checkpoints, *, prints: bool) -> None:
        self._engines, self._checkpoints, self._prints = engines, checkpoints, prints

    async def sync(self, backend: Any) -> dict[str, float]:
        """Save the backend, and make every server load the folder. Raises InferenceError, CheckpointError."""
        path = await self._checkpoints.save(backend.version, {})
        await sync_weights_to_engines(self._engines, str(path))
        if self._prints:
            print(f"  Synced weights to {len(self._engines)} engines")
        return {"sync/version": float(backend.version)}


class StepLines:
    """Prints lines and saves checkpoints by `log_every` and `checkpoint_every` of a config."""

    def __init__(self, config: Any, backend: Any) -> None:
        self._config = config
        self.prints = config.log_every > 0
        self.checkpoints = Checkpoints(backend, config.checkpoint_dir)

    def begin(self, kind: str, **numbers: object) -> None:
        """Print the head: one line for each number."""
        self.say(f"Starting {kind} training...")
        for name, value in numbers.items():
            self.say(f"  {name.replace('_', ' ').capitalize()}: {value}")

    async def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print and save after a step (0-based), if it is time."""
        config = self._config
        if self.prints and step % config.log_every == 0:
            shown = [words.format(metrics[name]) for name, words in _SHOWN.items() if name in metrics]
            self.say(f"Step {step}: {', '.join(shown)}")
        if config.checkpoint_every and (step + 1) % config.checkpoint_every == 0:
            self.say(f"  Saved checkpoint to {await self.checkpoints.save(step + 1, metrics)}")

    def say(self, line: str) -> None:
        """Print a line if the config asks for lines."""
        if self.prints:
            print(line)


def short_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that have a short name, under it; those that already have it are left out.

    >>> short_names({"reward/mean": 0.5, "optim/lr": 1e-3, "time/step": 2.0})
    {'mean_reward': 0.5, 'lr': 0.001}
    """
    return {short: metrics[name] for short, name in _NAMES.items() if name in metrics and short not in metrics}


def set_learning_rate(backend: Any, learning_rate: float | None) -> None:
    """Set the learning rate of a backend with an `optimizer`. Raises ConfigError for any other backend that was made
    with another rate, and if a scheduler sets the rate.
    """
    made_with = getattr(backend, "lr", None)
    if learning_rate is None or learning_rate == made_with:
        return
    if not hasattr(backend, "optimizer") or getattr(backend, "scheduler", None) is not None:
        reason = "a scheduler sets its learning rate" if made_with is None else f"it was made with lr={made_with:g}"
        what = f"the config's learning_rate is {learning_rate:g}, and the {type(backend).__name__} does not take it"
        raise ConfigError(f"{what}: {reason}; make the backend with this rate, or leave learning_rate out")
    for group in backend.optimizer.param_groups:
        group["lr"] = learning_rate
