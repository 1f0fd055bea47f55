"""What a call into an environment costs, in the process of the run, in a worker process, and in a worker at an address.

    python benchmarks/worker_cost.py [--calls 2000] [--concurrency 16] [--characters 2000] [--ray ADDRESS]

One environment with a tool that returns text. It prints calls per second, and CPU time for each call of all processes
together: for a plain tool, and for a reward that gets a trajectory of `--characters` characters. The ways are measured
in turn in one run, so that the ratio does not depend on what else the machine does. With `--ray`, also a worker on that
Ray cluster, whose processes are not counted in the CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import trio

from rollouts.config.resolving import resolve
from rollouts.env import calls
from rollouts.env.authoring import rewards_of, tools_of
from rollouts.env.tools import run_tool
from rollouts.runs.plan import make_plan
from rollouts.types import Message, Task, ToolCall, Trajectory

ENVIRONMENT = '''\
from rollouts import Task, reward, tool


class Echo:
    def tasks(self, split, rng):
        yield Task("Say it.")

    @tool
    def say(self, text: str) -> str:
        """Say a text."""
        return text

    @reward
    def length(self, trajectory):
        return float(len(trajectory.last_text))
'''
ROUNDS = 5


def cpu_seconds() -> float:
    """CPU time of this process and of its children, those that still run included."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


async def measure(call: Callable[[], Awaitable[Any]], count: int, concurrency: int) -> tuple[float, float]:
    """Calls per second, and CPU seconds for each call."""

    async def several() -> None:
        for _ in range(count // concurrency):
            await call()

    begun, cpu = time.perf_counter(), cpu_seconds()
    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(several)
    done = count // concurrency * concurrency
    return done / (time.perf_counter() - begun), (cpu_seconds() - cpu) / done


async def make_calls(env: Any, characters: int) -> dict[str, Callable[[], Awaitable[Any]]]:
    """A tool call and a reward of a new environment object."""
    made = await calls.call(env.make_env)
    tools = {tool.name: tool for tool in tools_of(made)}
    (reward,) = rewards_of(made)
    task = Task("Say it.")
    trajectory = Trajectory(task, [*task.messages, Message("assistant", "x" * characters)])
    said = ToolCall("say", {"text": "hello"})
    return {
        "tool": lambda: run_tool(tools, said),
        "reward": lambda: calls.call(reward.function, trajectory),
    }


async def main(count: int, concurrency: int, characters: int, ray: str) -> None:
    """Measure each way in turn, and print the medians."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "echo.py"
        file.write_text(ENVIRONMENT)
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        command = [sys.executable, "-m", "rollouts", "env", "serve", f"{file}:Echo", "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - nothing else runs yet
        assert server.stdout is not None
        url = server.stdout.readline().partition(" at ")[2].split()[0]
        workers: dict[str, Any] = {"inline": "inline", "process": "process", "URL": url}
        if ray:
            workers["ray"] = {"kind": "ray", "address": ray}
        plans = {
            kind: await trio.to_thread.run_sync(make_plan, resolve({"env": f"{file}:Echo", "worker": worker}))
            for kind, worker in workers.items()
        }
        ways = {kind: await make_calls(plan.environments[0], characters) for kind, plan in plans.items()}
        for number in range(ROUNDS + 1):
            for kind, each in ways.items():
                for name, call in each.items():
                    measured = await measure(call, count, concurrency)
                    if number:  # the first round warms up
                        found.setdefault((name, kind), []).append(measured)
    print(f"{concurrency} at the same time, medians of {ROUNDS} rounds of {count} calls")
    for name in ("tool", "reward"):
        medians = {
            kind: [statistics.median(column) for column in zip(*found[name, kind], strict=True)] for kind in ways
        }
        for kind, (rate, cpu) in medians.items():
            print(f"{name:<7} {kind:<8} {rate:8.0f} calls/s   {cpu * 1e6:6.0f} µs of CPU each")
        inline = medians["inline"]
        for kind in list(workers)[1:]:
            rate, cpu = medians[kind]
            print(f"{name:<7} {kind} is {inline[0] / rate:.1f} times slower, with {cpu / inline[1]:.1f} times the CPU")
    for plan in plans.values():
        for env in plan.environments:
            if env.remote is not None:
                await trio.to_thread.run_sync(env.remote.pool.close)
    server.terminate()
    server.communicate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--characters", type=int, default=2000)
    parser.add_argument("--ray", default="", metavar="ADDRESS")
    given = parser.parse_args()
    trio.run(main, given.calls, given.concurrency, given.characters, given.ray)
