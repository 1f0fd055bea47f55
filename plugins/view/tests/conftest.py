"""Runs to look at, written as a run writes them."""

from __future__ import annotations

import json
import shutil
import threading
from array import array

import pytest
import trio
from rollouts_view.api import ViewAPI
from rollouts_view.catalog import Catalog
from rollouts_view.server import LIMITS, Access, Site, _unreadable

from rollouts.gateway.http_server import bound_socket, serve_http
from rollouts.runs.folder import CONFIG, RunFolder, episode_records
from rollouts.runs.token_files import TokenSpan, TokenTable, encode_table
from rollouts.types import Episode, Message, Score, Segment, Status, Task, ToolCall, Trajectory

HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
PROMPT, REPLY = 2, 3
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync".split()


def episode(
    number: int, *, reward: float | None = None, reply: str = "4", status: Status = Status.COMPLETED
) -> Episode:
    """Rollout `number` of groups of four. The reward is the number of the rollout, over four."""
    reward = number % 4 / 4 if reward is None else reward
    tokens = [1, 75, 300 + number % 100, 20, 2]
    mask = [0.0] * PROMPT + [1.0] * REPLY
    segment = Segment(tokens, mask, [0.0, 0.0, -0.5, -0.25, -1.5], [-1, -1, 3, 3, 4], [(0, PROMPT)])
    task = Task(f"What is 2 + {number // 4}?", answer=2 + number // 4)
    call = ToolCall("calculator", {"expression": "2 + 2"})
    messages = [*task.messages, Message("assistant", "", [call]), Message("tool", "4"), Message("assistant", reply)]
    trajectory = Trajectory(task, messages, [segment], status)
    return Episode(
        (number // 4, number % 4), task, [trajectory], Score(reward, {"correct": reward}, "", {"correct": 1.0}), {}
    )


class Maker:
    """Makes runs in a directory."""

    def __init__(self, directory):
        self.directory = directory

    def run(
        self, name="first", *, episodes=(), steps=1, settings='mode = "rl"\nmodel = "tiny"\nseed = 0\n', ended=True
    ):
        """A run with these episodes in each of its steps and in its last evaluation."""
        folder = RunFolder(self.directory / name)
        folder.write_text(CONFIG, settings)
        episodes = list(episodes) or [episode(number) for number in range(8)]
        for step in range(steps):
            folder.write_trajectories(f"step_{step:06d}", self.records(episodes))
        folder.write_trajectories(f"eval_{steps:06d}", [each | {"temperature": 1.0} for each in self.records(episodes)])
        lines = [{"step": step, "reward/mean": step / 10, "policy/loss": -step} for step in range(steps)]
        folder.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        if ended:
            folder.write_json("summary.json", {"status": "done", "steps": steps})
        folder.close()
        return folder.path

    def records(self, episodes):
        """The lines of these episodes."""
        return [line for each in episodes for line in episode_records(each, advantage=0.5)]

    def tokens(self, run, name, table):
        """Write the values of tokens beside a file."""
        folder = RunFolder.reopen(run)
        folder.write_tokens(name, encode_table(table))
        folder.close()


@pytest.fixture
def make(tmp_path):
    """A maker of runs in `tmp_path/runs`."""
    return Maker(tmp_path / "runs")


@pytest.fixture
def asked(make):
    """Asks the API of the runs that `make` made: `asked("/api/runs")`. RUN in a path is the run `first`."""
    apis = []

    def ask(path, query="", body=b"", method="GET"):
        apis.append(apis[0] if apis else ViewAPI(Catalog([make.directory])))
        quoted = str(make.directory / "first").replace("/", "%2F")
        return json.loads(apis[0].answer(method, path.replace("RUN", quoted), query, body))

    return ask


@pytest.fixture
def recorded(make):
    """A run whose first step has recorded tokens; line 1 has values at its three sampled tokens."""
    run = make.run()
    channels = {
        "position": array("I", [2, 3, 4]),
        "logprob": array("f", [-0.75, -0.25, -1.0]),
        "entropy": array("f", [0.5, 0.25, 0.125]),
        "clipped": array("B", [0, 1, 0]),
    }
    make.tokens(run, "step_000000", TokenTable([TokenSpan(1, 0, 0, 3)], channels))
    return run


@pytest.fixture
def make_episode():
    """The function that makes an episode."""
    return episode


@pytest.fixture(scope="module")  # while it is open, asyncio has a running loop in this thread
def browser():
    """Chromium. Tests that need it are skipped if it or Playwright is missing."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="pip install -r requirements-test.txt has Playwright"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("there is no Chromium; `apt install chromium` brings it")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def serve():
    """Serves the runs of a directory in a thread until the test ends; returns the link."""
    running = []

    def begin(directory):
        bound, stopping, ready = bound_socket("127.0.0.1", 0, ""), trio.Event(), threading.Event()
        port, tokens = bound.getsockname()[1], []
        access = Access(port)

        async def main():
            tokens.append(trio.lowlevel.current_trio_token())
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
            ready.set()
            site = Site(ViewAPI(Catalog([directory])), access)
            await serve_http(site.handle, _unreadable, [listener], LIMITS, stopping, site.admit)

        thread = threading.Thread(target=trio.run, args=(main,))
        thread.start()
        ready.wait(20)
        running.append((thread, tokens[0], stopping))
        return f"http://127.0.0.1:{port}/?token={access.token}"

    yield begin
    for thread, token, stopping in running:
        token.run_sync_soon(stopping.set)
        thread.join(20)


@pytest.fixture
def opened(browser, serve, make):
    """Opens a page of the runs that `make` made, in a window of a width. Errors in the console fail the test, unless
    they are in `opened.expected`.
    """
    link, errors, pages = serve(make.directory), [], {}

    def open_page(where="", width=1280, scheme="light"):
        if width not in pages:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = pages[width] = context.new_page()
            page.set_default_timeout(90_000)  # a busy machine
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            page.goto(link)
            page.wait_for_selector("h1")
        page = pages[width]
        run = str(make.directory / "first").replace("/", "%2F")
        if where:
            page.goto(link.partition("?")[0] + "#/" + where.replace("RUN", run))
        shown = page.url.partition("#")[2]
        page.wait_for_selector(f"main[data-shown='{'#' + shown if shown else ''}']")
        return page

    open_page.expected = ""
    yield open_page
    for page in pages.values():
        page.context.close()
    assert [each for each in errors if not open_page.expected or open_page.expected not in each] == []
