"""Odd runs in a real browser: live, damaged, empty, old, changed and hostile ones. Needs Chromium."""

from __future__ import annotations

import json
import os

import pytest

import rollouts
from rollouts.cli import main
from rollouts.runs.times import EpisodeSpan, StepTimes
from rollouts.types import Message

pytestmark = pytest.mark.slow
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
HEBREW = "שלום, התשובה היא 4"


def write_times(run, name="step_000000"):
    """Times of a file: rollout 0 of group 0 made two requests."""
    spans = [EpisodeSpan(0, 0, 0, 0.1, 0.5, [(0.1, 0.2), (0.3, 0.4)]), EpisodeSpan(1, 0, 1, 0.1, 0.6, [(0.1, 0.6)])]
    times = StepTimes(1.7e9, [("wait", 0.0, 0.6), ("train", 0.6, 1.0)], spans)
    (run / "trajectories" / f".{name}.times").write_bytes(rollouts.encoding.encode(times))


@pytest.mark.nightly
def test_a_run_is_followed_while_it_trains(opened, make):
    page = opened()  # before there is a run
    seen = []

    def on_step(finished):
        if finished.step == 0:
            opened("run/RUN/health")
        if finished.step == 1:
            page.wait_for_selector("text=step_000000")  # its timeline
            opened("run/RUN")
            page.wait_for_selector(".state.running")
        if finished.step == 2:
            page.wait_for_selector("a:has-text('step_000001')")
            seen.append(page.inner_text("main"))

    make.directory.mkdir(exist_ok=True)
    small = {"prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 0}
    rollouts.run(env="calculator", loss="grpo", steps=4, out=str(make.directory / "first"), on_step=on_step, **small)
    assert len(seen) == 1 and "step_000003" not in seen[0]
    page.wait_for_selector("a:has-text('step_000003')")
    page.wait_for_selector(".state.done")


def test_health(opened, make):
    run = make.run(steps=2)
    lines = [
        {"step": step, "sync/version": step + 1, "sync/probe": 0.002 * step, "sync/seconds": 1.5, "sync/bytes": 2048.0,
         "time/wait": 0.6, "perf/gen_tok_s": 3505.17, "staleness/mean": 0.0}
        for step in range(2)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_times(run, "step_000000")
    write_times(run, "step_000001")
    page = opened("run/RUN/health")
    words = page.inner_text("main")
    assert "step_000001" in words and "training 0.4" in words and "waiting for rollouts 0.6" in words
    assert "After each of 2 syncs" in words and "0.002000 nats at most" in words and "2 KiB each" in words
    assert "Always 0: staleness/mean" in words and "3505" in words
    page.keyboard.press("[")
    page.wait_for_selector("h3:text('step_000000')")
    page.focus("svg.timeline")
    page.keyboard.press("ArrowDown")
    assert "rollout 0 of group 0" in page.inner_text("main")
    assert "2 requests to the model, 0.200 s" in page.inner_text("main")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=step_000000, line 1")


@pytest.mark.nightly
def test_a_damaged_run(opened, recorded, make):
    opened.expected = "the server responded with a status of 400"
    file = recorded / "trajectories" / "step_000000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b'{"group": 0\n', *lines[2:7], lines[7][:40]]))
    page = opened("run/RUN/step_000000")
    page.click("summary")
    assert "2 lines damaged" in page.inner_text("main") and "line 2:" in page.inner_text("main")
    assert "line 2 is damaged" in opened("run/RUN/step_000000/1").inner_text("[role=alert]")
    tokens = recorded / "trajectories" / "step_000000.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-5])
    assert "is damaged" in opened("run/RUN/step_000000/0").inner_text("main")
    (recorded / "trajectories" / ".step_000000.times").write_text("{")
    assert "is damaged" in opened("run/RUN/health").inner_text("[role=alert]")
    (recorded / "config.toml").write_text("mode = ")
    (recorded / "metrics.jsonl").write_text("nonsense\n")
    page = opened("run/RUN")
    assert "Its settings cannot be read." in page.inner_text("main") and "damaged" in page.inner_text(".state")


@pytest.mark.nightly
def test_an_empty_run_and_an_old_one(opened, make):
    run = make.run()
    new = (run / "trajectories" / "step_000000.jsonl").read_text().splitlines()
    old = ("group", "rollout", "task", "status", "reward", "messages")
    (run / "trajectories" / "step_000000.jsonl").write_text(
        "".join(json.dumps({key: json.loads(line)[key] for key in old}) + "\n" for line in new)
    )
    (run / "manifest.json").write_text('{"rollouts": "0.0.1"}')
    assert "8 rows" in opened("run/RUN/step_000000").inner_text("main")
    assert "What is 2 + 0?" in opened("run/RUN/step_000000/0").inner_text("main")
    assert "earlier versions have none" in opened("run/RUN/health").inner_text("main")
    for file in (run / "trajectories").iterdir():
        file.unlink()
    (run / "metrics.jsonl").unlink()
    page = opened("run/RUN")
    page.reload()
    page.wait_for_selector("text=No trajectories yet.")
    page.wait_for_selector("text=No metrics yet.")
    opened("run/RUN/health").wait_for_selector("text=No metrics yet.")


@pytest.mark.nightly
def test_a_file_that_changes_under_it(opened, make):
    run = make.run()
    opened.expected = "the server responded with a status of 4"
    file = run / "trajectories" / "step_000000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    page = opened("run/RUN/step_000000")
    assert "8 rows" in page.inner_text("main")
    file.write_bytes(b"".join(lines[:3]))
    page.wait_for_selector("text=3 rows")
    file.write_bytes(b"".join(lines[:2]) + lines[2][:-100])  # cut off, in the middle of a line
    page.wait_for_selector("text=2 rows")
    page.wait_for_selector("text=1 line damaged")
    file.write_bytes(b"".join(lines * 2))
    page.wait_for_selector("text=16 rows")
    assert "has no line 40" in opened("run/RUN/step_000000/40").inner_text("[role=alert]")
    os.remove(file)
    assert "has no trajectories step_000000" in opened("run/RUN/step_000000/0").inner_text("[role=alert]")


@pytest.mark.nightly
def test_hostile_words_everywhere(opened, make, make_episode):
    hostile = make_episode(0, reply=HOSTILE)
    hostile.trajectory.messages[1].tool_calls[0].arguments[HOSTILE] = HOSTILE * 9  # a long call is folded
    hostile.trajectory.messages[2] = Message("tool", HOSTILE * 40, name=HOSTILE)
    hostile.trajectory.error = hostile.task.prompt = HOSTILE
    hostile.score.parts[HOSTILE] = 1.0
    run = make.run(episodes=[hostile, make_episode(1)])
    (run / "labels.json").write_text(json.dumps({"tags": [HOSTILE.replace(" ", "")], "note": HOSTILE}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, HOSTILE: 1.0, "reward/mean": 0.5}) + "\n")
    side = f"side?run={run}&file=step_000000&group=1".replace("/", "%2F")
    pages = ["", "run/RUN", "run/RUN/health", "run/RUN/step_000000", "run/RUN/step_000000/0", side]
    for where in pages:
        page = opened(where)
        assert "<script>" in page.inner_text("main") or where.endswith("/0") or where == "run/RUN", where
        assert "owned" not in page.title() and not page.query_selector("main img, main script"), where
    page = opened("run/RUN/step_000000/0")
    for summary in page.query_selector_all("summary"):
        summary.click()
    assert page.inner_text("main").count(HOSTILE) >= 40
    assert "owned" not in page.title() and not page.query_selector("main img, main script")


@pytest.mark.nightly
def test_right_to_left_words(opened, make, make_episode):
    run = make.run(episodes=[make_episode(0, reply=HEBREW), make_episode(1)])
    line = (run / "trajectories" / "step_000000.jsonl").read_text().replace("What is 2 + 0?", HEBREW)
    (run / "trajectories" / "step_000000.jsonl").write_text(line)
    page = opened("run/RUN/step_000000/0")
    direction = "(each) => getComputedStyle(each).direction"
    assert page.eval_on_selector(".message.assistant:last-of-type pre", direction) == "rtl"
    assert page.eval_on_selector(".message.user pre", direction) == "rtl"
    assert page.eval_on_selector(".tokens", direction) == "ltr"
    assert page.eval_on_selector(".tokens span", "(each) => getComputedStyle(each).unicodeBidi") == "isolate"
    page = opened("run/RUN/step_000000")
    assert page.eval_on_selector("td.long", direction) == "rtl"


@pytest.mark.nightly
def test_an_emoji_in_several_tokens(opened, make, make_episode):
    from rollouts.models.loading import load_tokenizer

    text = "a 👩\u200d🔬 b"
    ids = load_tokenizer("tiny")(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text)  # bytes
    episode = make_episode(0, reply=text)
    (segment,) = episode.trajectory.segments
    segment.tokens[2:] = ids
    segment.loss_mask[2:], segment.logprobs[2:], segment.versions[2:] = (
        [1.0] * len(ids),
        [-0.5] * len(ids),
        [3] * len(ids),
    )
    make.run(episodes=[episode])
    page = opened("run/RUN/step_000000/0")
    shown = page.eval_on_selector_all(".tokens span", "(all) => all.map((each) => each.textContent)")
    assert len(shown) == 2 + len(ids) and "\ufffd" not in "".join(shown)
    assert "👩" in "".join(shown) and "🔬" in "".join(shown) and "·" in shown
    assert text in page.inner_text(".message.assistant:last-of-type pre")


@pytest.mark.nightly
def test_two_viewers_at_once(browser, serve, make):
    make.run()
    context = browser.new_context()
    pages = [context.new_page(), context.new_page()]
    for page in pages:
        page.goto(serve(make.directory))
        page.wait_for_selector("text=1 run,")
    for page in pages:  # each still has its own cookie
        page.reload()
        page.wait_for_selector("text=1 run,")
    context.close()


def test_a_screen_reader_finds_names(opened, recorded):
    for where in ("", "run/RUN", "run/RUN/health", "run/RUN/step_000000", "run/RUN/step_000000/1"):
        page = opened(where, scheme="dark")
        nameless = page.evaluate(
            """[...document.querySelectorAll('button, a, input, select, svg[role], summary, th')].map((each) =>
            each.ariaLabel || each.textContent || each.closest('label') ? '' : each.outerHTML).filter(Boolean)"""
        )
        assert nameless == [], where
        assert page.locator("main").count() == page.locator("h1").count() == 1
        assert page.evaluate("document.activeElement.id") == "main"


@pytest.mark.nightly
def test_curves_by_keyboard(opened, make):
    make.run(steps=3)
    page = opened("run/RUN")
    page.focus("svg.chart")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert "reward/mean · step 1: 0.100" in page.text_content("svg.chart")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('step_000001')")
    page.keyboard.press("u")
    page.wait_for_selector("text=Trajectories")
    page.keyboard.press("u")
    page.wait_for_selector("h1:text-is('Runs')")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Trajectories")


def test_an_exported_file(browser, make, tmp_path):
    run = make.run(steps=2)
    write_times(run, "step_000001")
    target, errors, asked = tmp_path / "run.html", [], []
    assert main(["view", str(run), "--export", str(target)]) == 0
    page = browser.new_page(offline=True)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request", lambda request: errors.append(request.url) if not request.url.startswith(("file:", "data:")) else 0
    )
    page.goto(target.as_uri())
    page.wait_for_selector("text=Trajectories")
    page.click("a:text-is('Health')")
    page.wait_for_selector("svg.timeline")
    page.click("nav a >> nth=0")
    page.click("a:text-is('step_000001')")
    page.click("tbody tr >> nth=1 >> a >> nth=0")
    page.wait_for_selector("text=step_000001, line 1")
    page.close()
    assert errors == [] and all(url.startswith(("file:", "data:")) for url in asked)
