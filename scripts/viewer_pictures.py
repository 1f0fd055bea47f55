"""Take the pictures of docs/viewer.md in Chromium, of two short runs. Needs Playwright (requirements-test.txt).

python scripts/viewer_pictures.py --runs runs/pictures --out docs/pictures
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import sync_playwright

RUN = "run --env calculator --loss grpo --steps 40 --prompts-per-step 8 --samples-per-prompt 4 --record tokens"
VARIANTS = {"first": "", "second": "--lr 1e-3 --kl k3_loss --kl.coef 0.01"}
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
    with subprocess.Popen([*rollouts, "view", str(given.runs)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found, "the server printed no link"
        try:
            take(found[0], f"run/{quote(str(given.runs / 'first'), safe='')}", given)
        finally:
            server.terminate()


def take(link: str, run: str, given: argparse.Namespace) -> None:
    """One picture of each page."""
    base = link.partition("?")[0] + "#/"
    name = quote(str(given.runs / "first"), safe="")
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": 760})
        page.goto(link)
        page.wait_for_selector("svg.chart")
        page.screenshot(path=given.out / "runs.png")
        page.goto(f"{base}{run}/{STEP}")
        page.wait_for_selector(f"text={STEP}")
        page.wait_for_timeout(500)
        page.screenshot(path=given.out / "step.png")
        page.set_viewport_size({"width": 1280, "height": 1440})
        page.click("tbody tr:has(td:text-is('2')) a")  # the first rollout with two turns
        page.wait_for_selector(".tokens")
        line = page.url.rpartition("/")[2]
        page.select_option("select[aria-label=Channel]", "entropy")
        page.hover(".tokens span:not(.none) >> nth=4")
        page.screenshot(path=given.out / "rollout.png")
        page.goto(f"{base}side?run={name}&file={STEP}&group={line}")
        page.wait_for_selector(".side")
        page.screenshot(path=given.out / "group.png", clip={"x": 0, "y": 0, "width": 1280, "height": 480})
        chromium.close()


if __name__ == "__main__":
    main()
