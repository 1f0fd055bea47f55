"""The torch backend: numerics 3, 9, 10, 14, skipped steps, errors of wrong losses, and metrics."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from backend_fakes import BackendFields

from rollouts.errors import ConfigError, ModelError, SignatureError, TrainingError
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.algorithm import Algorithm, Term, as_algorithm, bind_algorithm
from rollouts.training.algorithms.corrections import truncated
from rollouts.training.algorithms.losses import entropy_bonus, ppo_clip
from rollouts.training.algorithms.recipes import CISPO, GRPO, IS, REINFORCE, SFT
from rollouts.training.backends.optimizer import TorchSettings, TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend, create_torch_backend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batches import TrainingBackend
from rollouts.training.batching import make_batch
from rollouts.types import Sample

AGGREGATIONS = ("token_mean", "rollout_mean", "rollout_sum", "dr_grpo", "group_mean", "sum")


@pytest.fixture
def backend_of():
    """Makes backends and ends their threads."""
    made = []

    def make(model, algorithm=GRPO, *, adapter=None, **settings):
        made.append(
            TorchBackend(
                Executor(
                    Trainer(
                        copy.deepcopy(model),
                        {"main": algorithm},
                        TrainerSettings(**{"lr": 1e-3, **settings}),
                        adapter=adapter,
                    )
                )
            )
        )
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def batch_of(samples, aggregation="token_mean", **settings):
    advantages = [math.sin(3.0 * n + 1) for n in range(1 + max(s.rollout_index for s in samples))]
    return make_batch(samples, advantages, aggregation=aggregation, step=0, max_tokens=16, **settings)


def gradient_of(backend, batches):
    """The gradient that the optimizer would see: accumulated over the calls and divided by D."""
    metrics = [backend.forward_backward(batch).wait() for batch in batches]
    for each in metrics:  # what a clock and the system say
        assert each.pop("perf/tflops") > 0 and each.pop("perf/peak_gib") > 0
    total = torch.cat([p.grad.reshape(-1) for p in backend.model.parameters() if p.grad is not None])
    return total / backend._trainer._denominator, metrics


def with_current_logprobs(backend, batch):
    found = backend.forward(batch).wait()
    for row, logprobs in zip(batch.rows, found.logprobs, strict=True):
        row.rollout_logprobs = [value if w else 0.0 for value, w in zip(logprobs, row.loss_mask, strict=True)]
    return batch


def close(one, other, relative=1e-4):
    return (one - other).norm() <= relative * other.norm()


def test_it_has_every_member_of_the_protocol(tiny, backend_of):
    """Nothing asks whether a field is there, so a fake has the fields too."""
    members = {name for name in {**vars(TrainingBackend), **TrainingBackend.__annotations__} if name[0] != "_"}
    assert {"version", "model_files", "can_profile", "stop_profile"} <= members
    backend = backend_of(tiny.qwen3())
    assert not [name for name in members if not hasattr(backend, name)]
    fields = {name for name in members if not callable(getattr(TrainingBackend, name, None))}
    assert not fields - vars(BackendFields).keys()


@pytest.mark.parametrize(
    "aggregation", [AGGREGATIONS[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in AGGREGATIONS[1:])]
)
def test_gradients_do_not_depend_on_the_split(tiny, backend_of, aggregation):
    model, samples = tiny.qwen3(), tiny.make_samples()
    batch = batch_of(samples, aggregation)
    reference, metrics = gradient_of(backend_of(model), [batch])
    for share in (True, False):
        for tokens in (1, 50, 90):
            backend = backend_of(model, share_prefix=share, tokens_per_microbatch=tokens)
            found, _ = gradient_of(backend, [batch])
            assert close(found, reference), (share, tokens)
        found, parts = gradient_of(backend_of(model, share_prefix=share), tiny.split_batch(batch, 3))
        assert close(found, reference)
        shares = [part.denominator / batch.denominator for part in tiny.split_batch(batch, 3)]
        losses = [part["policy/loss"] * share for part, share in zip(parts, shares, strict=True)]
        assert sum(losses) == pytest.approx(metrics[0]["policy/loss"], rel=1e-4)
    order = copy.deepcopy(batch)
    order.rows.reverse()
    assert close(gradient_of(backend_of(model), [order])[0], reference)
    # Control: a wrong u on half of the rows is seen (under `sum`, where u is plain, nothing could be stamped wrongly).
    if aggregation != "sum":
        wrong = copy.deepcopy(batch)
        for row in wrong.rows[: len(wrong.rows) // 2]:
            row.weights = [2 * weight for weight in row.weights]
        assert not close(gradient_of(backend_of(model), [wrong])[0], reference, 1e-2)


def count_passes(backend):
    """A list that grows by one each time the first layer is run."""
    layer = next(m for name, m in backend.model.named_modules() if name.endswith(".0.mlp"))
    runs = []
    layer.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


def test_gradient_checkpointing_gives_the_same_gradient(tiny, backend_of):
    batch = batch_of(tiny.make_samples())
    for model in (tiny.qwen3(), tiny.gpt2()):
        reference, _ = gradient_of(backend_of(model), [batch])
        once = count_passes(plain := backend_of(model))
        gradient_of(plain, [batch])
        backend = backend_of(model, gradient_checkpointing=True)
        runs = count_passes(backend)
        found, _ = gradient_of(backend, [batch])
        assert close(found, reference) and backend._trainer.shares_prefix and not backend.model.training
        assert once and len(runs) == 2 * len(once), "each layer runs again in the backward"


@pytest.mark.parametrize("algorithm", [GRPO, IS])
def test_first_step_is_the_policy_gradient_even_with_dropout(tiny, backend_of, algorithm):
    model = tiny.gpt2()  # dropout 0.1
    backend = backend_of(model, algorithm)
    batch = with_current_logprobs(backend, batch_of(tiny.make_samples()))
    found, metrics = gradient_of(backend, [batch])
    reference, _ = gradient_of(backend_of(model, REINFORCE), [batch])
    assert close(found, reference)
    assert metrics[0]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics[0]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics[0]["mismatch/abs_logp_max"] < 1e-5 and abs(metrics[0]["mismatch/k3"]) < 1e-6
    if algorithm is GRPO:
        assert metrics[0]["policy/clip_low"] == metrics[0]["policy/clip_high"] == 0.0
    # Control: another anchor.
    for row in batch.rows:
        row.old_logprobs = [value - 0.7 for value in row.rollout_logprobs]
    assert not close(gradient_of(backend_of(model, algorithm), [batch])[0], reference, 1e-2)


def test_nan_and_inf_at_masked_positions_change_nothing(tiny, backend_of):
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples())
    reference, expected = gradient_of(backend_of(model), [batch])
    dirty = copy.deepcopy(batch)
    for row in dirty.rows:
        for t, weight in enumerate(row.loss_mask):
            if not weight:
                row.advantages[t], row.rollout_logprobs[t] = float("nan"), float("inf")
    found, metrics = gradient_of(backend_of(model), [dirty])
    assert torch.equal(found, reference) and metrics == expected
    # Control: at a live position it does.
    live = next(t for t, weight in enumerate(dirty.rows[0].loss_mask) if weight)
    dirty.rows[0].advantages[live] = float("nan")
    with pytest.raises(TrainingError, match="the loss ppo_clip returned NaN"):
        backend_of(model).forward_backward(dirty).wait()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_truncated_samples_leave_numerator_and_denominator(tiny, backend_of, aggregation):
    model, samples = tiny.qwen3(), tiny.make_samples(groups=2, rollouts=3)
    masked = copy.deepcopy(samples)
    for number in (1, 4):
        masked[number].loss_mask = [0.0] * len(masked[number].tokens)
    batch = batch_of(masked, aggregation)
    kept = [sample for number, sample in enumerate(samples) if number not in (1, 4)]
    without = batch_of(kept, aggregation)  # rollout indices, and so advantages, as before
    assert batch.denominator == without.denominator
    found, reference = (gradient_of(backend_of(model), [b])[0] for b in (batch, without))
    assert close(found, reference, 1e-5)
    assert not close(gradient_of(backend_of(model), [batch_of(samples, aggregation)])[0], reference, 1e-2)


def test_a_float_mask_weighs_loss_and_denominator(tiny, backend_of):
    model, samples = tiny.qwen3(), tiny.make_samples()
    halved = copy.deepcopy(samples)
    for sample in halved:
        sample.loss_mask = [0.5 * weight for weight in sample.loss_mask]
    found, reference = (gradient_of(backend_of(model, SFT), [batch_of(s)])[0] for s in (halved, samples))
    assert close(found, reference, 1e-5)


def test_forward_equals_the_model(tiny, backend_of):
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples(), temperature=0.7)
    for settings in ({}, {"tokens_per_microbatch": 60}, {"share_prefix": False}):
        found = backend_of(model, **settings).forward(batch, ("logprobs", "entropy")).wait()
        for row, logprobs, entropy in zip(batch.rows, found.logprobs, found.entropy, strict=True):
            with torch.no_grad():
                logp = torch.log_softmax(model(torch.tensor([row.tokens])).logits[0] / 0.7, -1)
            expected = logp[:-1].gather(-1, torch.tensor(row.tokens[1:])[:, None])[:, 0]
            assert logprobs[0] == entropy[0] == 0.0 and len(logprobs) == len(row.tokens)
            torch.testing.assert_close(torch.tensor(logprobs[1:]), expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(
                torch.tensor(entropy[1:]), -(logp.exp() * logp).sum(-1)[:-1], atol=1e-5, rtol=1e-5
            )
    assert backend_of(model).forward(batch).wait().entropy is None
    with pytest.raises(TrainingError, match="ref_logprobs"):
        backend_of(model).forward(batch, ("ref_logprobs",)).wait()


def test_a_step_is_adamw_on_the_clipped_mean(tiny, backend_of):
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples())
    backend = backend_of(model, warmup_steps=2, max_grad_norm=0.1, weight_decay=0.01)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01, fused=False)
    for step, lr in enumerate((5e-4, 1e-3, 1e-3)):
        backend.forward_backward(batch).wait()
        names = [(p.grad / batch.denominator).clone() for p in backend.model.parameters()]
        for parameter, gradient in zip(reference.parameters(), names, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        metrics, version = backend.optim_step().wait()
        assert version == step + 1 == backend.version
        assert metrics["optim/lr"] == pytest.approx(lr) and metrics["optim/skipped"] == 0.0
        assert metrics["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        for ours, theirs in zip(backend.model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_nothing_live_skips_the_step(tiny, backend_of):
    samples = tiny.make_samples()
    for sample in samples:
        sample.reward = None
    backend = backend_of(tiny.qwen3())
    before = backend.get_weights().wait()
    metrics = backend.forward_backward(batch_of(samples)).wait()
    assert {name: value for name, value in metrics.items() if name != "perf/peak_gib"} == {"policy/loss": 0.0}
    metrics, version = backend.optim_step().wait()
    assert metrics["optim/skipped"] == 1.0 and version == 0
    assert all(torch.equal(value, before[name]) for name, value in backend.get_weights().wait().items())


def test_a_gradient_that_is_not_finite_skips_the_step(tiny, backend_of):
    def explosive(logprobs):
        return logprobs * torch.tensor(3e38) * 10

    backend = backend_of(tiny.qwen3(), as_algorithm(explosive))
    before = backend.get_weights().wait()
    batch = batch_of(tiny.make_samples())
    backend.forward_backward(batch).wait()
    metrics, version = backend.optim_step().wait()
    assert metrics["optim/skipped"] == 1.0 and version == 0 and not math.isfinite(metrics["optim/grad_norm"])
    assert all(torch.equal(value, before[name]) for name, value in backend.get_weights().wait().items())
    assert all(p.grad is None for p in backend.model.parameters())


def test_steps_in_a_row_that_are_not_finite_stop_the_run(tiny, backend_of):
    backend, batch = backend_of(tiny.qwen3()), batch_of(tiny.make_samples())
    nothing_live = batch_of([dataclasses.replace(sample, reward=None) for sample in tiny.make_samples()])
    weight = backend.model.model.norm.weight

    def step(on=batch, *, broken=False):
        right = weight.detach().clone()
        if broken:
            with torch.no_grad():
                weight[0] = float("nan")
        backend.forward_backward(on).wait()
        try:
            return backend.optim_step().wait().metrics["optim/skipped"]
        finally:
            if broken:
                with torch.no_grad():
                    weight.copy_(right)

    # A good step in between, and steps with nothing live, neither of which is a failure.
    assert [step(broken=True), step(broken=True), step()] == [1.0, 1.0, 0.0]
    assert [step(nothing_live) for _ in range(4)] == [1.0] * 4
    assert [step(broken=True), step(nothing_live), step(broken=True)] == [1.0, 1.0, 1.0]
    with pytest.raises(TrainingError, match=r"not finite in 3 steps in a row.*smaller --lr than 0.001"):
        step(broken=True)
    assert backend.version == 1 and all(p.grad is None for p in backend.model.parameters())


def test_a_loss_without_a_gradient_is_named(tiny, backend_of):
    def detached(logprobs, advantages):
        return -logprobs.detach() * advantages

    def whole(logprobs):
        return (logprobs > -1).long()

    batch = batch_of(tiny.make_samples())
    both = Algorithm(group_norm, "token_mean", (Term(detached), Term(whole, 0.5)))
    for algorithm, name in ((as_algorithm(detached), "detached"), (as_algorithm(whole), "whole"), (both, r"\+ whole")):
        with pytest.raises(TrainingError, match=rf"the loss .*{name} returned values that carry no gradient"):
            backend_of(tiny.qwen3(), algorithm).forward_backward(batch).wait()
    # One term may be constant beside another, and a loss in some microbatches.
    calls = []

    def sometimes(logprobs):
        calls.append(1)
        return -logprobs if len(calls) == 2 else torch.zeros_like(logprobs)

    mixed = Algorithm(group_norm, "token_mean", (Term(detached), Term(ppo_clip)))
    backend_of(tiny.qwen3(), mixed).forward_backward(batch).wait()
    backend_of(tiny.qwen3(), as_algorithm(sometimes), tokens_per_microbatch=60).forward_backward(batch).wait()
    assert len(calls) > 2


def test_a_loss_may_name_indices_rewards_and_step(tiny, backend_of):
    seen = {}

    def curious(logprobs, rollout_index, group_index, rewards, step, mask, rollout_logprobs):
        seen.update(rollout=rollout_index, group=group_index, rewards=rewards, step=step, mask=mask)
        mean = torch.zeros(len(rewards)).index_add(0, rollout_index, logprobs)
        return mean[rollout_index]

    samples = tiny.make_samples()
    backend = backend_of(tiny.qwen3(), as_algorithm(curious), tokens_per_microbatch=120)
    backend.forward_backward(batch_of(samples)).wait()
    assert seen["rewards"].tolist() == [s.reward for s in samples] and seen["step"] == 0
    assert set(seen["group"].tolist()) <= {0, 1, 2} and seen["rollout"].dtype == torch.int64
    small = backend_of(tiny.qwen3(), as_algorithm(curious), tokens_per_microbatch=30)
    with pytest.raises(TrainingError, match="tokens-per-microbatch"):
        small.forward_backward(batch_of(samples)).wait()


def test_entropy_has_a_gradient_only_where_it_is_named(tiny, backend_of):
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples())
    plain, metrics = gradient_of(backend_of(model), [batch])
    mixed = Algorithm(group_norm, "token_mean", (Term(ppo_clip), Term(entropy_bonus, 0.5)))
    found, _ = gradient_of(backend_of(model, mixed), [batch])
    alone, _ = gradient_of(backend_of(model, as_algorithm(entropy_bonus)), [batch])
    assert close(found, plain + 0.5 * alone) and not close(found, plain, 1e-2)
    assert 0 < metrics[0]["policy/entropy"] <= math.log(61)


def test_clip_fractions_use_the_bound_settings(tiny, backend_of):
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples())
    narrow = gradient_of(backend_of(model), [batch])[1][0]
    wide = bind_algorithm(GRPO, {"clip_low": 0.999, "clip_high": 1e9})
    assert narrow["policy/clip_high"] + narrow["policy/clip_low"] > 0
    found = gradient_of(backend_of(model, wide), [batch])[1][0]
    assert found["policy/clip_high"] == 0.0 and found["policy/clip_low"] <= narrow["policy/clip_low"]


def test_the_kl_metrics_are_estimates_of_the_kl_that_they_name(tiny, backend_of):
    """Of 100 rollouts one says each token and 39 more the same: their means are expectations under these shares."""
    said = [*range(61), *[7] * 39]
    shares = torch.bincount(torch.tensor(said)) / 100
    samples = [
        Sample(
            tokens=[3, token],
            loss_mask=[0.0, 1.0],
            rollout_log_probs=[0.0, float(shares[token].log())],
            policy_versions=[-1, 0],
            rollout_index=number,
        )
        for number, token in enumerate(said)
    ]
    backend = backend_of(tiny.qwen3())
    with torch.no_grad():
        policy = backend.model(torch.tensor([[3]])).logits[0, -1].log_softmax(-1)
    metrics = backend.forward_backward(batch_of(samples)).wait()
    kl = float((shares * (shares.log() - policy)).sum())
    other_way = float((policy.exp() * (policy - shares.log())).sum())
    assert abs(kl - other_way) > 0.1, "control: the two directions differ"
    assert metrics["policy/kl_old"] == pytest.approx(kl, rel=1e-4)
    assert metrics["mismatch/k3"] == pytest.approx(kl, rel=1e-4)


def test_an_error_leaves_nothing_accumulated(tiny, backend_of):
    def reduced(logprobs):
        return logprobs.mean()

    backend = backend_of(tiny.qwen3(), as_algorithm(reduced))
    with pytest.raises(TrainingError, match="reduced returned a scalar"):
        backend.forward_backward(batch_of(tiny.make_samples())).wait()
    assert all(p.grad is None for p in backend.model.parameters()) and backend._trainer._denominator == 0
    other = batch_of(tiny.make_samples(), algorithm="other")
    with pytest.raises(TrainingError, match="names the algorithm 'other'; this backend has: main"):
        backend.forward_backward(other).wait()


@pytest.mark.parametrize("algorithm", [GRPO, IS, CISPO, GRPO._replace(correction=truncated)])
def test_rows_without_the_samplers_logprobs_are_trained_as_the_policys_own(tiny, backend_of, algorithm):
    """As if the sampler had been the policy: never as if every token had been certain. The metrics of the sampler are
    those of the rows whose sampler is known.
    """

    def batch_with(samples, logprobs=None):
        batch = batch_of(samples)
        batch.anchor = "current" if algorithm.correction else "sampler"
        for row, own in zip(batch.rows, logprobs or [], strict=False):
            row.rollout_logprobs = own
        return batch

    model, samples = tiny.qwen3(), tiny.make_samples()
    policy = with_current_logprobs(backend_of(model, algorithm), batch_of(samples))
    known = [row.rollout_logprobs for row in policy.rows]
    expected, _ = gradient_of(backend_of(model, algorithm), [batch_with(samples, known)])
    bare = [dataclasses.replace(each, rollout_log_probs=None, policy_versions=None) for each in samples]
    found, (metrics,) = gradient_of(backend_of(model, algorithm), [batch_with(bare)])
    assert expected.norm() > 1 and close(found, expected)
    assert not any(name.startswith("mismatch/") for name in metrics)
    # One half of each kind: the known half says how far the sampler was.
    mixed = [one if number % 2 else two for number, (one, two) in enumerate(zip(samples, bare, strict=True))]
    halves = [None if number % 2 == 0 else row for number, row in enumerate(s.rollout_log_probs for s in samples)]
    stand_in = [own if half is None else half for own, half in zip(known, halves, strict=True)]
    expected, _ = gradient_of(backend_of(model, algorithm), [batch_with(samples, stand_in)])
    found, (metrics,) = gradient_of(backend_of(model, algorithm), [batch_with(mixed)])
    assert close(found, expected)
    apart = [
        abs(a - b)
        for own, half in zip(known, halves, strict=True)
        if half is not None
        for a, b in zip(own, half, strict=True)
        if b
    ]
    assert metrics["mismatch/abs_logp_mean"] == pytest.approx(sum(apart) / len(apart), rel=1e-3)
    assert metrics["mismatch/abs_logp_max"] == pytest.approx(max(apart), rel=1e-3)


def test_supervised_batches_report_no_sampler(tiny, backend_of):
    samples = tiny.make_samples()
    for sample in samples:
        sample.rollout_log_probs = None
    backend = backend_of(tiny.qwen3(), SFT)
    first = backend.forward_backward(batch_of(samples)).wait()
    assert not any(name.startswith("mismatch/") for name in first)
    backend.optim_step().wait()
    for _ in range(10):
        backend.forward_backward(batch_of(samples)).wait()
        backend.optim_step().wait()
    assert backend.forward_backward(batch_of(samples)).wait()["policy/loss"] < first["policy/loss"]


def test_wrong_settings_are_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"--lr 0.0: expected a number above 0"):
        TorchBackend(Executor(Trainer(tiny.qwen3(), {"main": GRPO}, TrainerSettings(lr=0.0))))
    with pytest.raises(SignatureError, match="no critic; type --critic head"):
        create_torch_backend("nowhere", 0, 1, 1e-3, 0, 100, {"main": as_algorithm(lambda values: values)}, None)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("eps", -1.0, "--training.eps -1.0: expected a number above 0"),
        ("eps", math.nan, "--training.eps nan: expected"),
        ("weight_decay", -0.1, "--training.weight-decay -0.1: expected 0 or more"),
        ("betas", (0.9, 1.0), "--training.betas [0.9, 1.0]: expected two numbers in [0, 1)"),
        ("betas", (-0.1, 0.9), "--training.betas [-0.1, 0.9]: expected"),
        ("max_grad_norm", 0.0, "--training.max-grad-norm 0.0: expected a number above 0"),
        ("warmup_steps", -1, "--training.warmup-steps -1: expected a whole number, 0 or more"),
        ("lora_alpha", 0.0, "--training.lora-alpha 0.0: expected a number above 0"),
        ("lora_rank", -1, "--lora-rank -1: expected 1 or more, or 0"),
        ("tokens_per_microbatch", 0, "--tokens-per-microbatch 0: expected 1 or more"),
        ("dtype", "float16", "--training.dtype float16: all weights would be trained in float16"),
        ("compile", "on", "--training.compile on: expected one of auto, layers, off"),
        ("memory_budget", 0.0, "--training.memory-budget 0.0: expected above 0, up to 1"),
    ],
)
def test_settings_out_of_bounds_are_refused_before_weights_are_read(name, value, words):
    given = {"lr": 1e-3, "lora_rank": 0, "tokens_per_microbatch": 100, "algorithms": {"main": GRPO}}
    of_backend = name in TorchSettings.__dataclass_fields__
    given |= {"auxiliary_models": None} | (
        {"settings": TorchSettings(**{name: value})} if of_backend else {name: value}
    )
    with pytest.raises(ConfigError) as caught:
        create_torch_backend("./nowhere", 0, 1, **given)
    assert words in str(caught.value)
    with pytest.raises(ModelError, match="there is no folder"):  # control: right settings come as far as the weights
        create_torch_backend(
            "./nowhere",
            0,
            1,
            1e-3,
            4,
            100,
            {"main": GRPO},
            None,
            settings=TorchSettings(dtype="bfloat16", warmup_steps=0),
        )


def test_created_from_a_folder_by_name(tiny, tmp_path):
    tiny.qwen3().save_pretrained(tmp_path / "model")
    backend = create_torch_backend(
        str(tmp_path / "model"), 0, 3, 1e-3, 0, 1000, {"main": GRPO}, None, settings=TorchSettings(device="cpu")
    )
    backend.forward_backward(batch_of(tiny.make_samples())).wait()
    assert backend.optim_step().wait().metrics["optim/lr"] == pytest.approx(1e-3 / 3), "warm-up ends within the run"
    backend.close()


@pytest.mark.parametrize("layout", ["padded", "buckets", "packed"])
def test_padded_rows_have_the_same_gradient(tiny, backend_of, layout):
    """`buckets` and `packed` are in the settings of earlier runs."""
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples())
    reference, metrics = gradient_of(backend_of(model), [batch])
    assert metrics[0]["perf/pad_frac"] == 0.0
    backend = backend_of(model, layout=layout)
    found, metrics = gradient_of(backend, [batch])
    assert close(found, reference) and (metrics[0]["perf/pad_frac"] > 0) == (layout != "packed")
