"""Limits of dollars and tokens, and kept replies, for an API behind which a server counts what it was really asked."""

from __future__ import annotations

import hashlib
import http.server
import json
import random
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from rollouts_servers import openai
from rollouts_servers.http import Retries
from rollouts_servers.openai import OpenAIInference, OpenAIOptions
from rollouts_servers.spending import SpendingStore

from rollouts.cli import main
from rollouts.errors import BudgetSpentError, RunError
from rollouts.inference.base import Spending
from rollouts.inference.chatting import ChatRequest
from rollouts.types import Message

ENVIRONMENT = """\
from rollouts import Task, reward

class Words:
    def tasks(self, split, rng):
        return [Task(f"{split} {i}: say a word") for i in range(40)]
    def reply(self, trajectory):
        return "And another." if trajectory.turns < 2 else None
    @reward
    def long(self, trajectory):
        return float(len(trajectory.last_text) > 3)
"""
PRICES = (2.0, 10.0)


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setattr(openai, "RETRIES", Retries(first_seconds=0.001, longest_seconds=0.002))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.py").write_text(ENVIRONMENT)


class Bill:
    """What the server would bill: it counts its own tokens, in any order in which requests come."""

    def __init__(self, fails=0.0, reports=True, waits=0.0, longest=40, least=10):
        self.tokens, self.requests, self.bodies = [0, 0], 0, []
        self.lock, self.rng = threading.Lock(), random.Random(0)
        self.fails, self.reports, self.waits, self.longest, self.url = fails, reports, waits, longest, ""
        self.least, self.most_in_flight, self.in_flight = least, 0, 0

    @property
    def dollars(self):
        return (self.tokens[0] * PRICES[0] + self.tokens[1] * PRICES[1]) / 1e6

    def answer(self, body):
        """The status, the body, and whether the connection is cut off within the reply."""
        with self.lock:
            self.requests += 1
            self.bodies.append(body)
            fault = self.rng.random() < self.fails and self.rng.choice(["status", "cut"])
            if fault == "status":
                return 503, b"busy", False
            asked = self.rng.randint(self.least, 60 if self.least > 0 else -1)
            used = asked, self.rng.randint(1, min(self.longest, body["max_tokens"]))
            self.tokens = [self.tokens[0] + used[0], self.tokens[1] + used[1]]
            text = "x" * self.rng.randint(1, 9)
        found = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
        if self.reports:
            found["usage"] = {"prompt_tokens": used[0], "completion_tokens": used[1]}
        return 200, json.dumps(found).encode(), fault == "cut"


@contextmanager
def billing(**options):
    bill = Bill(**options)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with bill.lock:
                bill.in_flight += 1
                bill.most_in_flight = max(bill.most_in_flight, bill.in_flight)
            time.sleep(bill.waits)
            status, content, is_cut = bill.answer(body)
            with bill.lock:
                bill.in_flight -= 1
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) + is_cut))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = is_cut

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        bill.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        try:
            yield bill
        finally:
            server.shutdown()
            thread.join()


def flags(bill, *more, tasks=12):
    own = ["--env", "./words.py:Words", "--eval-tasks", str(tasks), "--max-tokens", "40", "--model", "m"]
    return ["eval", *own, "--inference", "openai", "--inference.url", bill.url, *more]


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def lines_of(folder):
    lines = (Path(folder) / "trajectories" / "eval.jsonl").read_text().splitlines()
    return {line["group"]: line for line in map(json.loads, lines)}


HELLO = (Message("user", "Hello"),)


def asked(engine, count, messages=HELLO, **request):
    """Ask this many requests at the same time; how many were answered, and the first error."""
    done, errors = [], []

    async def one(seed):
        try:
            done.append(await engine.chat(ChatRequest(list(messages), [], 40, seed, **request)))
        except RunError as error:
            errors.append(error)

    async def run():
        async with engine, trio.open_nursery() as nursery:
            for seed in range(count):
                nursery.start_soon(one, seed)

    trio.run(run)
    return done, errors


