"""Measure the way of a new environment: from `rollouts new` to an evaluation in a fresh virtual environment.

    python scripts/stopwatch.py
    python scripts/stopwatch.py --keep    # leave the folders, and print where they are

A package is made in a temporary folder. `PATCH` changes its task, its tool and its reward, as you would by hand. Then
it is checked, built, and installed in a virtual environment that has only the base of this rollouts, without torch. The
evaluation there asks a small chat server of this script, on loopback, which calls the tool and answers with its
result.

Needs pip. Only pip needs a network: for the dependencies of the base, and for hatchling if it is not installed. The
exit code is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from rollouts.env.installing import base_wheel

NAME, TASKS = "till", 8
PATCH = '''
-"""A shop that asks for the price of many things: an environment for rollouts."""
+"""A till that gives change: an environment for rollouts."""
@@
-import math
 import random
-import re
@@
-    """A shop that asks for the price of many things. The model has a calculator."""
+    """A till that gives change. The model has a calculator."""
@@
-            yield Task(f"What is {count} * {price}?", answer=count * price)
+            paid = count * price + rng.randint(2, 99)
+            yield Task(f"What is {paid} - {count * price}?", answer=paid - count * price)
@@
-        """Multiply numbers.
+        """Subtract a number from another.
@@
-            expression: numbers with * between them, such as 12 * 7
+            expression: two numbers with - between them, such as 96 - 84
@@
-        return str(math.prod(int(number) for number in expression.split("*")))
+        paid, price = expression.split("-")
+        return str(int(paid) - int(price))
@@
-        """1 if the last number of the last message is the answer, else 0."""
-        return float(re.findall(r"\\d+", trajectory.last_text)[-1:] == [str(task.answer)])
+        """1 if the last message is the answer and nothing else, else 0."""
+        return float(trajectory.last_text.strip() == str(task.answer))
'''
"""The lines that are written by hand. `@@` separates the places in the module."""


class StepError(Exception):
    """A step did not do what it must do."""


class Stopwatch:
    """The seconds of each step, in their order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure the block, also if it fails."""
        print(f"{name} ...", file=sys.stderr)
        start = time.perf_counter()
        try:
            yield
        except StepError as error:
            raise StepError(f"{name}: {error}") from None
        finally:
            self.seconds[name] = time.perf_counter() - start

    def table(self) -> str:
        """A line for each step, and one for their sum."""
        rows = {**self.seconds, "all steps": sum(self.seconds.values())}
        return "\n".join([f"{'step':40} seconds", *(f"{name:40} {seconds:7.1f}" for name, seconds in rows.items())])


class ChatServer(BaseHTTPRequestHandler):
    """A chat-completions API whose model always calls `calculator`, and then answers with the result."""

    def do_POST(self) -> None:
        """Answer the conversation in the request's body."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = body["messages"][-1]
        question = re.fullmatch(r"What is (.+)\?", str(last["content"]))
        message: dict[str, object] = {"role": "assistant", "content": last["content"]}
        if last["role"] == "user" and question:
            call = {"name": "calculator", "arguments": json.dumps({"expression": question[1]})}
            message = {"role": "assistant", "tool_calls": [{"id": "call_0", "type": "function", "function": call}]}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20}
        answer = json.dumps({"id": "chat", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


def main(argv: Sequence[str] | None = None) -> int:
    """Take all steps and print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the folders, and print where they are")
    arguments = parser.parse_args(argv)
    folder, watch = Path(tempfile.mkdtemp(prefix="stopwatch-")).resolve(), Stopwatch()
    with contextlib.ExitStack() as stack:
        if arguments.keep:
            print(folder, file=sys.stderr)
        else:
            stack.callback(shutil.rmtree, folder)
        try:
            site = take_steps(folder, watch)
        except StepError as error:
            print(f"{watch.table()}\nFAILED: {error}")
            return 1
        megabytes = sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1e6
    written = sum(line.startswith("+") for line in PATCH.splitlines())
    print(f"{watch.table()}\n\nlines written by hand: {written}")
    print(f"installed in the fresh virtual environment: {megabytes:.1f} MB (without pip, which is not installed there)")
    return 0


def take_steps(folder: Path, watch: Stopwatch) -> Path:
    """Every step. Returns the folder of the packages in the fresh virtual environment."""
    package, wheels, fresh = folder / NAME, folder / "wheels", folder / "env"
    python = fresh / ("Scripts" if os.name == "nt" else "bin") / "python"
    rollouts, pip = [sys.executable, "-m", "rollouts"], [sys.executable, "-m", "pip"]
    with watch.step("rollouts new environment"):
        run([*rollouts, "new", "environment", NAME], folder)
    with watch.step("edit the module"):
        edit(package / f"rollouts_{NAME}" / "__init__.py")
    with watch.step("rollouts check"):
        run([*rollouts, "check", str(package)], folder)
    with watch.step("build the wheel"):
        isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
        run([*pip, "wheel", "-q", "--no-deps", *isolation, "--wheel-dir", str(wheels), str(package)], folder)
    with watch.step("fresh environment: base and wheel"):
        built = next(wheels.glob("*.whl"))
        venv.create(fresh, symlinks=os.name != "nt")
        run([*pip, "--python", str(python), "install", "-q", str(base_wheel(wheels)), str(built)], folder)
        lookup = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(run([str(python), "-c", lookup], folder).strip())
        expect(not (site / "torch").exists(), f"torch is installed in {site}")
    with watch.step("rollouts plugins list, there"):
        listed = run([str(python), "-m", "rollouts", "plugins", "list"], folder)
        expect(re.search(rf"\b{NAME}\s+rollouts-{NAME}\b", listed) is not None, f"{NAME} is not in the list")
    with watch.step(f"rollouts eval, there, {TASKS} tasks"), chat_server() as url:
        model = ["--model", "mock", "--inference", "openai", "--inference.url", url]
        options = ["--env", NAME, *model, "--eval-tasks", str(TASKS), "--out", "evaluated"]
        run([str(python), "-m", "rollouts", "eval", *options], folder)
        summary = json.loads((folder / "evaluated" / "summary.json").read_text())
        seen = {key: summary[key] for key in ("judged", "reward_mean", "tool_calls", "tool_failures")}
        wanted = {"judged": TASKS, "reward_mean": 1.0, "tool_calls": TASKS, "tool_failures": 0}
        expect(seen == wanted, f"expected {wanted}, and summary.json has {seen}")
    return site


def run(command: list[str], folder: Path) -> str:
    """What the command prints. Raises StepError with its output if it fails."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=folder, env={**variables, "COLUMNS": "200"}, capture_output=True, text=True)
    expect(done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(holds: bool, otherwise: str) -> None:
    """Raise StepError unless it holds."""
    if not holds:
        raise StepError(otherwise)


def edit(path: Path) -> None:
    """Change the places of `PATCH` in the module."""
    text = path.read_text(encoding="utf-8")
    for place in PATCH.strip("\n").split("\n@@\n"):
        lines = place.splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in signs) for signs in (" -", " +"))
        expect(text.count(old) == 1, f"the template changed; these lines are not in {path} once:\n{old}")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def chat_server() -> Iterator[str]:
    """The URL of a `ChatServer` on a free port of loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ChatServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    sys.exit(main())
