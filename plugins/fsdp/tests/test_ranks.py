"""If a rank dies, hangs or fails, the work ends with one error that names it, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import forks
import pytest
from rollouts_fsdp import heartbeats

from rollouts.errors import ConfigError, RankError, TrainingError

pytestmark = pytest.mark.slow

LOSS = """
import os, time

def loss(logprobs, advantages):
    if os.path.exists({trigger!r}) and os.environ.get("RANK", "0") == {rank!r}:
        {fault}
    return -(logprobs * advantages)
"""


@pytest.fixture
def model(tiny, tmp_path):
    tiny.qwen3().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def faulty(tmp_path):
    """A loss that does something bad on one rank once a file is there; gives its name, and the trigger."""

    def make(rank: str, fault: str):
        trigger = tmp_path / "now"
        source = LOSS.format(trigger=str(trigger), rank=rank, fault=fault)
        (tmp_path / "faulty.py").write_text(textwrap.dedent(source))
        return f"{tmp_path}/faulty.py:loss", trigger

    return make


def pid_of(ranks, rank: int = 1) -> int:
    return ranks.backend._executor._group.processes[rank].pid


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def fails(ranks, batch, words: str, seconds: float):
    start = time.monotonic()
    with pytest.raises(RankError, match=words):
        for _ in range(1000):
            ranks.backend.forward_backward(batch).wait(60)
            ranks.backend.optim_step().wait(60)
    assert time.monotonic() - start < seconds
    pid = pid_of(ranks)
    with pytest.raises(RankError, match=words):
        ranks.backend.optim_step().wait(5)
    ranks.backend.close()
    assert not is_running(pid), "it is ended too"


def test_a_rank_that_dies(tiny, model, ranks_of):
    ranks = ranks_of(model, 2)
    batch = ranks.batch(tiny.make_samples(1, 2))
    ranks.train(batch, 1)
    os.kill(pid_of(ranks), signal.SIGKILL)
    fails(ranks, batch, r"rank 1 died \(killed by SIGKILL\); its last command: \w+, command \d+", 20)


def test_a_rank_that_is_stopped(tiny, model, ranks_of, monkeypatch):
    """It sends no more heartbeats; the collective, whose own deadline is longer here, is never asked."""
    monkeypatch.setattr(heartbeats, "SILENCE_SECONDS", 6.0)
    ranks = ranks_of(model, 2, training={"stall_seconds": 300})
    batch = ranks.batch(tiny.make_samples(1, 2))
    ranks.train(batch, 1)
    time.sleep(2 * heartbeats.BEAT_SECONDS)  # it has been heard of
    os.kill(pid_of(ranks), signal.SIGSTOP)
    fails(ranks, batch, r"rank 1 sent no heartbeat for [67] s; its last command: \w+, command \d+", 50)


@pytest.mark.parametrize(
    ("rank", "fault", "words"),
    [
        ("1", "raise ValueError('no such luck')", r"rank 1 failed in forward_backward, command \d+: .*no such luck"),
        pytest.param(
            "1",
            "os._exit(7)",
            r"rank 1 died \(exit code 7\); its last command: forward_backward, command \d+",
            marks=pytest.mark.nightly,
        ),
        ("1", "time.sleep(600)", r"rank 1 at forward_backward, command \d+ \(rank 1: .*faulty.py, line \d+, in loss\)"),
        pytest.param(
            "0",
            "time.sleep(20)",
            r"rank 0 at forward_backward, command \d+ \(rank 0: .*faulty.py, line \d+, in loss\)",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["raises", "exits", "hangs", "rank 0 hangs"],
)
def test_a_loss_that_goes_wrong_on_one_rank(rank, fault, words, tiny, model, ranks_of, faulty):
    loss, trigger = faulty(rank, fault)
    ranks = ranks_of(model, 2, loss=loss, training={"stall_seconds": 2})
    batch = ranks.batch(tiny.make_samples(2, 2))
    ranks.train(batch, 1)
    trigger.write_text("")
    fails(ranks, batch, words, 45)


@pytest.mark.parametrize("fault", ["hangs", pytest.param("dies", marks=pytest.mark.nightly)])
def test_of_three_ranks_the_guilty_one_is_named(fault, tiny, model, ranks_of, faulty):
    """Rank 1 is the first that complains: it waits for rank 2, or has lost it."""
    loss, trigger = faulty("2", "time.sleep(600)" if fault == "hangs" else "os.kill(os.getpid(), 9)")
    ranks = ranks_of(model, 3, loss=loss, training={"stall_seconds": 2})
    batch = ranks.batch(tiny.make_samples(3, 2))
    ranks.train(batch, 1)
    trigger.write_text("")
    words = (
        r"rank 2 died \(killed by SIGKILL\)"
        if fault == "dies"
        else r"in vain for rank 2 at .*faulty.py, line \d+, in loss"
    )
    fails(ranks, batch, words, 45)


@pytest.mark.nightly
def test_what_rank_0_does_alone_may_take_longer_than_a_stall(tiny, model, ranks_of, tmp_path, monkeypatch):
    """Reading a model or a checkpoint: the others do not wait for it in a collective."""
    from rollouts.models import loading
    from rollouts.training.weights import checkpoint, files

    def slow(function):
        def call(*args, **kwargs):
            time.sleep(3)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(loading, "load_hf_model", slow(loading.load_hf_model))
    ranks = ranks_of(model, 2, training={"stall_seconds": 2})
    batch = ranks.batch(tiny.make_samples(1, 2))
    ranks.train(batch, 1)
    monkeypatch.setattr(files, "read_weights", slow(files.read_weights))
    monkeypatch.setattr(checkpoint, "write_tensors", slow(checkpoint.write_tensors))
    ranks.backend.save(str(tmp_path / "c")).wait(60)
    ranks.backend.load(str(tmp_path / "c")).wait(60)
    ranks.train(batch, 1)


def test_an_error_of_all_ranks_is_rank_0s(tiny, model, ranks_of, tmp_path):
    """It is the error of a single process. After a refusal, the ranks can be used again."""
    ranks = ranks_of(model, 2)
    with pytest.raises(TrainingError, match="so there is no adapter"):
        ranks.backend.get_weights("adapter").wait(60)
    ranks.train(ranks.batch(tiny.make_samples(1, 2)), 1)
    ranks.backend.save(str(tmp_path / "c")).wait(60)
    other = ranks_of(model, 0, training={"optimizer": "sgd"})
    with pytest.raises(ConfigError, match="state of the optimizer AdamW, and this run uses SGD"):
        other.backend.load(str(tmp_path / "c")).wait(60)
    ranks.backend.load(str(tmp_path / "c")).wait(60)


def test_ranks_end_with_rank_0(tiny, model, tmp_path):
    """A program that is killed leaves no rank behind."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {os.path.dirname(__file__)!r})
            from conftest import Ranks
            ranks = Ranks({str(model)!r}, {{"training": {{"name": "fsdp", "processes": 2}}}})
            (process,) = ranks.backend._executor._group.processes.values()
            print(process.pid, flush=True)
            time.sleep(600)
            """
        )
    )
    started = forks.popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        assert is_running(pid)
    finally:
        started.kill()
        started.wait()
        started.stdout.close()
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)
