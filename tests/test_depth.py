"""How many functions of the package stand between a command and what it is for: four places, each with a bound.

The lists themselves are in docs/design.md, which `python tests/test_depth.py` prints anew.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

sys.path[:0] = [str(Path(__file__).parent / "servers")]
import stack  # noqa: E402
from fake_engines import started  # noqa: E402

from rollouts.cli import main  # noqa: E402
from rollouts.models.loading import TINY_PATH  # noqa: E402

LIMITS = {"optimizer step": 12, "forward pass": 23, "generate request": 24, "new weights": 19}
"""Frames at most. Each is 60 % of what it was before the rooms were rebuilt."""

SMALL = "--env calculator --loss grpo --steps 1 --prompts-per-step 2 --samples-per-prompt 2 --eval-tasks 0".split()
SMALL += ["--max-tokens", "8"]


class _Root(trio.abc.Instrument):
    def task_spawned(self, task: Any) -> None:
        stack.ROOT[:] = [trio.lowlevel.current_root_task()]


@contextlib.contextmanager
def _watched_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run = trio.run

    def with_root(*args: Any, instruments: Any = (), **options: Any) -> Any:
        return run(*args, instruments=[*instruments, _Root()], **options)

    with monkeypatch.context() as patch:
        patch.setattr(trio, "run", with_root)
        yield
    stack.ROOT.clear()


def frames_in_process(monkeypatch: pytest.MonkeyPatch, out: Path) -> dict[str, list[str]]:
    """The frames when the optimizer steps, and when the embedded engine's forward pass begins."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from transformers import PreTrainedModel

    stepped: list[list[str]] = []
    forwards: Counter[tuple[str, ...]] = Counter()

    def on_forward(module: Any, _: Any) -> None:
        if isinstance(module, PreTrainedModel) and not torch.is_grad_enabled() and not stepped:
            forwards[tuple(stack.frames())] += 1

    hooks = [
        register_optimizer_step_pre_hook(lambda *_: stepped.append(stack.frames())),
        register_module_forward_pre_hook(on_forward),
    ]
    try:
        with _watched_run(monkeypatch):
            assert main(["run", *SMALL, "--out", str(out)]) == 0
    finally:
        for hook in hooks:
            hook.remove()
    return {"optimizer step": stepped[0], "forward pass": list(forwards.most_common(1)[0][0])}


def frames_at_a_server(monkeypatch: pytest.MonkeyPatch, out: Path) -> dict[str, list[str]]:
    """The frames when a generate request's bytes leave, and when a server is asked to load new weights."""
    seen: dict[str, list[str]] = {}
    send_all = trio.SocketStream.send_all

    async def watched(stream: trio.SocketStream, data: Any) -> None:
        path = bytes(data[:80]).split(b" ")[1:2]
        frames = stack.frames() if path else []
        if path and path[0].startswith(b"/inference/v1/generate") and any("ChatModel" in each for each in frames):
            seen.setdefault("generate request", frames)
        if path and path[0].startswith(b"/collective_rpc"):
            seen.setdefault("new weights", frames)
        await send_all(stream, data)

    monkeypatch.setattr(trio.SocketStream, "send_all", watched)
    with started("vllm", TINY_PATH, numbers="transformers") as server, _watched_run(monkeypatch):
        flags = ["--inference", "vllm", "--inference.url", server.url, "--max-tokens", "8", "--out", str(out)]
        assert main(["run", *SMALL, *flags]) == 0
        assert server.statistics()["loads"] == 2
    return seen


@pytest.fixture
def found(monkeypatch, tmp_path):
    return frames_in_process(monkeypatch, tmp_path / "one") | frames_at_a_server(monkeypatch, tmp_path / "two")


def test_few_functions_stand_between_a_command_and_what_it_is_for(found):
    counts = {place: len(frames) for place, frames in found.items()}
    assert all(counts[place] <= limit for place, limit in LIMITS.items()), (counts, LIMITS)


if __name__ == "__main__":
    import tempfile

    patch = pytest.MonkeyPatch()
    folder = Path(tempfile.mkdtemp())
    for place, names in (frames_in_process(patch, folder / "one") | frames_at_a_server(patch, folder / "two")).items():
        print(f"{place}: {len(names)}", *names, sep="\n    ")
