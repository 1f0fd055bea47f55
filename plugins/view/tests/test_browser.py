"""The page in a real browser. Without Chromium and Playwright these tests are skipped."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.nightly)])
def test_every_page_fits_its_window(opened, make, recorded, width):
    other = str(make.run("second", settings='mode = "rl"\nseed = 1\n'))
    pair = f"compare?run={recorded}&run={other}".replace("/", "%2F")
    pages = [
        "",
        "run/RUN",
        "run/RUN/step_000000",
        "run/RUN/step_000000/1",
        f"side?run={recorded}&file=step_000000&group=1",
    ]
    page = opened(width=width)
    for where in [*pages, pair]:
        page = opened(where, width)
        assert page.inner_text("h1")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), where
        assert page.evaluate("[...document.querySelectorAll('input, select')].every((each) => each.ariaLabel)")


def test_tokens_have_the_values_of_the_record(opened, recorded):
    page = opened("run/RUN/step_000000/1")
    page.select_option("select[aria-label=Channel]", "entropy")
    page.hover("[data-at='2']")
    words = page.inner_text("#readout")
    for each in (
        "token 2",
        "sampler logprob -0.5000",
        "trainer logprob -0.7500",
        "difference -0.2500",
        "entropy 0.5000",
    ):
        assert each in words
    assert "sum 0.875" in page.inner_text("main")
    page.hover("[data-at='0']")
    assert "entropy" not in page.inner_text("#readout")
    assert len(page.query_selector_all("select[aria-label=Channel] option")) >= 8


def test_keys_and_the_filter(opened, recorded):
    page = opened("run/RUN/step_000000/1")
    page.keyboard.press("]")
    page.wait_for_selector("text=step_000000, line 2")
    page.keyboard.press("u")
    page.wait_for_selector("input[type=search]")
    page.keyboard.press("/")
    page.keyboard.type("reward > 0.6")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=2 rows of 8")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=step_000000, line 3")


def test_hostile_replies_are_text(opened, make, make_episode):
    replies = [HOSTILE, "\u202eabc", "👩\u200d👩\u200d👧 half an emoji", "a\x00b"]
    make.run(episodes=[make_episode(number, reply=reply) for number, reply in enumerate(replies)])
    for number, reply in enumerate(replies):
        page = opened(f"run/RUN/step_000000/{number}")
        assert page.inner_text(".message:last-of-type pre").strip("\n") or reply
        assert "owned" not in page.title() and not page.query_selector("main img, main script")
    assert HOSTILE in opened("run/RUN/step_000000/0").inner_text("main")


@pytest.mark.nightly
def test_a_hundred_thousand_tokens(opened, make, make_episode):
    long = make_episode(0)
    (segment,) = long.trajectory.segments
    for stream, value in (
        (segment.tokens, 20),
        (segment.loss_mask, 1.0),
        (segment.logprobs, -0.5),
        (segment.versions, 3),
    ):
        stream.extend([value] * 100_000)
    make.run(episodes=[long])
    page = opened("run/RUN/step_000000/0")
    assert page.evaluate("document.querySelectorAll('.tokens span').length") < 20_000
    assert "over 100005 tokens" in page.inner_text("main")


def test_a_run_is_followed(opened, make):
    run = make.run(steps=2, ended=False)
    page = opened("run/RUN")
    assert "step_000002" not in page.inner_text("main")
    (run / "trajectories" / "step_000002.jsonl").write_bytes((run / "trajectories" / "step_000000.jsonl").read_bytes())
    page.wait_for_selector("text=step_000002", timeout=15_000)
