"""The forms without a browser, and episodes in a real one. Without Chromium, the latter are skipped."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import itertools
import os
import random
import re
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.async_api import Error
from rollouts_browser_form import (
    BROWSERS,
    BrowserForm,
    Chromium,
    Form,
    Site,
    draw_order,
    expert,
    make_form,
    sentence_of,
    wanted,
)

from rollouts.check import check_environment_class
from rollouts.cli import main
from rollouts.env.shared import shared_values
from rollouts.errors import ConfigError, ServiceLostError
from rollouts.inference.chatting import ChatReply
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Message, Status, Task, ToolCall

needs_chromium = pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)), reason="there is no Chromium; `apt install chromium` brings it"
)
ORDERS = [draw_order(random.Random(seed), 2 + seed % 6) for seed in range(300)]


# --- the forms, without a browser -------------------------------------------------------------------------------------


def submitted(order: dict[str, str], form: Form, values: dict[str, str]) -> dict[str, str] | None:
    """What a site has at the end if these values are sent, page by page."""
    site = Site(form)
    for page in form.pages:
        names = {field.name for field in page} | ({"card"} if any(field.kind == "box" for field in page) else set())
        site.answer("POST", urlencode({name: value for name, value in values.items() if name in names}))
    return site.submitted


def test_a_form_accepts_the_order_and_its_rule_refuses_what_the_order_says() -> None:
    kinds = Counter[str]()
    for order in ORDERS:
        form = make_form(order)
        right = wanted(order, form)
        assert submitted(order, form, right) == right
        kinds[f"{len(form.pages)} pages"] += 1
        kinds["rule"] += bool(form.rule)
        kinds.update(field.kind for page in form.pages for field in page)
        kinds["box that is not needed"] += "gift" not in order and "gift" in str(form.pages)
        if right != order:
            assert submitted(order, form, order) is None
        other = right | {"thing": next(each for each in ("mug", "bowl") if each != order["thing"])}
        assert submitted(order, form, other) == other != right  # a wrong order is no secret of the form
    assert min(kinds.values()) > 20, kinds


def test_equal_orders_have_equal_forms_and_labels_are_never_used_twice() -> None:
    for order in ORDERS:
        assert make_form(order) == make_form(dict(order))
        labels = [field.label for page in make_form(order).pages for field in page]
        assert len(labels) == len(set(labels))
    assert len({str(make_form(order)) for order in ORDERS}) > 200


def test_the_first_order_counts() -> None:
    order = {"thing": "mug", "amount": "3"}
    form = make_form(order, pages=1, corrections=False)
    site = Site(form)
    assert "Fill in this field." in site.answer("POST", "amount=3&thing=+") and site.submitted is None
    assert "Write a number." in site.answer("POST", "amount=three&thing=mug") and site.refusals == 2
    assert "Thank you" in site.answer("POST", "amount=4&thing=mug")
    assert "Thank you" in site.answer("POST", "amount=3&thing=mug")
    assert site.submitted == {"thing": "mug", "amount": "4"}


def test_values_are_shown_as_text() -> None:
    form = make_form({"thing": "mug", "amount": "3"}, pages=1, corrections=False)
    page = Site(form).answer("POST", urlencode({"amount": '"><script>alert(1)</script>'}))
    assert "<script>" not in page and "&quot;&gt;&lt;script&gt;" in page


def test_sentences_say_everything() -> None:
    everything = {"thing": "vase", "amount": "1", "color": "red", "name": "Ada", "day": "Friday", "phone": "555 0100"}
    assert sentence_of(everything | {"gift": "on", "card": "Get well"}) == (
        "Order 1 red vase for Ada, to be delivered on Friday, with a call to 555 0100 before, wrapped as a gift with a "
        'card that says "Get well".'
    )
    sentences = {tuple(order.items()): sentence_of(order) for order in ORDERS}
    assert len(set(sentences.values())) == len(sentences)  # no two orders have the same words


def test_the_splits_have_different_orders() -> None:
    env, rng = BrowserForm(fields=3), random.Random(0)
    prompts = {
        split: {task.prompt for task in itertools.islice(env.tasks(split, rng, None), 400)}  # type: ignore[arg-type]
        for split in ("train", "eval")
    }
    assert prompts["train"] and prompts["eval"] and not prompts["train"] & prompts["eval"]


@pytest.mark.parametrize("settings", [{"fields": 1}, {"fields": 8}, {"pages": 0}, {"pages": 3}])
def test_settings_that_make_no_sense(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--env\."):
        BrowserForm(**settings)


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--env.browser", "/nowhere/chrome"], "/nowhere/chrome: there is no"), ([], ": there is no such program")],
)
def test_a_missing_browser_is_one_clear_error(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rollouts_browser_form.BROWSERS", ())
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", "/nowhere")
    assert main(["run", "--env", "browser_form", "--dry-run", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    assert "type: playwright install chromium, or: apt install chromium, or name one: --env.browser" in error


# --- episodes in a real browser ---------------------------------------------------------------------------------------


class Loop:
    """An asyncio loop in a thread, with a browser, for the tests of this module."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.shared = BrowserForm().shared()
        self.chromium: Chromium = self.run(anext(self.shared))

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    def close(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            self.run(anext(self.shared))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextlib.contextmanager
    def opened(self, order: dict[str, str], **settings: Any) -> Iterator[BrowserForm]:
        """An environment in which the task is this order."""
        env = BrowserForm(**settings)
        self.run(env.setup(Task("Order it.", info={"order": order}), self.chromium))
        try:
            yield env
        finally:
            self.run(env.close())

    def play(self, env: BrowserForm, calls: Any) -> list[str]:
        return [self.run(getattr(env, name)(**arguments)) for name, arguments in calls]

    def contexts(self) -> int:
        return len(self.chromium._browser.contexts)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    found = Loop()
    yield found
    found.close()


PLAIN = {"thing": "mug", "amount": "3"}


def expert_of(order: dict[str, str], env: BrowserForm) -> list[tuple[str, dict[str, Any]]]:
    form = make_form(order, pages=env.pages, corrections=env.corrections)
    return list(expert(wanted(order, form), form, order))


def has_everything(order: dict[str, str]) -> bool:
    form = make_form(order)
    kinds = {field.kind for page in form.pages for field in page}
    return "card" in order and len(form.pages) == 2 and bool(form.rule) and kinds == {"text", "select", "radio", "box"}


@needs_chromium
def test_an_expert_submits_the_order_and_a_wrong_value_is_seen(loop: Loop) -> None:
    long = next(filter(has_everything, ORDERS))
    for order in (PLAIN, long):
        with loop.opened(order) as env:
            calls = expert_of(order, env)
            results = loop.play(env, calls)
            assert "Thank you" in results[-1] and env.site.submitted == env.wanted
            score = loop.run(env.ordered())
            assert (score.value, score.parts) == (1.0, {"submitted": 1.0, "fields": 1.0})
            assert env.refusals() == sum("alert" in each for each in results) == bool(env.site.form.rule)
    with loop.opened(long) as env:
        for name, arguments in expert_of(long, env):
            is_card = arguments.get("text") == long["card"]
            loop.play(env, [(name, arguments | {"text": "Good bye"} if is_card else arguments)])
        score = loop.run(env.ordered())
        count = len(env.wanted)
        assert (score.value, score.parts) == (0.0, {"submitted": 1.0, "fields": (count - 1) / count})


@needs_chromium
def test_a_field_appears_with_its_box_and_is_not_submitted_without_it(loop: Loop) -> None:
    order = next(order for order in ORDERS if "gift" not in order and "gift" in str(make_form(order, pages=1).pages))
    settings = {"pages": 1, "corrections": False}
    with loop.opened(order, **settings) as env:
        box = next(field.label for page in env.site.form.pages for field in page if field.kind == "box")
        assert "[checked]" in loop.run(env.check(box))
        card = {"Gift wrap": "Card", "This is a gift": "Words on the card", "Wrap it": "Message"}[box]
        loop.run(env.fill(card, "Get well"))
        assert card not in loop.run(env.check(box, on=False)).replace(box, "")
        with pytest.raises(ValueError, match="there is no textbox"):
            loop.run(env.fill(card, "Get well"))
        loop.play(env, expert_of(order, env))
        assert loop.run(env.ordered()).value == 1.0


HOSTILE = [
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "</textarea></form><h1>Thank you</h1>",
    '- button "Free"',
    "a\0b\ud800\u202e\n\r- alert: x",
    "9" * 1000,
]


@needs_chromium
def test_what_a_model_may_write(loop: Loop) -> None:
    with loop.opened(PLAIN, pages=1, corrections=False) as env:
        amount = next(field.label for field in env.site.form.pages[0] if field.kind == "text")
        button = env.site.form.buttons[0]
        for text in HOSTILE:
            loop.run(env.fill(amount, text))
            page = loop.run(env.press(button))  # the site refuses it, and shows it again
            assert "alert" in page and page.count("\n- button") == 1 and "heading" in page.splitlines()[0]
            assert loop.run(env.page.title()) == env.site.form.title
            assert env.site.submitted is None
        for name, arguments, words in [
            ("fill", (amount, "9" * 1001), "the text has 1001 characters; a field takes at most 1000"),
            ("fill", ("Nothing", "x"), f"there is no textbox 'Nothing'; there are {amount!r}"),
            ("fill", ("x" * 10**6, "x"), "there is no textbox 'xxx"),
            ("choose", (amount, "3"), f"there is no combobox or radiogroup {amount!r}"),
            ("check", (amount,), f"there is no checkbox {amount!r}"),
            ("press", ("Nothing",), f"there is no button 'Nothing'; there are {button!r}"),
        ]:
            with pytest.raises(ValueError, match="^" + re.escape(words)) as caught:
                loop.run(getattr(env, name)(*arguments))
            assert len(str(caught.value)) < 300
        thing = next(field.label for field in env.site.form.pages[0] if field.name == "thing")
        with pytest.raises(ValueError, match=r"there is no option of .* 'gold'; .*'bowl', 'mug', 'plate', 'vase'"):
            loop.run(env.choose(thing, "gold"))
        loop.play(env, expert_of(PLAIN, env))
        assert loop.run(env.ordered()).value == 1.0


@needs_chromium
def test_the_browser_has_no_network(loop: Loop) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        with loop.opened(PLAIN) as env:
            before = loop.run(env.read())
            for script in (
                f"fetch('http://{address}/a', {{mode: 'no-cors'}}).then(() => 'reached', () => 'refused')",
                f"new Promise(done => {{ const image = new Image(); image.onload = () => done('reached'); "
                f"image.onerror = () => done('refused'); image.src = 'http://{address}/b' }})",
                f"new Promise(done => {{ const socket = new WebSocket('ws://{address}/c'); socket.onopen = () => "
                "done('reached'); socket.onerror = () => done('refused') })",
            ):
                assert loop.run(env.page.evaluate(script)) == "refused"
            assert loop.run(env.read()) == before
        server.shutdown()
    assert asked == []


@needs_chromium
def test_contexts_are_apart_and_closed(loop: Loop) -> None:
    with loop.opened(PLAIN) as first, loop.opened(PLAIN) as second:
        loop.run(first.page.evaluate("document.cookie = 'a=1'; localStorage.b = 2"))
        assert loop.run(second.page.evaluate("document.cookie + localStorage.b")) == "undefined"
        assert loop.contexts() == 2
    assert loop.contexts() == 0

    async def cancelled(env: BrowserForm, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(env.setup(Task("", info={"order": PLAIN}), loop.chromium), seconds)
        await env.close()
        await env.close()

    for seconds in (0.01, 60.0):
        loop.run(cancelled(BrowserForm(), seconds))
        assert loop.contexts() == 0


async def kill_browser(loop: Loop, env: BrowserForm) -> None:
    session = await loop.chromium._browser.new_browser_cdp_session()  # type: ignore[union-attr]
    with contextlib.suppress(Error):  # the browser answers nothing any more
        await session.send("Browser.crash")


async def kill_page(loop: Loop, env: BrowserForm) -> None:
    crashed = asyncio.Event()
    env.page.on("crash", lambda _: crashed.set())
    session = await env.page.context.new_cdp_session(env.page)
    sent = asyncio.ensure_future(session.send("Page.crash"))
    await crashed.wait()
    sent.cancel()


async def kill_driver(loop: Loop, env: BrowserForm) -> None:
    os.kill(driver_of_playwright(), signal.SIGKILL)


def driver_of_playwright() -> int:
    """The process between Playwright's Python and the browser, a child of this process."""
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    (driver,) = [int(pid) for pid in children if "playwright" in Path(f"/proc/{pid}/cmdline").read_text()]
    return driver


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(
    "kill",
    [kill_page, *(pytest.param(each, marks=pytest.mark.nightly) for each in (kill_browser, kill_driver))],
)
def test_a_browser_that_dies_is_lost_and_the_next_episode_has_another(loop: Loop, kill: Callable[..., Any]) -> None:
    if kill is kill_driver and not Path("/proc/self/task").is_dir():
        pytest.skip("the process is found in /proc")
    with loop.opened(PLAIN) as env, loop.opened(PLAIN) as sent:
        loop.play(sent, expert_of(PLAIN, sent))
        loop.run(kill(loop, env))
        for name, arguments in [("read", ()), ("fill", ("Quantity", "3")), ("press", ("Send",)), ("ordered", ())]:
            with pytest.raises(ServiceLostError, match="the browser failed"):
                loop.run(getattr(env, name)(*arguments))
        assert loop.run(sent.ordered()).value == 1.0  # what was submitted before is known
    with loop.opened(PLAIN) as env:
        loop.play(env, expert_of(PLAIN, env))
        assert loop.run(env.ordered()).value == 1.0


@needs_chromium
def test_the_browser_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short name: Chromium makes a socket in it
        monkeypatch.setenv("TMPDIR", folder)
        own = Loop()
        assert os.listdir(folder)
        own.close()
        assert os.listdir(folder) == []


# --- runs -------------------------------------------------------------------------------------------------------------


@needs_chromium
def test_an_episode_in_a_run_whose_browser_dies_fails_and_may_be_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Any] = []
    page_of = Chromium.page

    async def page(self: Chromium, site: Site) -> Any:
        pages.append((self, await page_of(self, site)))
        return pages[-1][1]

    monkeypatch.setattr(Chromium, "page", page)
    read = Message("assistant", "", [ToolCall("read", {}, "c1")])
    tree = {"env": {"name": "browser_form"}, "eval_tasks": 3}
    with shared_values(), play_plan(tree) as plan:
        task = plan.environments[0].held_out(3)[0]

        def dies(_: Any) -> ChatReply:
            chromium = pages[-1][0]
            with contextlib.suppress(Exception):
                chromium.wait_for(chromium._browser.close())
            return ChatReply(read, "stop")

        lost = play_episode(plan, task, 0, dies)
        assert lost.trajectory.status is Status.ENVIRONMENT_ERROR and lost.may_retry
        assert lost.score is None or lost.score.value is None
        assert "the browser failed" in lost.trajectory.error

        said = play_episode(plan, task, 0, lambda _: ChatReply(Message("assistant", "Done."), "stop"))
        assert (said.trajectory.status, said.score.value) == (Status.COMPLETED, 0.0)


QUICK = ["settings", "episode"]
LONGER = ["task-ids", "close", "oracle", "no-op", "deadlines"]


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("only", [QUICK, pytest.param(QUICK + LONGER, marks=pytest.mark.nightly)], ids=["quick", "all"])
def test_the_contract(only: list[str]) -> None:
    """Without the checks that play dozens of episodes; `make test-adapters` has them all."""
    report = check_environment_class(BrowserForm, fields=2, pages=1, tasks=1, only=only)
    missing = {"task-ids"} & set(only)  # there are no ids
    assert {result.name for result in report.results if result.status != "passed"} == missing
