"""Weights over a gloo group: rank 0 here, servers in threads. An error names the server that fails; no wait hangs."""

from __future__ import annotations

import functools
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import trio
from rollouts_servers import broadcast as weight_broadcast
from rollouts_servers.broadcast import send_over_group
from torch import distributed

from rollouts.errors import InferenceError
from rollouts.inference.base import Capabilities, WeightUpdate
from rollouts.training import create_pytorch_backend
from rollouts.training.weights.files import manifest_of
from rollouts.training.weights.sync import WeightSyncManager

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "training"))
from tiny_qwen3 import qwen3
from weight_fakes import FolderEngine


class Receiver:
    """A server's end, as torch's helper makes its group. `fault`: `refuse` (before it receives), `die` (with its group,
    amid the broadcast), `absent` (it never joins).
    """

    capabilities = Capabilities(owns_weights=True, weights_as="group", is_pool=True)
    context_tokens_max = vocabulary_size = version = 0

    def __init__(self, ranks=1, fault=""):
        self.ranks, self.fault, self.url = ranks, fault, "http://127.0.0.1:1"
        self.groups, self.tensors, self.left = [], [], 0
        self.members = (self,)

    def __repr__(self):
        return f"receiver {self.fault}"

    async def group_ranks(self):
        return self.ranks

    async def join_group(self, place, rank, receiving):
        assert place.backend == "gloo" and place.address == "127.0.0.1"
        if self.fault == "absent":
            raise InferenceError("http://far did not join the group")
        self.receiving = receiving

        def join(own):
            store = distributed.TCPStore(place.address, place.port, place.world_size, is_master=False)
            inner = distributed.PrefixStore(f"{place.name}/", distributed.PrefixStore(place.name, store))
            prefixed = distributed.PrefixStore("cpu/", inner)
            return distributed.ProcessGroupGloo(prefixed, own, place.world_size, timedelta(seconds=3))

        self.groups = [None] * self.ranks
        async with trio.open_nursery() as nursery:
            for index in range(self.ranks):

                async def one(index=index):
                    self.groups[index] = await trio.to_thread.run_sync(join, rank + index)

                nursery.start_soon(one)

    async def leave_group(self):
        self.groups, self.left = [], self.left + 1

    async def update_weights(self, update):
        if self.fault == "gone":
            self.members = ()
            return  # as a pool does whose server went down after it had joined
        if self.fault == "refuse":
            raise InferenceError("status 400: wrong shape")
        self.update = update
        self.receiving()
        found = [{} for _ in self.groups]
        receive = functools.partial(trio.to_thread.run_sync, self._receive, abandon_on_cancel=True)
        async with trio.open_nursery() as nursery:
            for group, into in zip(self.groups, found, strict=True):
                nursery.start_soon(receive, group, update, into)
        self.tensors = found

    def _receive(self, group, update, into):
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for place, info in enumerate(update.manifest):
            if self.fault == "die" and place == 1:
                self.groups.clear()
                return
            into[info.name] = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
            group.broadcast([into[info.name]], options).wait()


def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(4, 2, generator=generator).T,
        "c": torch.arange(3),
        "half": torch.randn(7, generator=generator).bfloat16(),
    }


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setattr(weight_broadcast, "JOIN_SECONDS", 5.0)


def send(*engines, tensors=None, load_seconds=5.0):
    tensors = weights() if tensors is None else tensors
    update = WeightUpdate(4, manifest=manifest_of(tensors))
    for engine in engines if load_seconds is not None else ():
        engine.capabilities = engine.capabilities._replace(load_seconds=load_seconds)
    trio.run(send_over_group, engines, update, tensors)
    return tensors


