"""Train in one run with environments of several libraries, whose packages exclude each other.

    python scripts/mixed_run.py
    python scripts/mixed_run.py --keep    # leave the folders, and print where they are

The run mixes an environment package of verifiers 0.3, a taskset of verifiers 0.4, an environment on a server of
OpenEnv, one of gymnasium and the calculator, and two rewards of the package rollouts-text-rewards. `rollouts env
install` gives each of the first two a virtual environment of its own, because verifiers 0.3 and 0.4 exclude each other.
The server of OpenEnv, which excludes 0.4, has one too. The table at the end has the rewards and metrics of each
environment.

Needs gymnasium, pip and a package index; without an index it says so and does nothing. The exit code is 1 if a step
fails.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from clashing_packages import in_a_folder
from stopwatch import Stopwatch, expect, run

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
INSTALLED = {
    "capitals": ("verifiers_v0", "vf_capitals", "verifiers==0.3.1"),
    "sums": ("verifiers", "sums_v1", "verifiers==0.4.0"),
}
"""By alias: the plugin, the package in the folder of its tests, and what it requires."""

OPENENV = "openenv==0.10.0"
SERVER = PLUGINS / "openenv" / "tests" / "openenv_server.py"
START_SECONDS = 300

ENVIRONMENTS = {
    "capitals": "verifiers-v0/vf-capitals",
    "sums": "verifiers/sums-v1",
    "shop": "openenv",
    "ice": "gym/FrozenLake-v1",
    "calculator": "calculator",
}
REWARDS = ("env:1", "rollouts-text-rewards/length:0.1", "rollouts-text-rewards/repetition:-0.1")
SIZE = "--steps 2 --prompts-per-step 8 --samples-per-prompt 2 --eval-tasks 4 --max-tokens 48 --max-turns 3".split()


def main(argv: Sequence[str] | None = None) -> int:
    """Take all steps, and print how long each took. Returns the exit code."""
    requirements = [OPENENV, *(requirement for _, _, requirement in INSTALLED.values())]
    return in_a_folder(take_steps, requirements, __doc__, argv)


def take_steps(folder: Path, watch: Stopwatch) -> None:
    """Every step. Raises StepError."""
    rollouts = [sys.executable, "-m", "rollouts"]
    for plugin, package, _ in INSTALLED.values():
        source = PLUGINS / plugin / "tests" / "packages" / package
        with watch.step(f"rollouts env install {package}"):
            run([*rollouts, "env", "install", str(source), "--with", str(PLUGINS / plugin)], folder)
    with watch.step("a virtual environment for the server of OpenEnv"):
        run([sys.executable, "-m", "venv", "server"], folder)
        run([str(folder / "server" / "bin" / "pip"), "install", "-q", OPENENV], folder)
    with serving(folder / "server" / "bin" / "python") as url, watch.step("rollouts run, all"):
        names = [word for alias, name in ENVIRONMENTS.items() for word in ("--env", f"{alias}={name}")]
        workers = [word for alias in INSTALLED for word in ("--worker", f"{alias}=venv")]
        rewards = [word for each in REWARDS for word in ("--reward", each)]
        shop = ["--env.shop.url", f"{url}/shop", "--env.shop.unjudged", "0"]
        run([*rollouts, "run", *names, *shop, *workers, *rewards, "--loss", "grpo", *SIZE, "--out", "run"], folder)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "reward/mean" in line]
    expect(len(trained) == 2, f"the run trained {len(trained)} steps, not 2")
    print(table_of(lines))


@contextlib.contextmanager
def serving(python: Path) -> Iterator[str]:
    """The address of a server of OpenEnv on a free port. Raises StepError if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([python, SERVER, str(port), "20"], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _listens(port):
                expect(process.poll() is None and time.monotonic() < deadline, "the server of OpenEnv does not start")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def table_of(lines: Sequence[dict[str, float]]) -> str:
    """For each environment: its share of the last step, its reward, the parts of the reward, and its metrics. Raises
    StepError if an environment has no part of its own or not those of both rewards.
    """
    rows = []
    for alias, name in ENVIRONMENTS.items():
        own = {key: value for line in lines for key, value in line.items() if key.startswith(f"env/{alias}/")}
        parts, metrics = (
            {key.rpartition("/")[2]: value for key, value in own.items() if f"/{kind}/" in key}
            for kind in ("reward_part", "metric")
        )
        expect({"length", "repetition"} < set(parts), f"{alias} has only these parts of the reward: {sorted(parts)}")
        rows += [
            f"{name}: reward {own[f'env/{alias}/reward']:.3f}",
            f"    {_written(parts)}",
            f"    {_written(metrics)}",
        ]
    return "\n".join(rows)


def _written(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in sorted(values.items()))


if __name__ == "__main__":
    sys.exit(main())
