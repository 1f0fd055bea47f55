"""Rows of the audit, and what their checks share: the tiny model, a few samples, a run, a server."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.server
import importlib.util
import inspect
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")


Check = Callable[[], object]


class Row(NamedTuple):
    """A name of the notes, and a function that checks it. Without a function, `words` say where it belongs.

    `needs`: the package that this row is about, if it is none of those that the core brings.
    `exception`: the heading in docs/first-notes.md with the decision between two lines that contradict each other.
    """

    name: str
    check: Callable[[], object] | None = None
    words: str = ""
    exception: str = ""
    needs: str = ""


class Result(NamedTuple):
    """A checked row."""

    note: str
    name: str
    state: str
    words: str = ""


class Table(list[Row]):
    """The rows of one note, in the order of the note.

    @ROWS("compute_reward", "compute_advantages")
    def _() -> None: ...
    """

    def __call__(
        self, *names: str, exception: str = "", needs: str = ""
    ) -> Callable[[Callable[[], object]], Callable[[], object]]:
        def add(function: Callable[[], object]) -> Callable[[], object]:
            function = functools.cache(function)  # names that share a function are checked once
            self.extend(Row(name, function, exception=exception, needs=needs) for name in names)
            return function

        return add

    def later(self, words: str, *names: str) -> None:
        """Rows that belong to another part of the project."""
        self.extend(Row(name, words=words) for name in names)


def check(note: str, row: Row) -> Result:
    """Run the function of a row. What it prints is dropped."""
    if row.check is None:
        return Result(note, row.name, "later", row.words)
    if row.needs and importlib.util.find_spec(row.needs.replace("-", "_")) is None:
        return Result(note, row.name, "needs", f"type: pip install {row.needs} (see the README of its folder)")
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            row.check()
    except (ImportError, AttributeError) as error:
        return Result(note, row.name, "absent", _words(error))
    except Exception as error:  # whatever a check raises is the reason
        return Result(note, row.name, "partly", _words(error))
    if row.exception:
        return Result(note, row.name, "exception", f"docs/first-notes.md, {row.exception}")
    return Result(note, row.name, "there")


def _words(error: Exception) -> str:
    last = error.__traceback__
    while last is not None and last.tb_next is not None and "first_notes" in last.tb_next.tb_frame.f_code.co_filename:
        last = last.tb_next
    line = f" (line {last.tb_lineno})" if last is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}{line}"


# --- what the checks share --------------------------------------------------------------------------------------------


@functools.cache
def folder() -> Path:
    """An empty folder that is removed at the end."""
    return Path(_holder().name)


@functools.cache
def _holder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="first-notes-")


NUMBERS = itertools.count()


def new_folder() -> Path:
    """Another empty folder."""
    path = folder() / f"part_{next(NUMBERS)}"
    path.mkdir()
    return path


@functools.cache
def tokenizer() -> Any:
    """That of the tiny model."""
    from rollouts.models.loading import load_tokenizer

    return load_tokenizer("tiny")


def new_model() -> Any:
    """A copy of the tiny model, to train."""
    from rollouts.training import load_hf_model

    return load_hf_model("tiny", device="cpu")


@functools.cache
def frozen_model() -> Any:
    """A tiny model that no check trains."""
    return new_model()


def new_backend(loss_fn: Any = None, lr: float = 1e-3) -> Any:
    """A PyTorchTrainingBackend; the cross-entropy unless a loss is given."""
    from rollouts.training import PyTorchTrainingBackend, create_adamw_optimizer, create_cross_entropy_loss

    model = new_model()
    optimizer = create_adamw_optimizer(model, lr=lr)
    return PyTorchTrainingBackend(model, optimizer, loss_fn or create_cross_entropy_loss(), new_folder())


def samples(*rewards: float, prompts: Any = None) -> list[Any]:
    """A sample of three ids for each reward, two of them trained; `correct` if the reward is 1."""
    from rollouts.training import Sample

    return [
        Sample(
            str(prompts[number]) if prompts else "?",
            "x",
            tokens=[5, 6, 7 + number],
            loss_mask=[0.0, 1.0, 1.0],
            metadata={"correct": reward == 1.0},
        )
        for number, reward in enumerate(rewards)
    ]


def replies(prompts: Any, **_: Any) -> list[Any]:
    """A `generate_fn`: the replies of each prompt, the first one right."""
    return samples(*(float(number == 0) for number in range(len(prompts))), prompts=prompts)


def buffer(*prompts: str) -> Any:
    """A DataBuffer of these prompts."""
    from rollouts.training import DataBuffer

    return DataBuffer(list(prompts) or ["a", "b", "c"], shuffle=False)


@contextlib.contextmanager
def refused(*words: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Assert that the block raises an error with these words."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{type(error).__name__} does not say {missing}: {error}"
    else:
        raise AssertionError(f"no error that says {words}")


@contextlib.contextmanager
def warned(words: str) -> Iterator[None]:
    """Assert that the block gives a DeprecationWarning with these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert any(each.category is DeprecationWarning and words in str(each.message) for each in caught), words