def metered(bill, folder="", **options):
    given = {"prices": {"m": PRICES}, "connections": 16} | options
    return OpenAIInference("m", OpenAIOptions(url=bill.url, **given), folder=str(folder))


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "fails"), [({"dollars_max": 0.012}, 0.3), ({"tokens_max": 2400}, 0.0)])
def test_a_limit_is_never_exceeded_and_nearly_reached(limit, fails, tmp_path):
    with billing(fails=fails, waits=0.002) as bill:
        engine = metered(bill, tmp_path, **limit)
        done, errors = asked(engine, 150)
    assert all(isinstance(error, BudgetSpentError) for error in errors) and errors
    spent = engine.spending()
    real = bill.dollars if "dollars_max" in limit else sum(bill.tokens)
    counted = spent.dollars if "dollars_max" in limit else spent.tokens_spent
    (most,) = limit.values()
    assert real <= counted + 1e-9 and counted <= most + 1e-9, "a reply that was cut off counts as the most"
    if not fails:
        assert real == pytest.approx(counted) and len(done) == bill.requests == spent.requests
        assert counted > 0.8 * most, "what requests reserved and did not need is used"
        assert bill.most_in_flight > 1
    assert len(done) + len(errors) == 150


def test_without_reports_each_reply_counts_as_the_most(tmp_path):
    with billing(reports=False) as bill:
        engine = metered(bill, tmp_path, tokens_max=2000)
        done, errors = asked(engine, 20)
    spent = engine.spending()
    assert done and errors and 2000 >= spent.tokens_spent >= 300 * len(done) and spent.prompt_tokens == 0


def test_a_refused_connection_is_free():
    with billing() as bill:
        pass
    engine = metered(bill, tokens_max=2000, attempts=2)
    _, errors = asked(engine, 3)
    assert len(errors) == 3 and engine.spending() == Spending(0, 0, 0, 0, 0, 0.0)


def test_an_evaluation_stops_and_goes_on_with_a_higher_limit(capsys):
    prices = ["--inference.prices", '{ "m" = [2.0, 10.0] }']
    with billing(longest=12) as bill:
        assert main(flags(bill, "--out", "whole", "--concurrency", "3")) == 0
        assert "spent" not in summary_of("whole") and not (Path("whole") / "spent.sqlite").exists()
        assert "tokens in" in capsys.readouterr().out
        limited = flags(bill, *prices, "--inference.dollars-max", "0.003", "--out", "out", "--concurrency", "3")
        before = bill.dollars
        assert main(limited) == 1
        said = capsys.readouterr()
        first = summary_of("out")
        assert 0 < first["episodes"] < 12 and first["status"] == "failed"
        assert first["spent"]["dollars"] == pytest.approx(bill.dollars - before) and first["spent"]["dollars"] <= 0.003
        assert "the budget of m is spent: $0.00" in said.err and " of $0.0030" in said.err
        again = said.err.partition("to go on, type: rollouts ")[2].split("\n")[0].split()
        assert again[:3] == ["resume", "out", "--inference.dollars-max"] and float(again[3]) > 0.0059
        assert "dollars spent" in said.out
        kept = lines_of("out")
        assert main(["resume", "out"]) == 1, "the same limit is still spent"
        assert "the budget of m is spent" in capsys.readouterr().err
        assert main([*again[:3], "0.05"]) == 0
        last = summary_of("out")
        assert last["episodes"] == 12 and last["spent"]["dollars"] == pytest.approx(bill.dollars - before)
        assert last["tokens"]["prompt_tokens"] <= last["spent"]["prompt_tokens"]
        lines = lines_of("out")
        assert all(lines[group] == line for group, line in kept.items()), "finished episodes are kept"


