"""The pages of a new run and of training data, in a real browser."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from rollouts_view.api import ViewAPI
from rollouts_view.server import Access, open_catalog, page_of_data

from rollouts.cli import main

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
SCRIPT = f'''
def brevity(trajectory, *, target: int = 50) -> float:
    """Short replies. {HOSTILE}

    Args:
        target: the length {HOSTILE}
    """
    return 0.0
'''


@pytest.fixture
def site(browser, tmp_path, monkeypatch):
    """Opens a page of the folder `opened` in the working directory, in a window of a width. Errors fail the test."""
    import trio
    from rollouts_view.server import LIMITS, Site, _unreadable

    from rollouts.gateway.http_server import bound_socket, serve_http

    monkeypatch.chdir(tmp_path)
    Path("opened").mkdir()
    bound, stopping, tokens, ready = bound_socket("127.0.0.1", 0, ""), trio.Event(), [], threading.Event()
    port = bound.getsockname()[1]
    access, errors, contexts, threads = Access(port), [], [], []

    async def serve(catalog):
        tokens.append(trio.lowlevel.current_trio_token())
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        ready.set()
        await serve_http(Site(ViewAPI(catalog), access).handle, _unreadable, [listener], LIMITS, stopping)

    def open_page(where, width=1280, data=None):
        if not threads:
            catalog = open_catalog([Path("opened")], may_be_empty=True, data=data or {})
            threads.append(threading.Thread(target=trio.run, args=(serve, catalog)))
            threads[0].start()
            ready.wait(20)
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on(
            "request", lambda request: request.url.startswith(f"http://127.0.0.1:{port}/") or errors.append(request.url)
        )
        page.goto(f"http://127.0.0.1:{port}/?token={access.token}{where}")
        page.wait_for_selector("h1")
        return page

    open_page.expected = "no error"
    yield open_page
    for context in contexts:
        context.close()
    if threads:
        tokens[0].run_sync_soon(stopping.set)
        threads[0].join(20)
    assert [each for each in errors if open_page.expected not in each] == []


def field(page, label):
    return page.locator(f"[aria-label='{label}']")


def opened_group(page, name):
    page.locator("details.group > summary", has_text=name).click()


FILE = "document.querySelector('pre.file').textContent"


def until(page, expression, part=True):
    """Wait until an expression is true, or has a part. The policy of the page allows no `wait_for_function`."""
    for _ in range(600):
        found = page.evaluate(expression)
        if found is True if part is True else part in found:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{expression} is {found!r}")


def text(page):
    return page.inner_text("pre.file")


def test_from_the_form_to_a_file_that_the_command_takes(site, capsys):
    page = site("#/new")
    until(page, FILE, "default")
    field(page, "env: name").fill("calculator")
    field(page, "env: digits").fill("1")
    opened_group(page, "Training")
    field(page, "steps").fill("7")
    page.get_by_role("button", name="add a reward", exact=True).click()
    field(page, "reward 2: name").fill("length")
    field(page, "reward 2: alias").fill("short")
    field(page, "reward 2: weight").fill("-0.1")
    until(page, FILE, "weight = -0.1")
    assert text(page) == (
        'steps = 7\n\n[env]\nname = "calculator"\ndigits = 1\n\n[reward.env]\nname = "env"\nweight = 1.0\n\n'
        '[reward.short]\nname = "length"\nweight = -0.1'
    )
    page.check("#whole")
    assert "# Training steps." in text(page)
    page.uncheck("#whole")
    name = field(page, "Name of the file")
    name.fill("mine.toml")
    name.press("Enter")
    page.wait_for_selector("text=Wrote opened/mine.toml")
    command = page.inner_text(".command >> nth=0").splitlines()[0]
    assert command == "rollouts run opened/mine.toml --dry-run"
    assert main(command.split()[1:]) == 0
    assert "\nok" in capsys.readouterr().out and "digits = 1" in Path("opened/mine.toml").read_text()


def test_errors_are_at_the_field_and_go(site):
    page = site("#/new")
    name = field(page, "env: name")
    name.fill("calculater")
    name.press("Tab")
    opened_group(page, "Training")
    field(page, "steps").fill("4x")
    page.wait_for_selector("text=did you mean: calculator?")
    until(page, "document.querySelectorAll('[aria-invalid]').length === 2")
    steps = field(page, "steps")
    error = page.locator("#" + steps.get_attribute("aria-describedby").split()[1])
    assert 'expected a whole number; got "4x"' in error.inner_text() and error.get_attribute("aria-live") == "polite"
    assert page.is_disabled("text=write the file") and "2 to mend" in page.inner_text("#live")
    page.locator(".faults button", has_text="env").click()
    assert page.evaluate("document.activeElement.ariaLabel") == "env: name"
    name.fill("calculator")
    steps.fill("4")
    until(page, "!document.querySelector('[aria-invalid]')")
    until(page, FILE, "steps = 4")
    assert page.is_enabled("text=write the file")


@pytest.mark.nightly
def test_a_refused_name_and_a_file_that_exists(site):
    Path("opened/mine.toml").write_text("seed = 4\n")
    page = site("#/new?root=opened&file=mine.toml")
    until(page, FILE, "seed = 4")
    opened_group(page, "Training")
    field(page, "seed").fill("5")
    name = field(page, "Name of the file")
    assert name.input_value() == "mine.toml"
    site.expected = "status of 400"
    name.fill("../out.toml")
    name.press("Enter")
    page.wait_for_selector("text=expected a name below the opened folder")
    until(page, FILE, "seed = 5")
    name.fill("mine.toml")
    name.press("Enter")
    page.wait_for_selector("text=exists already")
    assert Path("opened/mine.toml").read_text() == "seed = 4\n"
    page.keyboard.press("Enter")  # the question has the focus
    page.wait_for_selector("text=Wrote opened/mine.toml")
    assert Path("opened/mine.toml").read_text() == "seed = 5\n" and not Path("out.toml").exists()


def test_a_file_is_run_when_the_user_says_so_and_its_words_are_text(site):
    Path("opened/mine.py").write_text(SCRIPT)
    page = site("#/new")
    page.get_by_role("button", name="add a reward", exact=True).click()
    name = field(page, "reward 2: name")
    name.fill("opened/mine.py:brevity")
    name.press("Tab")
    page.get_by_role("button", name="run the file").click()
    field(page, "reward 2: target").fill("x")
    page.wait_for_selector("[aria-invalid]")
    assert page.inner_text("main").count(HOSTILE) == 2
    assert "owned" not in page.title() and not page.query_selector("main img")


@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.nightly)])
def test_the_form_fits_its_window_and_has_labels(site, width):
    page = site("#/new", width)
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    field(page, "env: name").fill("calculator")
    field(page, "env: digits").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    unnamed = """[...document.querySelectorAll('main :is(input, select, textarea)')].filter((each) =>
        !each.ariaLabel && !document.querySelector(`label[for='${each.id}']`)).length"""
    assert page.evaluate(unnamed) == 0
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("learning rate")
    until(page, "[...document.querySelectorAll('.field')].filter((each) => each.offsetParent).length < 10")
    assert field(page, "lr").is_visible() and not field(page, "seed").is_visible()


ROWS = [
    {"messages": [{"role": "user", "content": "Say 3."}, {"role": "assistant", "content": f"3 {HOSTILE}"}]},
    {"messages": [{"role": "tool", "content": HOSTILE}]},
    *({"prompt": f"What is {number}?", "response": "\u202eabc 🙂"} for number in range(30)),
]


@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.nightly)])
def test_the_data_page(site, width):
    Path("chat.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    page = site(page_of_data("chat.jsonl"), width, {"chat.jsonl": {"data": {"name": "chat.jsonl"}}})
    page.wait_for_selector(".tokens span")
    page.wait_for_selector("text=1 row of 32 cannot be used")
    assert "a tool result without its call" in page.inner_text("main") and HOSTILE in page.inner_text("main")
    trained = page.eval_on_selector_all(
        ".tokens >> nth=0 >> span", "all => all.filter((each) => each.style.background.includes('0.7')).length"
    )
    page.keyboard.press("j")
    page.keyboard.press("ArrowRight")
    assert "token 0 · id " in page.inner_text("#readout") and "loss mask 0" in page.inner_text("#readout")
    assert trained == int(page.inner_text(".datum >> nth=0").partition(" trained")[0].split()[-1]) > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("]")
    page.wait_for_selector("text=chat.jsonl, line 11")
    page.locator("details.group > summary").click()
    field(page, "max_length").fill("12")
    field(page, "max_length").press("Enter")
    page.wait_for_selector("text=/max_length cut/")
    page.locator("details.group > summary").click()
    field(page, "max_length").fill("")
    field(page, "max_length").press("Enter")
    page.wait_for_selector("text=/^messages · [0-9]+ tokens, [0-9]+ trained/")
    assert "max_length cut" not in page.inner_text("main")
    assert "owned" not in page.title() and not page.query_selector("main img")


@pytest.mark.nightly
def test_data_that_cannot_be_used(site):
    Path("bad.jsonl").write_text('{"messages": [\n[1]\n\n{"a": 1}\n')
    page = site(page_of_data("bad.jsonl"), data={"bad.jsonl": {"data": {"name": "bad.jsonl"}}})
    page.wait_for_selector("text=3 rows of 3 cannot be used")
    words = page.inner_text("main")
    for each in (
        "not JSON: Expecting value (column 15)",
        "a row is a table of columns, got list",
        "no conversation in",
    ):
        assert each in words
