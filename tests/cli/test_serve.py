"""`rollouts serve`: a process that speaks OpenAI's API until a signal ends it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forks
import httpx
import pytest

from rollouts.cli import main
from rollouts.models.loading import TINY_PATH
from rollouts.runs.serve import served_name

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))
from fake_engines import started

TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}


@contextlib.contextmanager
def serving(*argv: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of a server, and its process, which is ended."""
    command = [sys.executable, "-m", "rollouts", "serve", "--port", "0", *argv]
    process = forks.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(120, process.kill)  # no read below waits for longer
    watchdog.start()
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), line + process.stdout.read()
        yield line.split()[-1], process
    finally:
        process.terminate()
        process.wait()
        watchdog.cancel()
        process.stdout.close()


@pytest.fixture(scope="module")
def server():
    with serving("tiny", "--max-tokens", "16") as (url, _):
        yield url


def complete(url, text, **more):
    body = {"messages": [{"role": "user", "content": text}], **more}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=60, trust_env=False)


def test_a_request_is_answered_by_the_model(server):
    answer = complete(server, "What is 12 * 7?", model="tiny", temperature=0, tools=[TOOL]).json()
    assert answer["usage"]["completion_tokens"] <= 16
    assert answer["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
    assert complete(server, "What is 12 * 7?", temperature=0, tools=[TOOL]).json()["choices"] == answer["choices"]
    assert httpx.get(f"{server}/models", trust_env=False).json()["data"][0]["id"] == "tiny"


def test_a_seed_gives_one_reply_however_many_ask_at_once(server):
    alone = complete(server, "hello", seed=5).json()["choices"]
    with ThreadPoolExecutor(24) as pool:
        together = list(
            pool.map(lambda seed: complete(server, "hello", seed=seed).json()["choices"], [5] * 4 + [*range(20)])
        )
    assert together[:4] == [alone] * 4
    assert len({str(choices) for choices in together}) > 5


def test_a_mistake_of_one_client_harms_no_other(server):
    with socket.create_connection(("127.0.0.1", httpx.URL(server).port)) as rude:
        rude.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 9")
    assert complete(server, "word " * 3000).status_code == 400
    assert complete(server, "hello", top_p=0.5).json()["error"]["param"] == "top_p"
    assert complete(server, "hello").status_code == 200


def test_an_evaluation_speaks_to_it_as_to_any_api(server, tmp_path, capsys):
    argv = ["eval", "--env", "calculator", "--model", "tiny", "--inference", "openai", "--eval-tasks", "6"]
    flags = ["--inference.url", server, "--inference.served-model", "tiny", "--max-tokens", "48"]
    assert main([*argv, *flags, "--out", str(tmp_path / "eval")]) == 0, capsys.readouterr().err
    assert "6 held-out tasks, 6 episodes" in capsys.readouterr().out


def test_it_answers_in_front_of_another_server():
    with started("vllm", TINY_PATH, numbers="transformers") as vllm:
        with serving("tiny", "--inference", "vllm", "--inference.url", vllm.url) as (url, process):
            assert process.stdout.readline() == f"the engine's own address: {vllm.url}/v1\n"
            answer = complete(url, "What is 12 * 7?", temperature=0, max_tokens=8).json()
            assert httpx.get(url.replace("/v1", "/health"), trust_env=False).status_code == 200
        with serving("tiny") as (url, _):  # the embedded engine gives the same
            assert complete(url, "What is 12 * 7?", temperature=0, max_tokens=8).json()["choices"] == answer["choices"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_ends_it_once_what_is_in_flight_is_answered(number):
    with serving("tiny") as (url, process), contextlib.ExitStack() as stack:
        asking = http.client.HTTPConnection("127.0.0.1", httpx.URL(url).port, timeout=60)
        stack.callback(asking.close)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 900, "n": 32}
        asking.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert httpx.get(url.replace("/v1", "/health"), trust_env=False).status_code == 200  # it has the request by now
        process.send_signal(number)
        answer = asking.getresponse()
        assert answer.status == 200 and answer.read()
        assert process.wait(timeout=30) == 0
        with pytest.raises(httpx.ConnectError):
            complete(url, "hello")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tiny", "--port", "TAKEN"], "it is taken; type another --port, or --port 0 for a free one"),
        (["tiny", "--port", "70000"], "70000"),
        (["tiny", "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["tiny", "--inference", "openai"], "--inference openai: "),
        (
            ["gpt", "--inference", "openai", "--inference.url", "http://127.0.0.1:9"],
            "with an address of its own",
        ),
        (["tiny", "--env", "calculator"], "has no option --env"),
        (["no/such/run"], "no/such/run"),
    ],
)
def test_mistakes_are_one_message(argv, words, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", "0", *(word.replace("TAKEN", port) for word in argv)]) == 2
    out, err = capsys.readouterr()
    assert words in err and "Traceback" not in err and out == ""


def test_the_name_for_clients(tmp_path):
    assert served_name(str(tmp_path / "first" / "checkpoints" / "step_000010")) == "first"
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name("tiny") == "tiny"
    both = tmp_path / "both"
    (both / "rl").mkdir(parents=True)
    (both / "config.toml").write_text('mode = "sft+rl"')
    phases = [both, both / "rl", both / "sft" / "checkpoints" / "step_000010"]
    assert [served_name(str(path)) for path in phases] == ["both"] * 3
    assert served_name(str(tmp_path / "rl" / "checkpoints" / "step_000010")) == "rl"  # another run of this name
