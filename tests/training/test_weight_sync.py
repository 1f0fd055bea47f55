"""sync_weights: which engines get weights, what is measured, and that missing weights are detected and named."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import trio
from backend_fakes import BackendFields
from rollouts_servers.http import HTTPFailure

from rollouts.errors import InferenceError
from rollouts.inference.base import Capabilities, WeightUpdate
from rollouts.models.futures import ImmediateTrainFuture
from rollouts.training import create_pytorch_backend
from rollouts.training.batches import ForwardOutput
from rollouts.training.weights import files as weight_files
from rollouts.training.weights import probe
from rollouts.training.weights.probe import Proof, has_not_moved, parity_tolerance, probe_parity
from rollouts.training.weights.sync import WeightSyncManager, sync_weights

sys.path.insert(0, str(Path(__file__).parent))
from tiny_qwen3 import qwen3
from weight_fakes import FolderEngine


class Backend(BackendFields):
    version = 7

    def __init__(self, dtype=torch.float32):
        self.fetched, self.dtype = 0, dtype

    def get_weights(self, kind):
        assert kind == "full"
        self.fetched += 1
        return ImmediateTrainFuture({"a": torch.zeros(3, dtype=self.dtype), "n": torch.zeros(2, dtype=torch.int64)})

    def forward(self, batch, needs):
        (row,) = batch.rows
        assert needs == ("logprobs",) and batch.temperature == 1.0
        return ImmediateTrainFuture(ForwardOutput(logprobs=[[0.0, *(-float(token) for token in row.tokens[1:])]]))


class Engine:
    context_tokens_max = 100
    vocabulary_size = version = 0

    def __init__(self, owns_weights=False, wrong=0.0):
        self.updates, self.wrong = [], wrong
        self.capabilities = Capabilities(owns_weights=owns_weights)

    async def update_weights(self, update):
        self.updates.append(update)

    async def score(self, tokens, temperature=1.0):
        self.tokens = tokens
        scores = [0.0, *(-float(token) for token in tokens[1:])]
        scores[-1] += self.wrong
        return scores


def sync(*engines, backend=None, **settings):
    async def main():
        return await sync_weights(backend or Backend(), engines, **settings)

    return trio.run(main)


def test_shared_parameters_are_told_the_version_only():
    backend, engines = Backend(), [Engine(), Engine(owns_weights=False)]
    metrics = sync(*engines, backend=backend)
    assert [[(u.version, u.weights) for u in engine.updates] for engine in engines] == [[(7, None)], [(7, None)]]
    assert metrics.keys() == {"sync/version", "sync/seconds"} and metrics["sync/version"] == 7.0
    assert backend.fetched == 0


def test_engines_with_weights_of_their_own_are_given_them_once_fetched_and_probed():
    backend, engines = Backend(), [Engine(True), Engine(), Engine(True, wrong=1e-4)]
    metrics = sync(*engines, backend=backend)
    assert backend.fetched == 1
    first, shared, last = (engine.updates[0].weights for engine in engines)
    assert first is last and first.keys() == {"a", "n"} and shared is None
    assert metrics["sync/bytes"] == 3 * 4 + 2 * 8
    assert metrics["sync/probe"] == pytest.approx(1e-4, rel=0.1)
    assert engines[0].tokens == list(range(32))


@pytest.mark.parametrize("wrong", [2e-3, math.nan])
def test_weights_that_did_not_arrive_are_seen(wrong):
    with pytest.raises(InferenceError, match=r"version 7 .* token 31 .* in the trainer") as caught:
        sync(Engine(True), Engine(True, wrong=wrong))
    assert f"{-31 + wrong:.6g} there and -31 in the trainer" in str(caught.value)


def test_an_engine_without_a_name_of_its_own_is_named_by_its_class():
    refusing = Engine(True)

    async def refuse(update):
        raise InferenceError("no room")

    refusing.update_weights = refuse
    for engine, words in ((Engine(True, wrong=1.0), "does not serve"), (refusing, "did not take")):
        with pytest.raises(InferenceError, match=rf"^the engine \(Engine\) {words} the weights of version 7"):
            sync(engine)


def test_the_tolerance_goes_by_the_type_of_the_weights():
    assert parity_tolerance({"a": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int8)}) == 1e-3
    assert parity_tolerance({"a": torch.zeros(1, dtype=torch.bfloat16), "b": torch.zeros(1)}) == 5e-2
    halves = Backend(torch.bfloat16)
    assert sync(Engine(True, wrong=0.01), backend=halves)["sync/probe"] == pytest.approx(0.01, rel=0.1)
    with pytest.raises(InferenceError, match=r"at most 0\.001"):
        sync(Engine(True, wrong=0.01), backend=halves, tolerance=1e-3)


def test_an_engine_may_say_its_own_tolerance():
    engine = Engine(True, wrong=0.01)
    engine.capabilities = engine.capabilities._replace(tolerance=0.0)
    with pytest.raises(InferenceError, match=r"at most 0\.001"):
        sync(engine)
    engine.capabilities = engine.capabilities._replace(tolerance=0.02)
    assert sync(engine)["sync/probe"] == pytest.approx(0.01, rel=0.1)
    with pytest.raises(InferenceError, match=r"at most 0\.001"):
        sync(engine, tolerance=1e-3)


def test_the_probe_stays_within_a_small_vocabulary_and_context():
    engine = Engine(True)
    engine.vocabulary_size, engine.context_tokens_max = 5, 7
    assert trio.run(probe_parity, Backend(), engine) == 0.0
    assert engine.tokens == [0, 1, 2, 3, 4, 0, 1]


# --- servers: folders, and the proof ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    qwen3(3).save_pretrained(str(folder))
    return folder


@pytest.fixture
def full(base):
    made = create_pytorch_backend(str(base), 1e-3, 1, device="cpu")
    yield made
    made.close()


@pytest.fixture
def adapted(base):
    made = create_pytorch_backend(str(base), 1e-3, 1, lora_rank=2, device="cpu")
    yield made
    made.close()


def step(backend, size=0.05, seed=0):
    """The next version of the weights."""
    generator = torch.Generator().manual_seed(seed)
    kind = "full" if backend.model_files.adapter_config is None else "adapter"
    weights = backend.get_weights(kind).wait()
    moved = {n: v + size * torch.randn(v.shape, generator=generator) for n, v in weights.items() if "lm_head" not in n}
    if "lm_head.weight" in weights:
        moved["lm_head.weight"] = moved["model.embed_tokens.weight"]
    backend.load_weights(moved).wait()
    backend._trainer.version += 1


def go(syncing, backend):
    return trio.run(syncing.sync, backend)


def test_a_server_is_given_a_folder_and_proved(full, base, tmp_path):
    engines = [FolderEngine(base, tmp_path / "w", name=f"http://{n}") for n in (1, 2)]
    syncing = WeightSyncManager(engines, temperature=0.7)
    for version in range(3):
        metrics = go(syncing, full)
        assert metrics.keys() == {"sync/version", "sync/bytes", "sync/probe", "sync/seconds"}
        assert metrics["sync/version"] == version == syncing.version and metrics["sync/probe"] < 2e-5
        weights = full.get_weights().wait()
        assert metrics["sync/bytes"] == sum(v.nbytes for n, v in weights.items() if n != "lm_head.weight")
        assert [each.name for each in (tmp_path / "w").iterdir()] == [f"v{version:06d}"]  # those before are gone
        one, other = (engine.updates[-1] for engine in engines)
        assert one is other and one.path == str(tmp_path / "w" / f"v{version:06d}")  # written once for both
        assert len(one.manifest) == len(weights) - 1 and one.probe.tolerance == 1e-4
        assert all(torch.equal(v, engines[0].model.state_dict()[n]) for n, v in weights.items())
        step(full, seed=version)


def test_adapters_are_sent_as_peft_has_them(adapted, base, tmp_path):
    engine = FolderEngine(base, tmp_path, kind="adapter")
    syncing = WeightSyncManager([engine])
    for seed in range(4):
        metrics = go(syncing, adapted)
        assert sorted(each.name for each in tmp_path.iterdir()) == [f"v{v:06d}" for v in (seed - 1, seed) if v >= 0]
        assert metrics["sync/probe"] < 2e-5 and (Path(engine.updates[-1].path) / "adapter_config.json").is_file()
        assert metrics["sync/bytes"] < 30_000 and engine.updates[-1].kind == "adapter"
        step(adapted, seed=seed)


FAULTS = [
    ({"old": True}, "its numbers are those of before: it still serves version 1"),
    ({"drop": "model.embed_tokens.weight"}, "some tensor did not arrive whole"),
    ({"flip": "model.layers.0.self_attn.k_proj.weight"}, "some tensor did not arrive whole"),
    ({"nan": "model.norm.weight"}, "some of its numbers are NaN"),
    (
        {"stale": True},
        "though it scores right; .* its prefix cache still holds what is of version 1: the cache was not",
    ),
    ({"raw": True}, "temperature 0.7 .* they are those of temperature 1: start the server"),
    (
        {"refuse": True},
        r"did not take the weights of version 2 after version 1 \(1 of 2 engines failed\): status 500: ",
    ),
]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(
            fault, words, id=name, marks=[pytest.mark.nightly] * (name in ("flip", "nan", "old", "raw", "stale"))
        )
        for fault, words in FAULTS
        for name in fault
    ],
)
def test_faults_of_full_weights_are_seen_and_named(full, base, tmp_path, fault, words, monkeypatch):
    engines = [FolderEngine(base, tmp_path, name=name) for name in ("http://good", "http://bad")]
    syncing = WeightSyncManager(engines, temperature=0.7)
    for seed in range(2):
        go(syncing, full)
        step(full, seed=seed)
    engines[1].faults = fault
    with pytest.raises(InferenceError, match=words) as caught:
        go(syncing, full)
    assert "http://bad" in str(caught.value) and "http://good" not in str(caught.value)
    assert "version 2" in str(caught.value) and not caught.value.is_transient
    assert (tmp_path / "v000001").is_dir()  # the last one that was proved
    if "refuse" not in fault:  # the control: without the probe, nothing detects it
        monkeypatch.setattr(Proof, "prove", nothing_proved)
        go(syncing, full)


async def nothing_proved(proof, engine):
    return [0.0]


def test_an_adapter_that_is_not_used_is_seen(adapted, base, tmp_path):
    engine = FolderEngine(base, tmp_path, kind="adapter")
    syncing = WeightSyncManager([engine])
    go(syncing, adapted)  # an adapter that changes nothing yet
    step(adapted, seed=1)
    engine.faults = {"base": True}
    with pytest.raises(InferenceError, match=r"still serves version 0, so the adapter was not loaded, or requests do"):
        go(syncing, adapted)
    engine.faults = {}
    go(syncing, adapted)
    step(adapted, seed=2)
    engine.faults = {"base": True}
    with pytest.raises(InferenceError, match=r"those of version 0 \(the model without an adapter"):
        go(syncing, adapted)


def test_without_memory_what_was_served_before_is_known(full, base, tmp_path):
    engine = FolderEngine(base, tmp_path)
    step(full)
    engine.faults = {"old": True}
    with pytest.raises(InferenceError, match="it still serves what it served before"):
        trio.run(sync_weights, full, [engine])
    engine.faults = {"stale": True}
    with pytest.raises(InferenceError, match="cache still holds what is of the weights before"):
        trio.run(sync_weights, full, [engine])
    engine.cached.clear()
    engine.faults = {}
    assert trio.run(sync_weights, full, [engine])["sync/probe"] < 2e-5


def test_a_step_smaller_than_the_tolerance_is_seen_not_to_arrive(full, base, tmp_path):
    engine = FolderEngine(base, tmp_path)
    syncing = WeightSyncManager([engine])
    go(syncing, full)
    step(full, 1e-6)
    engine.faults = {"old": True}
    with pytest.raises(InferenceError, match="have moved since version 0, and the server's have not; it still serves"):
        go(syncing, full)
    engine.faults = {}
    assert go(syncing, full)["sync/probe"] < 2e-5
    full._trainer.version += 1  # a step that changed nothing: nothing has to move
    engine.faults = {"old": True}
    go(syncing, full)


def test_the_sequences_of_a_short_context_fit_into_it():
    scored, prompt, other, sampled = probe.probe_sequences(16, 100)
    assert (len(scored), len(prompt), len(other), sampled) == (15, 11, 11, 4)
    assert len({tuple(prompt), tuple(other)}) == 2 and max(scored + prompt + other) < 88  # the last ids are left out


def test_only_numbers_of_the_same_tokens_are_compared():
    numbers = [0.0, 1.0]
    for ours, theirs in ((([0.0], numbers), (numbers, numbers)), ((numbers, [0.0, 2.0]), ([0.0], [0.0]))):
        with pytest.raises(ValueError, match="zip"):
            has_not_moved(ours, theirs, 1e-4)


def test_what_counts_as_not_having_moved():
    generator = torch.Generator().manual_seed(0)

    def noise(size):
        return (torch.randn(128, generator=generator) * size).tolist()

    def plus(one, other):
        return [a + b for a, b in zip(one, other, strict=True)]

    start = noise(3.0)
    for tolerance, rounding in ((1e-4, 1e-5), (1e-2, 1e-3)):
        for _ in range(50):
            step = noise(tolerance / 2)
            ours = (start, plus(start, step))
            before, stale, fresh = (plus(at, noise(rounding)) for at in (start, start, ours[1]))
            assert has_not_moved(ours, (before, stale), tolerance)
            assert not has_not_moved(ours, (before, fresh), tolerance)
            assert not has_not_moved((start, plus(start, noise(tolerance / 50))), (before, stale), tolerance)  # noise
    half = (start, plus(start, noise(0.1)))
    assert has_not_moved(half, (start, list(start)), 5e-2)
    assert not has_not_moved(half, (start, plus(start, noise(0.01))), 5e-2)  # as small as noise


def test_what_is_wrong_on_the_disk_stops_before_a_server_is_asked(full, base, tmp_path, monkeypatch):
    engine = FolderEngine(base, tmp_path)
    written = weight_files.write_folder

    def spoiled(*args, **settings):
        path = written(*args, **settings)
        data = bytearray((path / "model.safetensors").read_bytes())
        data[-3] ^= 1
        (path / "model.safetensors").write_bytes(data)
        return path

    monkeypatch.setattr(weight_files, "write_folder", spoiled)
    with pytest.raises(InferenceError, match=r"model\.norm\.weight has other bytes|has other bytes \(crc32"):
        trio.run(sync_weights, full, [engine])
    assert engine.updates == []
    monkeypatch.setattr(
        weight_files, "check_weights_folder", lambda *_: None
    )  # the control: a low bit is below any tolerance
    trio.run(sync_weights, full, [engine])
    assert len(engine.updates) == 1


class Pool:
    """Several servers; one that is asked after its death is given up."""

    def __init__(self, *engines):
        self.engines, self.updates = engines, 0
        self.capabilities = engines[0].capabilities._replace(is_pool=True)

    @property
    def members(self):
        return tuple(engine for engine in self.engines if not getattr(engine, "given_up", False))

    async def update_weights(self, update: WeightUpdate):
        self.updates += 1
        for engine in self.members:
            await engine.update_weights(update)

    async def health(self):
        for engine in self.engines:
            engine.given_up = getattr(engine, "dead", False)


async def refused(*_):
    raise HTTPFailure("refused", "no connection", retryable=True)


def test_each_server_of_a_pool_is_proved_and_the_pool_updated_once(full, base, tmp_path):
    pool = Pool(*(FolderEngine(base, tmp_path, name=f"http://{n}") for n in (1, 2)))
    syncing = WeightSyncManager([pool])
    go(syncing, full)
    assert pool.updates == 1
    step(full)
    pool.engines[1].faults = {"drop": "model.norm.weight"}
    with pytest.raises(InferenceError, match=r"http://2 does not serve .* some tensor did not arrive"):
        go(syncing, full)
    pool.engines[1].faults = {}
    pool.engines[1].score = refused
    with pytest.raises(InferenceError, match=r"http://2 was given the weights .* cannot be asked whether it serves"):
        go(syncing, full)  # it lives, says the pool
    pool.engines[1].dead = True
    assert go(syncing, full)["sync/version"] == 1  # dead: the pool's to start again
    pool.engines[0].dead = True
    pool.engines[0].score = refused
    with pytest.raises(InferenceError, match=r"no server of .* is left"):
        go(syncing, full)


def test_a_backend_that_cannot_be_written_is_refused(base, tmp_path):
    with pytest.raises(InferenceError, match="Backend does not say how its weights are written"):
        sync(FolderEngine(base, tmp_path))
