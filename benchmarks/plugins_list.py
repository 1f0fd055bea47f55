"""How much CPU time do installed plugins cost `rollouts plugins list` and `rollouts --help`?

    python benchmarks/plugins_list.py
    python benchmarks/plugins_list.py --plugins 1000 --pairs 5

The script writes generated plugins to a temporary folder: packages with metadata, a README, an environment and a
reward. It runs each command in a new process, in turn without and with this folder on the path. It shows the median CPU
time of both, and the median, smallest and largest difference of a pair. The difference is the cost of all plugins.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMMANDS = (("plugins", "list"), ("--help",), ("run", "--help"))
README = "Tasks with a tool, and a reward that checks the answer.\n" * 60
MODULE = '''"""Generated plugin {number}."""

from dataclasses import dataclass

{helpers}

@dataclass
class Environment{number}:
    """Environment {number}, with one setting. Its tasks are endless."""

    digits: int = 2

    def tasks(self, split, rng):
        """Endless tasks."""
        while True:
            yield rng.randrange(10**self.digits)


def reward_{number}(trajectory, *, target_tokens: int = 200) -> float:
    """Prefer short answers, number {number}."""
    return min(1.0, target_tokens / max(1, len(trajectory.last_text)))
'''
HELPER = '''
def helper_{number}(text: str) -> str:
    """Help."""
    words = [word for word in text.split() if word]
    return " ".join(sorted(words))
'''


def write_plugins(folder: Path, count: int) -> None:
    """Write `count` installed packages with one environment and one reward each."""
    helpers = "\n".join(HELPER.format(number=number) for number in range(20))
    for number in range(count):
        package, info = folder / f"generated_{number}", folder / f"generated_{number}-1.0.dist-info"
        package.mkdir(parents=True)
        info.mkdir()
        (package / "__init__.py").write_text(MODULE.format(number=number, helpers=helpers))
        metadata = f"Metadata-Version: 2.1\nName: generated-{number}\nVersion: 1.0\nSummary: Generated.\n\n{README}"
        (info / "METADATA").write_text(metadata)
        environment = f"[rollouts.environments]\ngenerated_{number} = generated_{number}:Environment{number}\n"
        reward = f"[rollouts.rewards]\nshort_{number} = generated_{number}:reward_{number}\n"
        (info / "entry_points.txt").write_text(environment + reward)


def cpu_ms(command: Sequence[str], *path: Path) -> tuple[float, str]:
    """The CPU time of a command in its own process in milliseconds, and its output."""
    search = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), *map(str, path)]))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "rollouts", *command],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ, PYTHONPATH=search),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), done.stdout


def measure(command: Sequence[str], folder: Path, pairs: int) -> tuple[list[float], list[float], int]:
    """CPU milliseconds without and with the plugins, pair by pair, and how many lines of the output name a plugin."""
    cpu_ms(command, folder)  # fills the caches of the file system
    without, filled, named = [], [], 0
    for _ in range(pairs):
        without.append(cpu_ms(command)[0])
        ms, output = cpu_ms(command, folder)
        filled.append(ms)
        named = sum("generated_" in line for line in output.splitlines())
    return without, filled, named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugins", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_plugins(folder, options.plugins)
        print(f"CPU ms, medians of {options.pairs} pairs; {options.plugins} generated plugins")
        for command in COMMANDS:
            without, filled, named = measure(command, folder, options.pairs)
            assert (named >= options.plugins) == (command == ("plugins", "list")), f"{named} lines name a plugin"
            cost = [b - a for a, b in zip(without, filled, strict=True)]
            print(
                f"rollouts {' '.join(command):14}  none {statistics.median(without):6.0f}  all "
                f"{statistics.median(filled):6.0f}  difference {statistics.median(cost):6.0f} "
                f"({min(cost):.0f} to {max(cost):.0f})"
            )


if __name__ == "__main__":
    main()
