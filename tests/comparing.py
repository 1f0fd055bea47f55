"""Runs with and without workers, compared."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import psutil

import rollouts

ENVS = Path(__file__).parent / "workers" / "worker_envs.py"
SHORT: dict[str, Any] = {"prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 3, "steps": 2, "max_tokens": 64}
TIMED = ("time/", "perf/", "sync/seconds", "rollout/latency", "eval/latency", "eval/wall_", "eval/cpu_")


def logged(folder: Path | str) -> list[dict[str, Any]]:
    """The metrics of a run, without times."""
    file = Path(folder) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]


def episodes_of(folder: Path | str) -> list[dict[str, Any]]:
    """The episodes of a run, without times."""
    files = sorted(Path(folder).rglob("trajectories/*.jsonl"))
    episodes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for episode in episodes:
        episode.pop("latency_seconds", None)
        episode.get("metrics", {}).pop("latency_seconds", None)
    return episodes


def workers() -> list[psutil.Process]:
    """The worker processes of this process, without their supervisors."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(child.cmdline())
            found += [child] if "env.workers.process" in words and "supervisor.py" not in words else []
    return found


def both(env: Any, worker: Any = "process", **settings: Any) -> tuple[Path, Path]:
    """The folders of one run without and one with workers, after comparing them."""
    given = {**SHORT, **settings}
    for out, where in (("inline", "inline"), ("apart", worker)):
        rollouts.run(env=env, out=out, worker=where, **given)
    inline, apart = (next(iter(Path(out).glob("rl")), Path(out)) for out in ("inline", "apart"))
    assert logged(inline) == logged(apart)
    assert episodes_of(inline) == episodes_of(apart)
    assert not workers()
    return Path("inline"), Path("apart")