def awaited(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """The result of an async function."""
    import trio

    return trio.run(functools.partial(function, *args, **settings))


@contextlib.contextmanager
def server() -> Iterator[tuple[str, list[str]]]:
    """A server on loopback that loads every checkpoint: its address, and the paths of its requests."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(self.path)
            data = json.dumps({"success": True, "message": "done"}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", asked
    finally:
        made.shutdown()
        made.server_close()


def write_rows(*rows: dict[str, Any]) -> str:
    """A JSONL file with these rows."""
    path = new_folder() / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet_file(row: dict[str, Any], count: int) -> str:
    """A Parquet file with this row, `count` times, each with a number of its own in the prompt."""
    import datasets

    path = str(new_folder() / "rows.parquet")
    numbered = [{**row, "prompt": f"{row['prompt']} ({number})"} for number in range(count)]
    datasets.Dataset.from_list(numbered).to_parquet(path)
    return path


@functools.cache
def reward_model_folder() -> str:
    """A sequence-classification model with the tokenizer of the tiny model."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    path = str(new_folder())
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer()), num_labels=1, pad_token_id=0, **small)
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@functools.cache
def conversations_file() -> str:
    """Two conversations."""
    turns = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "2+2 equals 4."}]
    return write_rows({"messages": turns}, {"messages": turns})


def command(*arguments: str) -> str:
    """Run `rollouts` with these arguments, and return what it printed. Asserts exit code 0."""
    from rollouts.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    assert code == 0, f"rollouts {' '.join(arguments)}: exit code {code}: {err.getvalue()[-300:]}"
    return out.getvalue()


SMALL = ("--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "48", "--seed", "0")


@functools.cache
def both_phases() -> Path:
    """The folder of a run with one step of SFT, in its folder `sft`, and one of RL, in `rl`."""
    out = new_folder() / "run"
    modes = ("--mode", "sft+rl", "--steps", "1", "--sft.steps", "1", "--eval-tasks", "4", "--checkpoint-every", "1")
    command("run", "--env", "calculator", "--loss", "grpo", *modes, *SMALL, "--out", str(out))
    return out


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@functools.cache
def sharded_run() -> Path:
    """The folder of a run with one step on two ranks of this machine's CPU."""
    out = new_folder() / "run"
    ranks = ("--training", "fsdp", "--training.processes", "2", "--training.device", "cpu")
    run = ("run", "--env", "calculator", "--steps", "1", "--eval-tasks", "0", *ranks, *SMALL, "--out", str(out))
    done = subprocess.run([sys.executable, "-m", "rollouts", *run], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-300:]
    return out


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{new_folder() / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def settings_of(component: Callable[..., Any]) -> set[str]:
    """The names of a component's settings."""
    found: set[str] = set()
    for name, parameter in inspect.signature(component).parameters.items():
        inner = getattr(parameter.default, "__dataclass_fields__", None)
        found |= {field.name for field in dataclasses.fields(parameter.default)} if inner else {name}
    return found
