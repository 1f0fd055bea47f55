"""Take the pictures of docs/viewer.md in Chromium, of two short runs and of conversations. Needs Playwright
(requirements-test.txt).

python scripts/viewer_pictures.py --runs runs/pictures --out docs/pictures
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page, sync_playwright

RUN = "run --env calculator --loss grpo --steps 40 --prompts-per-step 8 --samples-per-prompt 4 --record tokens"
VARIANTS = {
    "first": "--kl k3_loss --kl.coef 0.01 --eval-tasks 64",
    "second": "--lr 1e-3 --max-tokens 20 --filter nonzero_std --staleness 1 --eval-tasks 64",
}
STEP = "step_000012"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/pictures"))
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    given = parser.parse_args()
    rollouts = [sys.executable, "-m", "rollouts"]
    for name, flags in VARIANTS.items():
        if not (given.runs / name).exists():
            subprocess.run([*rollouts, *RUN.split(), *flags.split(), "--out", str(given.runs / name)], check=True)
    given.out.mkdir(parents=True, exist_ok=True)
    with served(str(given.runs)) as link:
        take(link, given)
    with served("--new", str(given.runs)) as link:
        take_form(link, given)
    data = given.runs / "chat.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    with served(str(data), "--data.max-length", "160") as link:
        take_data(link, given)


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[str]:
    """`rollouts view` with these arguments; its link."""
    command = [sys.executable, "-m", "rollouts", "view", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found, "the server printed no link"
        try:
            yield found[0]
        finally:
            server.terminate()


def conversations() -> Iterator[dict[str, object]]:
    """Rows to train on; one of them cannot be used."""
    rng = random.Random(0)
    for number in range(200):
        a, b = rng.randrange(100), rng.randrange(10 ** rng.randrange(1, 4))
        thinking = " ".join(f"{a} times {digit} is {a * int(digit)}." for digit in str(b) * rng.randrange(1, 4))
        messages = [
            {"role": "system", "content": "You are a calculator."},
            {"role": "user", "content": f"What is {a} * {b}?"},
            {"role": "assistant", "content": f"<think>\n{thinking}\n</think>\n\n{a * b}"},
        ]
        if number % 2:
            messages += [{"role": "user", "content": "Are you sure?"}, {"role": "assistant", "content": "Yes."}]
        yield {"messages": messages[:2] if number == 2 else messages}


@contextlib.contextmanager
def window(link: str, height: int) -> Iterator[Page]:
    """A page of Chromium that has opened a link."""
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": height})
        page.goto(link)
        yield page
        chromium.close()


def take_form(link: str, given: argparse.Namespace) -> None:
    """The form of a new run, with a mistake."""
    with window(link, 900) as page:
        page.fill("input[aria-label='env: name']", "calculator")
        page.fill("input[aria-label='env: digits']", "3")
        page.click("text=add a reward")
        page.fill("input[aria-label='reward 2: name']", "length")
        page.fill("input[aria-label='reward 2: weight']", "-0.1")
        page.fill("input[aria-label='reward 2: most']", "50")
        page.check("#only-set")
        page.wait_for_selector("pre.file:has-text('most = 50')")
        page.fill("input[aria-label='env: digits']", "three")
        page.wait_for_selector("text=expected a whole number")
        page.screenshot(path=given.out / "new.png")


def take_data(link: str, given: argparse.Namespace) -> None:
    """Training data, with a row that cannot be used."""
    with window(link, 1200) as page:
        page.wait_for_selector("text=All 200 rows", timeout=120_000)
        page.wait_for_selector(".tokens")
        page.hover(".tokens span >> nth=40")
        page.screenshot(path=given.out / "data.png")


def take(link: str, given: argparse.Namespace) -> None:
    """One picture of each page."""
    first, second = (quote(str(given.runs / name), safe="") for name in VARIANTS)
    with window(link, 760) as page:

        def picture(name: str, where: str, height: int) -> None:
            """A picture of the upper part of a page."""
            page.set_viewport_size({"width": 1280, "height": height})
            page.goto(f"{link.partition('?')[0]}#/{where}")
            page.wait_for_selector(f"main[data-shown='#/{where}']")
            page.wait_for_timeout(300)
            page.screenshot(path=given.out / f"{name}.png")

        picture("runs", "", 660)
        picture("run", f"run/{first}", 860)
        picture("step", f"run/{first}/{STEP}", 700)
        page.click("tbody tr:has(td:text-is('2')) a")  # the first rollout with two turns
        page.wait_for_selector(".tokens")
        line = page.url.rpartition("/")[2]
        page.set_viewport_size({"width": 1280, "height": 1440})
        page.select_option("select[aria-label=Channel]", "entropy")
        page.hover(".tokens span:not(.none) >> nth=4")
        page.screenshot(path=given.out / "rollout.png")
        picture("group", f"side?run={first}&file={STEP}&group={line}", 520)
        picture("compare", f"compare?run={first}&run={second}", 1260)
        picture("health", f"run/{second}/health?at={STEP}", 1400)


if __name__ == "__main__":
    main()
