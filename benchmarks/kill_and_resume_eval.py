"""Does an evaluation survive kill -9? Kill one of 1,000 episodes 20 times, resume it, and compare the results.

    python benchmarks/kill_and_resume_eval.py
    python benchmarks/kill_and_resume_eval.py --engine openai             # a chat API, whose server is in this script
    python benchmarks/kill_and_resume_eval.py --episodes 200 --kills 5 --out kills.json

The embedded model, or a chat API, plays the calculator. Each kill comes at a random time: some while the process still
loads, the others after a random number of further episodes. Then the evaluation is resumed, until it ends by itself.
The result is compared with that of an unbroken one: every episode (messages, tokens, rewards, the order of the file)
and every number of summary.json that does not depend on the clock. Logprobs may differ in the last digits, because the
episodes that share a batch differ. No episode may be played again that was finished before a kill.

With the embedded model it takes about ten minutes on one idle core, most of them for starting processes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.server
import itertools
import json
import operator
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TIMED = ("wall_seconds", "cpu_seconds", "latency_p50")
LOGPROBS_APART = 1e-4  # nats
STARTING_SECONDS = 10.0
WAIT_SECONDS = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, resume and compare. Returns 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--engine", choices=("hf", "openai"), default="hf")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", default="", help="a file for what was found")
    arguments = parser.parse_args(argv)
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch, _server() as url:
        whole, killed = Path(scratch) / "whole", Path(scratch) / "killed"
        command = ["eval", "--env", "calculator", "--max-tokens", "24"]
        api = ["--model", "any", "--inference", "openai", "--inference.url", url]
        command += api if arguments.engine == "openai" else ["--model", "tiny"]
        command += ["--eval-tasks", str(arguments.episodes // 2), "--samples-per-prompt", "2", "--concurrency", "32"]
        _finish([*command, "--out", str(whole)])
        played = [0]
        while len(played) <= arguments.kills:
            words = ["resume", str(killed)] if (killed / "config.toml").exists() else [*command, "--out", str(killed)]
            most = min(2 * arguments.episodes // (arguments.kills + 1), (arguments.episodes - played[-1]) // 2)
            more = rng.randrange(most + 1)
            if not _kill(words, killed, played[-1] + more, rng):
                raise RuntimeError(f"it ended after {len(played) - 1} kills; type --seed {arguments.seed + 1}")
            played.append(_played(killed))
            print(f"kill {len(played) - 1}: {played[-1]} of {arguments.episodes} episodes are kept", flush=True)
        _finish(["resume", str(killed)])
        pairs = itertools.pairwise(played)
        faults = [f"{after} episodes were left of {before}" for before, after in pairs if after < before]
        faults += _differences(whole, killed)
        left = [path.name for path in killed.rglob("*") if "partial" in path.name or path.name == "eval.played"]
        faults += [f"{name} is left" for name in left]
        resumed = len(json.loads((killed / "manifest.json").read_text()).get("resumed", []))
    found = {"episodes": arguments.episodes, "kept": played[1:], "resumed": resumed, "faults": faults}
    print(f"{arguments.kills} kills, resumed {resumed} times: {'; '.join(faults) or 'the same as unbroken'}")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")
    return 1 if faults else 0


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """A chat API whose reply depends on the request alone, after up to 50 ms."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            number = int.from_bytes(hashlib.sha256(asked).digest()[:4], "big")
            time.sleep(number % 50 / 1000)
            choice = {"message": {"role": "assistant", "content": f"It is {number % 97}."}, "finish_reason": "stop"}
            usage = {"prompt_tokens": len(asked), "completion_tokens": 4}
            content = json.dumps({"choices": [choice], "usage": usage}).encode()
            with contextlib.suppress(ConnectionError):  # the client was killed
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128

        def handle_error(self, *_: Any) -> None:
            """A client that was killed is no error."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


def _kill(command: list[str], folder: Path, episodes: int, rng: random.Random) -> bool:
    """Start the evaluation, and kill it once it has so many episodes; if it has them already, at any moment of its
    first seconds. False: it ended by itself.
    """
    is_early, end = _played(folder) >= episodes, time.monotonic() + WAIT_SECONDS
    process = subprocess.Popen(_python(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not is_early and _played(folder) < episodes and process.poll() is None:
        if time.monotonic() > end:
            process.kill()
            raise RuntimeError(f"it has {_played(folder)} episodes after {WAIT_SECONDS:g} s, not {episodes}")
        time.sleep(0.002)
    time.sleep(rng.random() * (STARTING_SECONDS if is_early else 0.2))
    process.kill()
    return process.wait() != 0


def _finish(command: list[str]) -> None:
    """Run the evaluation to its end. Raises RuntimeError if it fails."""
    done = subprocess.run(_python(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def _python(command: list[str]) -> list[str]:
    return [sys.executable, "-m", "rollouts", *command]


def _played(folder: Path) -> int:
    """The number of episodes that a killed evaluation keeps."""
    path = folder / "trajectories" / "eval.played"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _differences(whole: Path, killed: Path) -> list[str]:
    """The differences between two evaluations, in words."""
    (one, logprobs), (other, others) = _episodes(whole), _episodes(killed)
    faults = [] if one == other else [f"{sum(map(operator.ne, one, other))} of {len(one)} episodes differ"]
    if len(logprobs) != len(others) or any(abs(a - b) > LOGPROBS_APART for a, b in zip(logprobs, others, strict=True)):
        faults.append("logprobs differ")
    numbers, killed_numbers = (json.loads((folder / "summary.json").read_text()) for folder in (whole, killed))
    names = {name for name in {*numbers, *killed_numbers} if name not in TIMED}
    return faults + [f"{name} differs" for name in sorted(names) if numbers.get(name) != killed_numbers.get(name)]


def _episodes(folder: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """The lines of the episodes without what a clock says, and their logprobs."""
    lines = [json.loads(line) for line in (folder / "trajectories" / "eval.jsonl").read_text().splitlines()]
    logprobs = [each for line in lines for segment in line["segments"] for each in segment.pop("logprobs")]
    for line in lines:
        line["metrics"] = {name: value for name, value in line["metrics"].items() if "seconds" not in name}
    return lines, logprobs


if __name__ == "__main__":
    sys.exit(main())
