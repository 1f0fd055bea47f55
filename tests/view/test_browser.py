"""The page in a real browser. Without Chromium and Playwright these tests are skipped."""

from __future__ import annotations

import shutil
import threading

import pytest

from rollouts.view.access import Access
from rollouts.view.api import ViewAPI
from rollouts.view.catalog import Catalog

playwright = pytest.importorskip("playwright.sync_api", reason="pip install -r requirements-test.txt brings Playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; `apt install chromium` brings it")
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync".split()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, make, monkeypatch):
    """Opens a page of the runs that `make` made, in a window of a width. Errors in the console fail the test."""
    import trio

    from rollouts.gateway.http_server import serve_http
    from rollouts.gateway.listening import bound_socket
    from rollouts.view.server import LIMITS, Site, _unreadable

    bound, stopping, token = bound_socket("127.0.0.1", 0, ""), trio.Event(), None
    port = bound.getsockname()[1]
    access, errors, pages = Access(port), [], {}

    async def serve():
        nonlocal token
        token = trio.lowlevel.current_trio_token()
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        site = Site(ViewAPI(Catalog([make.directory])), access)
        await serve_http(site.handle, _unreadable, [listener], LIMITS, stopping)

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()

    def open_page(where="", width=1280):
        if width not in pages:
            page = pages[width] = browser.new_context(viewport={"width": width, "height": 900}).new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            page.goto(f"http://127.0.0.1:{port}/?token={access.token}")
            page.wait_for_selector("h1")
        page = pages[width]
        run = str(make.directory / "first").replace("/", "%2F")
        if where:
            page.goto(f"http://127.0.0.1:{port}/#/" + where.replace("RUN", run))
        shown = page.url.partition("#")[2]
        page.wait_for_selector(f"main[data-shown='{'#' + shown if shown else ''}']")
        return page

    yield open_page
    for page in pages.values():
        page.context.close()
    token.run_sync_soon(stopping.set)
    thread.join(20)
    assert errors == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_hostile_replies_are_text(opened, make, make_episode):
    replies = [HOSTILE, "\u202eabc", "👩\u200d👩\u200d👧 half an emoji", "a\x00b"]
    make.run(episodes=[make_episode(number, reply=reply) for number, reply in enumerate(replies)])
    for number, reply in enumerate(replies):
        page = opened(f"run/RUN/step_000000/{number}")
        assert page.inner_text(".message:last-of-type pre").strip("\n") or reply
        assert "owned" not in page.title() and not page.query_selector("main img, main script")
    assert HOSTILE in opened("run/RUN/step_000000/0").inner_text("main")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_is_followed(opened, make):
    run = make.run(steps=2, ended=False)
    page = opened("run/RUN")
    assert "step_000002" not in page.inner_text("main")
    (run / "trajectories" / "step_000002.jsonl").write_bytes((run / "trajectories" / "step_000000.jsonl").read_bytes())
    page.wait_for_selector("text=step_000002", timeout=15_000)
