"""The server answers the browser that has the link, and no other."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from rollouts.cli import main


@pytest.fixture
def served(make):
    """A server of one run, in a process of its own: its address and its token."""
    make.run()
    command = [sys.executable, "-m", "rollouts", "view", str(make.directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address, token = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", line).groups()
        assert line.startswith("1 run at ")
        yield process, address, token
        process.kill()


def test_the_link_gives_a_cookie_and_the_cookie_everything(served, make):
    process, address, token = served
    with httpx.Client(base_url=address) as browser:
        assert browser.get("/").status_code == browser.get("/api/runs").status_code == 401
        assert "rollouts view" in browser.get("/api/runs").json()["error"]
        moved = browser.get(f"/?token={token}")
        assert moved.status_code == 303 and moved.headers["location"] == "/"
        cookie = moved.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        page = browser.get("/")
        assert page.status_code == 200 and b"main.js" in page.content
        for name in ("main.js", "style.css", "rollout.js"):
            assert browser.get(f"/{name}").status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        runs = browser.get("/api/runs")
        assert len(runs.json()["runs"]) == 1 and "access-control-allow-origin" not in runs.headers
        again = browser.get("/api/runs", headers={"if-none-match": runs.headers["etag"]})
        assert again.status_code == 304 and again.content == b""
        assert browser.get("/../pyproject.toml").status_code == browser.get("/server.py").status_code == 404
        assert browser.get("/api/runs", headers={"host": "evil.example"}).status_code == 421
        run = str(make.directory / "first").replace("/", "%2F")
        body = '{"tags": ["best"]}'
        assert browser.post(f"/api/runs/{run}/labels", content=body).status_code == 403
        assert (
            browser.post(f"/api/runs/{run}/labels", content=body, headers={"x-rollouts-view": "1"}).status_code == 200
        )
        assert browser.post("/api/runs", headers={"x-rollouts-view": "1"}).status_code == 405
        assert browser.request("DELETE", "/", headers={"x-rollouts-view": "1"}).status_code == 405
    for wrong in (
        {"authorization": "Bearer x"},
        {"cookie": "rollouts_view_1=x"},
        {"cookie": 'a="'},
        {"cookie": b"\xe9"},
    ):
        assert httpx.get(f"{address}/api/runs", headers=wrong).status_code == 401
    known = {"authorization": f"Bearer {token}"}
    with contextlib.ExitStack() as halves:  # more than the server has connections
        for number in range(300):
            half = halves.enter_context(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))))
            half.sendall(b"GET / HTTP/1.1\r\n" if number % 2 else b"")
        assert httpx.get(f"{address}/api/runs", headers=known, timeout=5).status_code == 200
    assert httpx.get(f"{address}/?token={token[:-1]}").status_code == 401
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0 and process.stderr.read() == ""


def test_mistakes(make, tmp_path, capsys):
    make.run()
    taken = socket.create_server(("127.0.0.1", 0))
    (tmp_path / "empty").mkdir()
    cases = [
        ([str(tmp_path / "nowhere")], "there is no directory"),
        ([str(tmp_path / "empty")], "has no runs"),
        ([str(make.directory), "--port", str(taken.getsockname()[1])], "it is taken; type another --port"),
        ([str(make.directory), "--port", "99999"], "--port"),
    ]
    with taken:
        for arguments, words in cases:
            assert main(["view", *arguments]) == 2
            assert words in capsys.readouterr().err
