"""The relay of a sandbox without a network: here as a process without a sandbox, at a port of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from agent_fakes import FakeEngine, Quiz, check_exact, play
from gateway.test_endpoint import DecodingChat

from rollouts.env.agent import Agent
from rollouts.errors import EnvironmentDefinitionError
from rollouts.gateway import relay
from rollouts.types import Status, Task

PROGRAM = """
import json, os, signal, sys, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
for key in ("rollouts-of-another", sys.argv[2]):
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions", body)
    request.add_header("authorization", "Bearer " + key)
    try:
        print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"], flush=True)
    except urllib.error.HTTPError as error:
        print(error.code, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def relayed(port: int, *command: str) -> list[str]:
    return [sys.executable, "-I", "-S", relay.__file__, relay.SOCKET, str(port), *command]


def test_a_program_reaches_the_model_of_its_episode_over_the_socket(tmp_path: Path) -> None:
    folder, port, said = tmp_path / ("x" * 120), free_port(), []
    folder.mkdir()

    class Own(Quiz):
        async def rollout(self, task: Any, model: Any) -> None:
            async with model.serve() as endpoint:
                await endpoint.listen(str(folder))
                command = relayed(port, sys.executable, "-I", "-S", "-c", PROGRAM, str(port), endpoint.key)
                asked = "how long? "
                said.append(
                    await trio.run_process(command, stdin=asked.encode(), cwd=folder, capture_stdout=True, check=False)
                )

    engine = FakeEngine("very")
    episode = play(Own, engine, DecodingChat(), max_tokens=100)
    check_exact(episode, engine)
    assert episode.status is Status.COMPLETED and episode.trajectories[0].last_text == "very"
    assert (said[0].stdout, said[0].returncode) == (b"401\nvery\n", 128 + 15)
    descriptor = os.open(folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(f"/proc/self/fd/{descriptor}/{relay.SOCKET}")
    os.close(descriptor)


def test_either_side_may_leave(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / relay.SOCKET))
        server.listen()
        server.settimeout(20)
        waits = [sys.executable, "-I", "-S", "-c", "import sys; print(flush=True); sys.exit(len(sys.stdin.read()))"]
        with subprocess.Popen(
            relayed(port, *waits), cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            for client_leaves in (True, False):
                client = socket.create_connection(("127.0.0.1", port), 20)
                outside, _ = server.accept()
                outside.settimeout(20)
                for source, target in ((client, outside), (outside, client)):
                    data = os.urandom(1_000_000)
                    sending = threading.Thread(target=source.sendall, args=(data,))
                    sending.start()
                    assert target.makefile("rb").read(len(data)) == data
                    sending.join()
                first, second = (client, outside) if client_leaves else (outside, client)
                first.close()
                assert second.recv(100) == b"", "it is told"
                second.close()
            process.stdin.write(b"abc")
            process.stdin.close()
            assert process.wait(20) == 3


def test_a_sandbox_without_a_way_to_the_model_is_refused() -> None:
    with pytest.raises(EnvironmentDefinitionError, match="A container is such a sandbox\ntype: --sandbox bubblewrap"):
        Agent(command="true").setup(Task("?"), SimpleNamespace(exec=None, read=None))  # type: ignore[arg-type]
