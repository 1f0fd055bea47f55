"""Only ranks can command ranks: on one machine the store listens on loopback, and all messages are signed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import forks
import pytest
from rollouts_fsdp.ranks import gather_ranks
from rollouts_fsdp.rendezvous import RankChannel
from torch.distributed import HashStore, TCPStore

from rollouts.cli import main
from rollouts.errors import ConfigError, RankError

SECRET = "ROLLOUTS_RANKS_SECRET"
LISTENS = "0A"


def listening():
    """The addresses and ports on which this process listens, as Linux tells them: hexadecimal, IPv4 and IPv6."""
    own = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in own:
                address, port = words[1].split(":")
                found.add((address, int(port, 16)))
    return found


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def on_hosts(monkeypatch, **variables):
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"} | variables
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def gathered():
    return gather_ranks(1, "", stall_seconds=5.0, start_seconds=5.0, on_gpus=False)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="listening sockets are read from Linux's /proc")
@pytest.mark.parametrize("launcher", ["none", "variables", "torchrun"])
def test_ranks_of_one_machine_listen_on_loopback_only(launcher, monkeypatch):
    agent = None
    if launcher != "none":
        here = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": socket.gethostname()}
        on_hosts(monkeypatch, **here, MASTER_PORT=str(free_port()))
    if launcher == "torchrun":
        agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    before = listening()
    gathering = gathered()
    try:
        gathering.join("gloo", "the same")
        new = listening() - before
        assert new and {address for address, _ in new} == {"0100007F"}, "127.0.0.1"
        if agent is not None:
            assert agent.check(["rollouts/0/port"]) and agent.num_keys() <= 3, "the launcher's store has the port only"
    finally:
        gathering.end()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize(("secret", "words"), [("", "is not set"), ("short", "has 5 characters: expected 16 or more")])
def test_ranks_of_several_hosts_need_a_secret(secret, words, dry, monkeypatch, capsys, tmp_path):
    on_hosts(monkeypatch, COLUMNS="400", **{SECRET: secret})
    flags = ["--eval-tasks", "0", "--training", "fsdp", "--out", str(tmp_path / "out"), *dry]
    assert main(["run", "--env", "calculator", *flags]) == 2
    printed = capsys.readouterr().err
    assert SECRET in printed and words in printed and "openssl rand" in printed
    assert not (tmp_path / "out").exists()


def test_a_rank_with_another_secret_is_refused(monkeypatch):
    port = free_port()
    on_hosts(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **{SECRET: "the secret of rank 0"})
    gathering = gathered()
    try:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv(SECRET, "the secret of rank 1")
        other = gathered()
        other.channel.post("composed/1", b"1")
        with pytest.raises(ConfigError, match=f"messages of rank 1 are not signed .* same {SECRET}"):
            gathering.meet("composed")
        with pytest.raises(ConfigError, match="messages of rank 0 are not signed"):
            other.meet("composed")
        other.heartbeat.end()
    finally:
        gathering.end()


@pytest.mark.parametrize("size", [0, 5, 9_000_000])
def test_a_signed_message_arrives_and_any_other_is_refused(size):
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    own, stranger = RankChannel(store, b"secret", "run"), RankChannel(store, b"", "run")
    data = bytes(size)
    own.send("command/1/1", data)
    assert own.receive("command/1/1", 1) == data and not own.is_there("command/1/1")
    for fake in (stranger, RankChannel(store, b"secret", "an earlier run")):
        fake.send("command/2/1", data)
        with pytest.raises(RankError, match="command/2/1 in the ranks' store is not signed"):
            own.receive("command/2/1", 1)
        fake.post("failed/1", b"notice")
        assert own.read("failed/1") is None
    own.send("command/3/1", data)
    store.set("command/3/1/0", b"other bytes")
    with pytest.raises(RankError, match="not signed"):
        own.receive("command/3/1", 1)
    own.post("failed/1", b"notice")
    store.set("failed/2", store.get("failed/1"))
    assert own.read("failed/1") == b"notice" and own.read("failed/2") is None, "signed for its place"
    store.set("failed/1", b"")
    assert own.read("failed/1") is None
    assert "secret" not in repr(own)


ENDING = """
import os, sys, threading
from torch import distributed
from rollouts_fsdp import heartbeats
from rollouts_fsdp.ranks import DistributedExecutor, RankWorker, gather_ranks
from rollouts.training.backends.torch import COMMANDS
from rollouts.training.backends.trainer import Trainer

heartbeats.BEAT_SECONDS = 0.01

class Idle(Trainer):
    is_sharded = has_gradients = False

    def __init__(self):
        pass

def close(self) -> None:
    pass

def save(self) -> None:
    raise ValueError("the disk is full")

Trainer.close = close
COMMANDS.update(close=close, save=save)

def slow(self, key, data, post=heartbeats.RankChannel.post):
    post(self, key, data)
    if key.startswith("beat/"):
        threading.Event().wait(0.03)

heartbeats.RankChannel.post = slow
group = gather_ranks(2, "", stall_seconds=20.0, start_seconds=60.0, on_gpus=False)
with group.starting("gloo", "the same"):
    trainer = Idle()
try:
    if group.place.rank > 0:
        RankWorker(trainer, group).serve()
    else:
        executor = DistributedExecutor(trainer, group)
        try:
            if sys.argv[1] == "fails":
                executor.call(save)
        finally:
            executor.close()
except ValueError:
    pass
left = [thread.name for thread in threading.enumerate() if thread.name.startswith("rollouts-")]
assert not left, left
assert not distributed.is_initialized(), "the process group is left"
"""


def two_ranks(code, *arguments, **streams):
    """Processes of a launcher on this machine that run the code."""
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [
        forks.popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **variables, "RANK": rank},
            text=True,
            **streams,
        )
        for rank in "01"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fails", pytest.param("ends", marks=pytest.mark.nightly)])
def test_a_rank_that_ended_leaves_no_thread_and_no_process_group(how):
    """Either one may be inside torch while Python ends, which aborts the process: a launcher sees a run that failed."""
    ranks = two_ranks(ENDING, how, stderr=subprocess.PIPE)
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    # Once the run has failed, rank 0 may end before rank 1 has: it says so, and exits with 1.
    assert codes == [0, 0] or (how == "fails" and codes == [0, 1] and "rank 0 is gone" in said[1]), said


COMMITS = """
import os
from rollouts.models import revisions
from rollouts_fsdp.ranks import gather_ranks

with revisions.pinned({}):
    revisions.record("acme/small", os.environ["RANK"] * 40)
    group = gather_ranks(2, "", stall_seconds=60.0, start_seconds=60.0, on_gpus=False)
    group.join("gloo", "the same")
    print(revisions.commit_of("acme/small"))
    group.end()
"""


def test_all_ranks_of_a_launcher_use_the_commits_of_rank_0():
    said = [rank.communicate(timeout=120) for rank in two_ranks(COMMITS, stdout=subprocess.PIPE)]
    assert [out for out, _ in said] == [f"{'0' * 40}\n"] * 2