@pytest.mark.parametrize("ranks", [[1], [1, 2]])
def test_every_rank_of_every_server_has_the_tensors(ranks):
    engines = [Receiver(each) for each in ranks]
    for _ in range(2):  # and again, by another group
        tensors = send(*engines)
        for engine, count in zip(engines, ranks, strict=True):
            assert len(engine.tensors) == count and engine.update.path is None
            for found in engine.tensors:
                assert list(found) == list(tensors) and all(torch.equal(found[name], tensors[name]) for name in found)
    assert [engine.left for engine in engines] == [2] * len(engines)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuse", "status 400: wrong shape"),
        ("absent", "http://far did not join"),
        ("gone", "gone went away before it received version 4"),
        ("die", "version 4 were not broadcast"),
    ],
)
def test_one_that_fails_is_named_and_no_one_waits_for_it(fault, words):
    engines = [Receiver(), Receiver(fault=fault)]
    start = time.perf_counter()
    with pytest.raises(InferenceError, match=words):
        send(*engines)
    assert time.perf_counter() - start < 15 and engines[0].left == 1


@pytest.mark.parametrize(("own", "expected"), [([], 600.0), ([7.0, 9.0], 9.0)])
def test_a_broadcast_may_take_as_long_as_the_servers_say(own, expected, monkeypatch):
    engines = [Receiver() for _ in own or [0]]
    for engine, seconds in zip(engines, own, strict=False):
        engine.capabilities = engine.capabilities._replace(load_seconds=seconds)
    bounds, broadcast = [], weight_broadcast._broadcast

    def noted(group, tensors, device, seconds):
        bounds.append(seconds)
        broadcast(group, tensors, device, seconds)

    monkeypatch.setattr(weight_broadcast, "_broadcast", noted)
    send(*engines, load_seconds=None)
    assert bounds == [expected]


def test_an_engine_that_takes_none_is_refused(tmp_path):
    class Other:
        capabilities = Capabilities(owns_weights=True, weights_as="group")
        context_tokens_max = vocabulary_size = version = 0

    with pytest.raises(InferenceError, match=r"takes no weights over torch\.distributed"):
        send(Other())


def test_the_address_is_one_that_the_servers_can_reach(monkeypatch):
    assert weight_broadcast._own_address(["http://127.0.0.1:1", "http://localhost:2"]) == "127.0.0.1"
    with pytest.raises(InferenceError, match="cannot be reached"):
        weight_broadcast._own_address(["http://127.0.0.1:1", "http://no-such-host.invalid"])


class Served(Receiver, FolderEngine):
    """A receiver that serves what it received, or all but one tensor."""

    def __init__(self, base):
        FolderEngine.__init__(self, base, "", name="group")
        Receiver.__init__(self)
        self.capabilities = Receiver.capabilities
        self.drop = ""

    async def update_weights(self, update):
        await Receiver.update_weights(self, update)
        given = {name: value for name, value in self.tensors[0].items() if name != self.drop}
        self.model.load_state_dict(given, strict=False)
        self.version = update.version
        self.cached.clear()


def test_a_sync_over_a_group_is_proved_like_any_other(tmp_path):
    qwen3(3).save_pretrained(str(tmp_path))
    backend = create_pytorch_backend(str(tmp_path), 1e-3, 1, device="cpu")
    engine = Served(tmp_path)
    syncing = WeightSyncManager([engine])

    def step():
        moved = {name: value + 0.05 for name, value in backend.get_weights().wait().items()}
        backend.load_weights(moved).wait()
        backend._trainer.version += 1

    assert trio.run(syncing.sync, backend)["sync/probe"] < 2e-5
    step()
    metrics = trio.run(syncing.sync, backend)
    assert metrics["sync/probe"] < 2e-5 and metrics["sync/bytes"] == sum(v.nbytes for v in engine.tensors[0].values())
    step()
    engine.drop = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(InferenceError, match="some tensor did not arrive whole"):
        trio.run(syncing.sync, backend)
    engine.drop = ""
    assert trio.run(syncing.sync, backend)["sync/version"] == 2
    backend.close()