def test_a_request_that_never_began_is_free(tmp_path):
    """It waits for a connection when it is cancelled, and keeps nothing from the others."""
    with billing(waits=0.2) as bill:
        engine = metered(bill, tmp_path, tokens_max=1300, connections=1)

        async def ask(seed):
            return await engine.chat(ChatRequest([Message("user", "Hello")], [], 40, seed))

        async def hurried():
            async with engine, trio.open_nursery() as nursery:
                nursery.start_soon(ask, 0)
                await trio.sleep(0.05)
                with trio.move_on_after(0.05):
                    await ask(1)
                for seed in range(2, 8):  # each of them needs most of the limit for a while
                    await ask(seed)

        trio.run(hurried)
        assert bill.requests == 7 and engine.spending().tokens_spent == sum(bill.tokens)


def test_a_negative_report_counts_as_the_most(tmp_path):
    with billing(least=-500) as bill:
        engine = metered(bill, tmp_path, tokens_max=2000)
        done, errors = asked(engine, 20)
    assert done and errors and 300 * len(done) <= engine.spending().tokens_spent <= 2000


def test_a_killed_request_stays_counted(tmp_path):
    with billing(waits=0.5) as bill:
        engine = metered(bill, tmp_path, tokens_max=5000)

        async def hurried():
            async with engine:
                with trio.move_on_after(0.1):
                    await engine.chat(ChatRequest([Message("user", "Hello")], [], 40, 0))

        trio.run(hurried)
    assert engine.spending().tokens_spent > 296, "the API may bill it"


def test_an_environment_that_catches_everything_does_not_go_on(capsys):
    Path("words.py").write_text(
        ENVIRONMENT
        + """
    async def rollout(self, task, model):
        try:
            await model.chat(task.messages)
        except Exception:
            pass
"""
    )
    with billing() as bill:
        assert main(flags(bill, "--inference.tokens-max", "900", "--out", "out")) == 1
    assert "the budget of m is spent" in capsys.readouterr().err and sum(bill.tokens) <= 900


# --- kept replies -----------------------------------------------------------------------------------------------------


def test_equal_requests_are_asked_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    own = ["--inference.cache", "replies.sqlite", "--inference.api-key-env", "SOME_KEY", "--samples-per-prompt", "2"]
    with billing(longest=12) as bill:  # each episode has room for both of its turns
        assert main(flags(bill, *own, "--out", "one")) == 0
        first = bill.requests
        assert len({body["seed"] for body in bill.bodies[1:]}) == first - 1 == 12 * 2 * 2, "samples stay different"
        assert main(flags(bill, *own, "--out", "two")) == 0
        assert bill.requests == first + 1, "only the check before an evaluation asks the server"
        said = capsys.readouterr().out
        assert "replies from the cache" in said and "48 of 49" in said
        assert summary_of("two")["spent"]["cache_hits"] == 48 and summary_of("one")["spent"]["cache_hits"] == 0
        for name in ("reward_mean", "tokens", "episodes", "turns_mean"):
            assert summary_of("one")[name] == summary_of("two")[name]
        before = bill.requests
        assert main(flags(bill, *own, "--inference.body.top-p", "0.5", "--out", "other")) == 0
        assert bill.requests > before + 1 and summary_of("other")["spent"]["cache_hits"] == 0
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"sk-very-secret" not in content


@pytest.mark.parametrize(
    ("asks", "options"),
    [
        ({"temperature": 0.5}, {}),
        ({"messages": (Message("system", "Be short."), *HELLO)}, {}),
        ({}, {"stop": ("!",)}),
        ({}, {"served_model": "n"}),
    ],
    ids=["temperature", "system", "stop", "served-model"],
)
def test_another_request_is_asked_again(asks, options, tmp_path):
    with billing() as bill:
        for given, own, requests in (({}, {}, 1), ({}, {}, 1), (asks, options, 2), (asks, options, 2)):
            settings = OpenAIOptions(url=bill.url, cache=str(tmp_path / "cache"), **own)
            done, _ = asked(openai.create_openai_inference("m", None, 0, "", options=settings), 1, **given)
            assert len(done) == 1 and bill.requests == requests


