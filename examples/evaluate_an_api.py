"""Evaluate a model behind an address that speaks OpenAI's form, as APIs, vLLM, SGLang and llama.cpp do.

    python examples/evaluate_an_api.py                                       # half a minute, offline
    python examples/evaluate_an_api.py --url http://127.0.0.1:8000/v1 --model qwen

Without `--url`, the example starts a server of its own: `rollouts serve tiny`. An evaluation sends messages and the
schemas of the tools, and runs the tools here. It needs no tokenizer and no torch. It prints:

    reward 0.25 ± 0.04  pass@1 0.25  pass@2 0.43  pass@4 0.66
    tools: 32 calls, 0 of them failed
    first: What is 87 * 41? ... The answer is 9865
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rollouts


@contextlib.contextmanager
def served(name: str) -> Iterator[str]:
    """The address of `rollouts serve tiny --name NAME` on a free port; the server ends with the block."""
    command = [sys.executable, "-m", "rollouts", "serve", "tiny", "--name", name, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = (re.search(r"serving \S+ at (http://\S+)", line) for line in server.stdout)
            yield next(match[1] for match in found if match)
        finally:
            server.terminate()


def evaluate(model: str, url: str, tasks: int, out: str) -> dict[str, Any]:
    return rollouts.run(
        mode="eval",
        env="calculator",
        model=model,
        inference={"name": "openai", "url": url},
        eval_tasks=tasks,
        samples_per_prompt=4,
        max_tokens=64,
        out=out,
    )


def main(url: str = "", model: str = "my-model", tasks: int = 32, out: str = "") -> dict[str, Any]:
    out = out or tempfile.mkdtemp()
    with contextlib.nullcontext(url) if url else served(model) as address:
        summary = evaluate(model, address, tasks, out)
    pass_at = "  ".join(f"pass@{k} {value:.2f}" for k, value in summary["pass@k"].items())
    print(f"reward {summary['reward_mean']:.2f} ± {summary['reward_stderr']:.2f}  {pass_at}")
    print(f"tools: {summary['tool_calls']} calls, {summary['tool_failures']} of them failed")
    first = json.loads(Path(out, "trajectories", "eval.jsonl").read_text().splitlines()[0])
    print(f"first: {first['task']['prompt']} ... {first['messages'][-1].get('content')}")
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="")
    parser.add_argument("--model", default="my-model")
    parser.add_argument("--tasks", type=int, default=32)
    main(**vars(parser.parse_args()))
