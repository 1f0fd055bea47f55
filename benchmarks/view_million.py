"""How fast `rollouts view` shows a step of a million trajectories in Chromium, and how much memory its server takes.

    python benchmarks/view_million.py --out /tmp/million            # writes 1.8 GB, and removes it at the end
    python benchmarks/view_million.py --out /tmp/million --keep

Times are from the navigation in the browser to the first frame that shows the result, as the browser measures them. On
a busy machine, look at the CPU seconds of the server.
Needs Playwright and Chromium.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from playwright.sync_api import Page, sync_playwright
from read_one import write_run

from rollouts.runs.times import write_index

FILTERS = (
    "reward < 0.5",
    "reward > 0.5 and tokens > 60",
    '"70" in task',
    "abs(advantage) > 0.1 and sampled in [10, 20, 30]",
    "turns == None",
)
SHOWN = """async ([hash, selector]) => {
    const begin = performance.now();
    location.hash = hash;
    await new Promise((done) => {
        const main = document.querySelector("main");
        const isShown = () => main.dataset.shown === hash && main.querySelector(selector);
        const look = () => (isShown() ? done() : requestAnimationFrame(look));
        look();
    });
    return performance.now() - begin;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the run")
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--keep", action="store_true", help="keep the run, and use it again")
    given = parser.parse_args()
    run = given.out / "million"
    if not run.exists():
        folder, lengths = write_run(run, given.lines, random.Random(0))
        write_index(run / "trajectories" / "step_000000.jsonl", lengths)
        folder.close()
    size = (run / "trajectories" / "step_000000.jsonl").stat().st_size
    print(f"{given.lines} trajectories, {size / 1e9:.2f} GB")
    try:
        with served(given.out) as (link, process), sync_playwright() as started:
            chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            measure(chromium.new_page(), link, f"#/run/{quote(str(run), safe='')}", process.pid)
            chromium.close()
    finally:
        if not given.keep:
            shutil.rmtree(run)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Any]]:
    """A server of the runs in a folder, in a process of its own."""
    command = [sys.executable, "-m", "rollouts", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the server printed no link"
        try:
            yield found[0], process
        finally:
            process.terminate()


def measure(page: Page, link: str, run: str, pid: int) -> None:
    """Print the figures."""
    page.set_default_timeout(1_800_000)  # a busy machine
    began = time.perf_counter()
    page.goto(link)
    page.wait_for_selector("tbody tr")
    print(f"the list of runs, from the link on: {time.perf_counter() - began:.2f} s")
    show(page, "the page of the run", run, "h1")
    table = f"{run}/step_000000"
    began = time.perf_counter()
    show(page, "the first rows of the step", table, "tbody tr")
    show(page, "a rollout, while the rest is being read", f"{table}/777777", ".tokens span")
    show(page, "another one", f"{table}/123456", ".tokens span")
    show(page, "a filter, while the rest is being read", f"{table}?where=reward+%3E+0.25", "tbody tr")
    page.goto(link.partition("?")[0] + table)
    page.wait_for_selector("main:not(:has-text('reading:'))")
    print(f"all rows were read after: {time.perf_counter() - began:.1f} s, {cpu_of(pid):.1f} s of the server's CPU")
    before = cpu_of(pid)
    filters = [time_of(page, f"{table}?where={quote(each)}", "main .quiet") for each in FILTERS]
    used = (cpu_of(pid) - before) / len(FILTERS)
    print(
        f"a filter over all rows: {statistics.median(filters):.2f} s, {max(filters):.2f} s at most; "
        f"{used:.2f} s of the server's CPU"
    )
    show(page, "sorted by a column", f"{table}?sort=tokens&desc=1", "tbody tr")
    show(page, "the last rows", f"{table}?from=999900", "tbody tr")
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found
    print(f"the server took {int(found[1]) / 1024:.0f} MiB at most")


def cpu_of(pid: int) -> float:
    """The seconds of CPU that a process has used."""
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def show(page: Page, words: str, where: str, selector: str) -> None:
    """Print how long a page takes to show something."""
    print(f"{words}: {time_of(page, where, selector):.2f} s")


def time_of(page: Page, where: str, selector: str) -> float:
    """The seconds until the page of an address has an element."""
    milliseconds: float = page.evaluate(SHOWN, [where, selector])
    return milliseconds / 1000


if __name__ == "__main__":
    main()