def test_without_seeds_samples_stay_different(tmp_path):
    with billing() as bill:
        engine = metered(bill, cache=str(tmp_path / "cache"), leave_out=("seed",))
        done, _ = asked(engine, 5)
        assert len(done) == 5 and bill.requests == 5 and "seed" not in bill.bodies[0]
        again, _ = asked(metered(bill, cache=str(tmp_path / "cache"), leave_out=("seed",)), 5)
        assert bill.requests == 5 and {each.message.text for each in again} == {each.message.text for each in done}


def test_failures_are_not_kept(tmp_path):
    with billing(fails=1.0) as bill:
        _, errors = asked(metered(bill, cache=str(tmp_path / "cache"), attempts=1), 2)
        assert len(errors) == 2
        bill.fails = 0.0
        done, errors = asked(metered(bill, cache=str(tmp_path / "cache"), attempts=1), 2)
    assert len(done) == 2 and not errors


PROCESS = """
import sys
from rollouts_servers.spending import SpendingStore
store = SpendingStore(sys.argv[1])
for number in range(100):
    if store.reply(str(number)) is None:
        store.keep(str(number), f"reply {number}")
    store.count(cache_hits=1)
"""


def test_processes_share_a_file(tmp_path):
    file = str(tmp_path / "replies.sqlite")
    words = [sys.executable, "-c", PROCESS, file]
    started = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[1] for process in started] == [""] * 3
    store = SpendingStore(file)
    assert [store.reply(str(number)) for number in range(100)] == [f"reply {number}" for number in range(100)]
    assert store.counts() == {"cache_hits": 300}
    store.close()


def test_a_damaged_file_is_one_error(tmp_path, capsys):
    with billing() as bill:
        Path("text.sqlite").write_text("these are notes\n" * 100)
        assert main(flags(bill, "--inference.cache", "text.sqlite", "--out", "out")) == 2
        err = capsys.readouterr().err
        assert "--inference.cache text.sqlite: file is not a database; give the path" in err
        assert main(flags(bill, "--inference.cache", "nowhere/replies.sqlite", "--out", "out")) == 2
        assert "there is no folder nowhere" in capsys.readouterr().err and not Path("out").exists()
        assert main(flags(bill, "--inference.cache", "new.sqlite", "--dry-run")) == 0
        assert not Path("new.sqlite").exists() and bill.requests == 0

        store = SpendingStore("replies.sqlite")
        for number in range(2000):
            store.keep(hashlib.sha256(b"%d" % number).hexdigest(), "reply" * 20)
        store.close()
        with open("replies.sqlite", "r+b") as file:  # as a disk error leaves it: the header is fine
            file.seek(4096 * 10)
            file.write(b"\xff" * 4096 * 60)
        assert main(flags(bill, "--inference.cache", "replies.sqlite", "--out", "out")) == 1
    said = capsys.readouterr().err
    assert "the file replies.sqlite cannot be used: database disk image is malformed" in said
    assert "Traceback" not in said


def test_a_server_that_is_refused_leaves_no_folder(capsys):
    with billing() as bill:
        pass
    assert main(flags(bill, "--inference.tokens-max", "9000", "--inference.attempts", "1", "--out", "out")) == 2
    assert "check that the server runs" in capsys.readouterr().err and not Path("out").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--inference.dollars-max", "1"], "m has no price; type, in dollars for a million input and output tokens"),
        (["--inference.prices", '{ "m" = [-1.0, 2.0] }'], "the price of m is [-1.0, 2.0]; expected 0 or more"),
        (["--inference.tokens-max", "9", "--inference.leave-out", '["max_tokens"]'], "its price has no limit either"),
        (["--inference.tokens-max", "-1"], "--inference.tokens-max"),
    ],
)
def test_mistakes(given, words, capsys):
    with billing() as bill:
        assert main(flags(bill, *given, "--out", "out")) == 2
    assert words in capsys.readouterr().err and bill.requests == 0 and not Path("out").exists()


def test_the_file_of_a_store_is_sqlite(tmp_path):
    SpendingStore(str(tmp_path / "spent")).close()
    with sqlite3.connect(tmp_path / "spent") as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    assert names == {"replies", "spent", "counts"}
