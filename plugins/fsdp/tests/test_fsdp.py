"""Ranks: numerics 3 to 5 with 1, 2 and 4 gloo processes, checkpoints between them, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollouts.errors import ConfigError
from rollouts.training.backends.torch import TorchBackend

pytestmark = pytest.mark.slow
NIGHTLY = pytest.mark.nightly

AGGREGATIONS = ("token_mean", "rollout_mean", "rollout_sum", "dr_grpo", "group_mean", "sum")
STAGES = [{"step": n, "aggregation": name} for n, name in enumerate(AGGREGATIONS) if n]


@pytest.fixture
def folder(tiny, tmp_path):
    """A model as transformers has it."""
    tiny.qwen3().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def weights_of(ranks):
    return ranks.backend.get_weights().wait(60)


def close(one, other, tolerance=1e-4):
    """Equal but for the order of sums: relative to the largest of each tensor."""
    assert set(one) == set(other)
    for name in one:
        scale = max(float(one[name].abs().max()), 1e-3)
        apart = float((one[name] - other[name]).abs().max())
        assert apart <= tolerance * scale, f"{name}: {apart:.2g} of {scale:.2g}"


def same_words(one, other, tolerance=1e-4):
    for mine, theirs in zip(one, other, strict=True):
        assert set(mine) == set(theirs)
        for name, value in mine.items():
            # Maxima and k3 of ratios that are far apart amplify what the order of sums leaves.
            assert math.isclose(value, theirs[name], rel_tol=50 * tolerance, abs_tol=tolerance), name


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2,), pytest.param((1, 2, 4), marks=NIGHTLY)])
def test_ranks_are_one_process(counts, tiny, folder, ranks_of, tmp_path):
    """Every aggregation, unequal token counts, several steps each; a rank with nothing to do; the checkpoint of any
    number of ranks loads into any other.
    """
    steps = [2, *[1] * (len(AGGREGATIONS) - 1)]
    samples = tiny.make_samples()
    alone = ranks_of(folder, 0, schedule=STAGES)
    expected, after = [], []
    alone.backend.save(str(tmp_path / "start")).wait(60)
    for stage in range(len(AGGREGATIONS)):
        expected.append(alone.train(alone.batch(samples, stage), steps[stage]))
        after.append(weights_of(alone))
        alone.backend.load(str(tmp_path / "start")).wait(60)
    few = samples[:1]
    expected_few = alone.train(alone.batch(few), 1)
    scored = alone.backend.forward(alone.batch(samples), ("logprobs", "entropy")).wait(60)
    alone.backend.save(str(tmp_path / "of_0"), {"mine": [1]}).wait(60)
    for processes in counts:
        ranks = ranks_of(folder, processes, schedule=STAGES)
        assert isinstance(ranks.backend, TorchBackend) and ranks.backend.world_size == processes
        assert ranks.backend.model is None, "sharded"
        assert ranks.backend._trainer.shares_prefix
        for stage in range(len(AGGREGATIONS)):
            same_words(ranks.train(ranks.batch(samples, stage), steps[stage]), expected[stage])
            close(weights_of(ranks), after[stage])
            ranks.backend.load(str(tmp_path / "start")).wait(60)
        same_words(ranks.train(ranks.batch(few), 1), expected_few)
        found = ranks.backend.forward(ranks.batch(samples), ("logprobs", "entropy")).wait(60)
        for name in ("logprobs", "entropy"):
            for mine, theirs in zip(getattr(found, name), getattr(scored, name), strict=True):
                assert mine == pytest.approx(theirs, abs=2e-4)
        ranks.backend.save(str(tmp_path / f"of_{processes}"), {"mine": [1]}).wait(60)
        words = ranks.train(ranks.batch(samples), 1)
        for writer in ("of_0", f"of_{processes}"):
            assert ranks.backend.load(str(tmp_path / writer)).wait(60) == {"mine": [1]}
            assert ranks.backend.version == 1
            found = ranks.train(ranks.batch(samples), 1)
            same_words(found, words)
            if writer != "of_0":
                assert found == words, "bit for bit on as many ranks"
        alone.backend.load(str(tmp_path / f"of_{processes}")).wait(60)
        same_words(alone.train(alone.batch(samples), 1), words)
        ranks.backend.close()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"training": {"gradient_checkpointing": True}}, marks=NIGHTLY, id="activation checkpointing"),
        pytest.param({"training": {"replicas": 2}}, marks=NIGHTLY, id="replicas"),
        pytest.param({"lora_rank": 4}, marks=NIGHTLY, id="lora"),
        pytest.param(
            {"lora_rank": 4, "kl": "rk3_loss", "training": {"optimizer": "sgd"}},
            marks=NIGHTLY,
            id="lora with its base as reference",
        ),
        pytest.param({"kl": "rk3_loss", "reference": {"name": "ema", "decay": 0.5}}, marks=NIGHTLY, id="ema"),
        pytest.param({"loss": "ppo", "critic": "head"}, marks=NIGHTLY, id="critic"),
        pytest.param({"loss": "gspo", "training": {"layout": "padded"}}, marks=NIGHTLY, id="padded"),
    ],
)
def test_two_ranks_with(settings, tiny, folder, ranks_of, tmp_path):
    """The same as one process, after a checkpoint too."""
    samples = tiny.make_samples(2, 3)
    settings = dict(settings)
    training = settings.pop("training", {})
    own = {name: value for name, value in training.items() if name != "replicas"}
    crews = [ranks_of(folder, 0, training=own, **settings), ranks_of(folder, 2, training=training, **settings)]
    words, recorded = [], []
    for ranks in crews:
        batch = ranks.batch(samples)
        batch.record = True
        names = [name for name in ("ref_logprobs", "values") if name in ranks.plan.needs]
        said = []
        for step in range(3):
            if names:
                output = ranks.backend.forward(batch, tuple(names)).wait(60)
                for number, row in enumerate(batch.rows):
                    row.ref_logprobs = output.ref_logprobs[number] if output.ref_logprobs else None
                    row.old_values = output.values[number] if output.values else None
            said += ranks.train(batch, 1)
            if step == 1:
                ranks.backend.save(str(tmp_path / f"{ranks.backend.world_size}")).wait(60)
        words.append(said)
        recorded.append(
            {name: torch.frombuffer(bytearray(data), dtype=torch.float32) for name, data in batch.recorded.items()}
        )
    same_words(*words)
    assert recorded[0]
    close(*recorded)
    close(*map(weights_of, crews))
    for ranks, other in zip(crews, ("2", "1"), strict=True):
        ranks.backend.load(str(tmp_path / other)).wait(60)
    close(*map(weights_of, crews))
    same_words(*(ranks.train(ranks.batch(samples), 0) for ranks in crews))


def test_ranks_meet_in_the_backward_of_rows_without_an_advantage(tiny, folder, ranks_of):
    """One process runs them forward only. Of two ranks one may have no other rows, and in one step no rank has any."""
    samples = tiny.make_samples(4, 3)
    words, crews = [], [ranks_of(folder, processes) for processes in (0, 2)]
    for ranks in crews:
        said = []
        for informative in ((1,), (), (0, 2)):
            batch = ranks.batch(samples)
            for row in batch.rows:
                row.advantages = [value if row.group_index in informative else 0.0 for value in row.advantages]
            said += ranks.train(batch, 1)
        words.append(said)
    assert [said["optim/skipped"] for said in words[0]] == [0.0] * 3
    same_words(*words)
    close(*map(weights_of, crews))


@pytest.mark.parametrize("family", [pytest.param(family, marks=NIGHTLY) for family in ("gpt2", "llama", "gemma2")])
def test_two_ranks_of_other_families(family, tiny, ranks_of, tmp_path):
    """An untied head, transposed linear layers, a capped head; ranks above 0 get all weights from rank 0."""
    model = getattr(tiny, family)()
    model.save_pretrained(tmp_path / "model")
    samples = tiny.make_samples(2, 3)
    attention = {"attention": "eager"} if family == "gemma2" else {}
    alone = ranks_of(tmp_path / "model", 0, training=attention)
    ranks = ranks_of(tmp_path / "model", 2, training=attention)
    close(weights_of(ranks), weights_of(alone), 0.0)
    same_words(ranks.train(ranks.batch(samples)), alone.train(alone.batch(samples)))
    close(weights_of(ranks), weights_of(alone))
    ranks.backend.save(str(tmp_path / "saved")).wait(60)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    close(loaded.state_dict(), weights_of(ranks), 0.0)


def test_bfloat16_layers_keep_float32_weights(tiny, folder, ranks_of, tmp_path):
    """The masters are float32, in a checkpoint too; a small step is not lost, as it is where weights are bfloat16."""
    samples = tiny.make_samples(2, 3)
    exact = ranks_of(folder, 0, lr=1e-5)
    ranks = ranks_of(folder, 2, lr=1e-5, training={"dtype": "bfloat16"})
    before = weights_of(ranks)
    assert {tensor.dtype for tensor in before.values()} == {torch.float32} and ranks.backend.compute_dtype == "bfloat16"
    words, expected = ranks.train(ranks.batch(samples), 2), exact.train(exact.batch(samples), 2)
    assert words[0]["policy/loss"] == pytest.approx(expected[0]["policy/loss"], abs=0.05)
    assert words[0] != expected[0], "it does compute in bfloat16"
    after = weights_of(ranks)
    moved = {name: (after[name] - before[name]).abs().max() for name in before}
    assert all(1e-6 < value < 1e-4 for value in moved.values()), moved
    lost = {name: (after[name].bfloat16() == before[name].bfloat16()).float().mean() for name in before}
    assert sum(lost.values()) / len(lost) > 0.5, "bfloat16 weights would have kept most of their values"
    ranks.backend.save(str(tmp_path / "c")).wait(60)
    exact.backend.load(str(tmp_path / "c")).wait(60)
    close(weights_of(exact), after, 0.0)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"replicas": 2, "processes": 3}, "replicas 2: 3 ranks cannot be split into 2 equal groups"),
        ({"processes": -1}, "processes -1: expected 1 or more"),
        ({"dtype": "float16"}, "dtype float16: expected float32 or bfloat16"),
        ({"stall_seconds": 0}, "stall-seconds 0: expected 1 or more"),
        ({"lora_targets": "nowhere"}, "'nowhere' match no layer of Qwen3ForCausalLM"),
    ],
)
def test_settings_that_cannot_be_sharded_are_refused(training, words, folder, ranks_of):
    with pytest.raises(ConfigError, match=words):
        ranks_of(folder, 2, training=training, lora_rank=2 if "lora_targets" in training else 0)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "its variables are RANK=0, WORLD_SIZE=2, MASTER_ADDR=.not set., MASTER_PORT",
        ),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "its variables are RANK=x"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "processes 2, but the launcher started 4 ranks",
        ),
    ],
)
def test_a_launcher_that_disagrees_is_refused(variables, words, folder, ranks_of, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        ranks_of(folder, 2)
