"""Training by primitives: the engine's gradients, the order of calls, the same numbers after a break."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from rollouts_notes.primitives.rollouts import rollout_samples
from rollouts_notes.primitives.training import _wandb

from rollouts.errors import ConfigError, TrainingError, UserError
from rollouts.plugins import index
from rollouts.primitives import (
    Generation,
    GenerationConfig,
    Rollout,
    TrainingState,
    compute_dapo_pairs,
    compute_grpo_advantages,
    create_algorithm_config,
    create_batch,
    create_batch_rollouts,
    create_ema_updater,
    create_reference_model,
    load_checkpoint,
    load_model,
    load_tokenizer,
    log_to_console,
    log_to_wandb,
    quick_start_training,
    save_checkpoint,
    train,
    training_iteration,
    training_step,
)
from rollouts.training import create_adamw_optimizer, create_pytorch_backend
from rollouts.training.algorithms import recipes
from rollouts.training.algorithms.algorithm import KL
from rollouts.training.algorithms.kl import rk3_loss
from rollouts.training.batching import make_batch
from rollouts.types import Task

TOKENIZER = load_tokenizer("tiny")
SHORT = GenerationConfig(max_tokens=6)
GRPO = create_algorithm_config("grpo")


def new_state(*, reference=False, lr=3e-4):
    model = load_model("tiny")
    ref_model = create_reference_model(model) if reference else None
    return TrainingState(model, TOKENIZER, create_adamw_optimizer(model, lr=lr), ref_model)


def reward(rollout):
    return sum(token % 7 for token in rollout.generation.tokens) / 20


@pytest.fixture(scope="module")
def rollouts():
    """Of three prompts, by a policy that is not the one that is trained; with a reference."""
    model, reference = load_model("tiny"), load_model("tiny")
    with torch.no_grad():
        for number, parameter in enumerate(reference.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    prompts = ["2 + 3 =", Task("What is 3 * 4?"), "Once upon a time, in a land far away, there were"]
    found = create_batch_rollouts(
        model, TOKENIZER, prompts, SHORT, samples_per_prompt=4, ref_model=reference, reward_fn=reward
    )
    noise = torch.Generator().manual_seed(0)
    return [
        each._replace(
            generation=each.generation._replace(
                finish_reason="stop",
                logprobs=[
                    min(p + 0.3 * torch.randn((), generator=noise).item(), 0.0) for p in each.generation.logprobs
                ],
            )
        )
        for each in found
    ]


def gradient_of(rollouts, config, **options):
    """The gradient of a step by primitives, by the names of weights."""
    state, found = new_state(), {}

    def record(model, optimizer):
        found.update({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
        return {"seen": 1.0}

    after, stats = training_step(state, rollouts, config, optimizer_step_fn=record, **options)
    assert after.iteration == 1 and stats.metrics["seen"] == 1.0
    return found, stats


def engine_gradient(rollouts, algorithm, advantages, pairs=None):
    """The gradient and the loss of the engine's backend on the same samples."""
    backend = create_pytorch_backend("tiny", lr=1e-3, num_steps=1, algorithm=algorithm)
    samples = rollout_samples(rollouts)
    batch = make_batch(samples, advantages, aggregation=algorithm.aggregation, step=0, pairs=pairs)
    for row in batch.rows:
        row.ref_logprobs = [0.0] * len(row.tokens)
        start = len(row.tokens) - len(rollouts[row.rollout_index].ref_logprobs)
        row.ref_logprobs[start:] = rollouts[row.rollout_index].ref_logprobs
    # The engine loads no reference here: the rows have its logprobs already.
    metrics = backend.forward_backward(batch).wait()
    gradient = {
        name: each.grad / batch.denominator for name, each in backend.model.named_parameters() if each.grad is not None
    }
    backend.close()
    return gradient, metrics["policy/loss"]


def assert_same(own, other):
    assert own.keys() == other.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("aggregation", ["rollout_mean", pytest.param("token_mean", marks=pytest.mark.nightly)])
def test_the_gradient_is_the_engine_s(rollouts, aggregation):
    algorithm = recipes.GRPO._replace(aggregation=aggregation, kl=KL(rk3_loss, 0.2))
    own, stats = gradient_of(rollouts, create_algorithm_config(algorithm))
    advantages = compute_grpo_advantages(create_batch(None, rollouts)).tolist()
    theirs, loss = engine_gradient(rollouts, algorithm, advantages)
    assert_same(own, theirs)
    assert stats.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)


def test_the_gradient_of_pairs_is_the_engine_s(rollouts):
    own, stats = gradient_of(rollouts, create_algorithm_config("dapo", {"beta": 0.3}))
    pairs = compute_dapo_pairs(create_batch(None, rollouts))
    assert len(pairs) > 1
    algorithm = create_algorithm_config("dpo", {"beta": 0.3}).algorithm
    theirs, loss = engine_gradient(rollouts, algorithm, [0.0] * 12, pairs)
    assert_same(own, theirs)
    assert stats.loss == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("name", ["ppo", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("grpo", "dapo"))])
def test_microbatches_change_nothing(rollouts, name):
    values = lambda batch: batch.tokens.float() / 500  # noqa: E731
    config = create_algorithm_config(name, value_fn=values if name == "ppo" else None)
    whole, once = gradient_of(rollouts, config)
    parts, split = gradient_of(rollouts, config, tokens_per_microbatch=1)
    assert_same(parts, whole)
    assert split.loss == pytest.approx(once.loss, rel=1e-4, abs=1e-6)


def test_a_step_clips_the_gradient_and_makes_better_rollouts_likelier(rollouts):
    state, before = new_state(lr=1e-3), create_batch(load_model("tiny"), rollouts).logprobs.detach()
    weights = [each.detach().clone() for each in state.model.parameters()]
    after, stats = training_step(state, rollouts, GRPO)
    assert after.model is state.model and after.iteration == 1 and stats.iteration == 0
    assert any(not torch.equal(old, new) for old, new in zip(weights, state.model.parameters(), strict=True))
    assert all(each.grad is None for each in state.model.parameters())
    batch = create_batch(state.model, rollouts)
    gain = (batch.logprobs.detach() - before) * compute_grpo_advantages(batch)[batch.rollout_index]
    assert gain.mean() > 0
    assert stats.mean_reward == pytest.approx(sum(map(reward, rollouts)) / 12)
    assert stats.kl == pytest.approx(sum(each.kl_divergence for each in rollouts) / 12)


def test_a_batch_without_anything_to_train_changes_no_weight(rollouts, capsys):
    state = new_state()
    weights = [each.detach().clone() for each in state.model.parameters()]
    cut = [each._replace(generation=each.generation._replace(finish_reason="length")) for each in rollouts]
    state, stats = training_step(state, cut, GRPO)
    assert stats.metrics["optim/skipped"] == 1.0 and stats.loss == 0.0
    assert all(torch.equal(old, new) for old, new in zip(weights, state.model.parameters(), strict=True))
    log_to_console(stats)
    assert "nothing was trained: 100% of the replies were cut off" in capsys.readouterr().out
    _, stats = training_step(state, cut, GRPO, train_truncated=True)
    assert stats.metrics["optim/skipped"] == 0.0 and stats.grad_norm > 0


def test_train_calls_each_function_in_its_turn():
    state, seen = new_state(reference=True), []

    def algorithm(iteration):
        seen.append(f"algorithm {iteration}")
        return create_algorithm_config("dapo" if iteration == 2 else "grpo", {} if iteration == 2 else {"kl_coef": 0.1})

    def note(word, result=None):
        def function(*given):
            number = given[0] if isinstance(given[0], int) else getattr(given[0], "iteration", None)
            seen.append(word if number is None else f"{word} {number}")
            return given[0] if result == "first" else result

        return function

    logged = []
    last = train(
        state,
        note("prompts", ["2 + 3 ="]),
        3,
        SHORT,
        algorithm,
        reward,
        ref_model_update_fn=note("reference", "first"),
        checkpoint_fn=note("checkpoint"),
        eval_fn=note("eval", {"held_out": 0.5}),
        logger=lambda stats: seen.append(f"log {stats.iteration}") or logged.append(stats),
        checkpoint_every=2,
        eval_every=2,
        samples_per_prompt=2,
        train_truncated=True,
    )
    assert last.iteration == 3
    assert seen == [
        *("algorithm 0", "prompts 0", "reference", "log 0"),
        *("algorithm 1", "prompts 1", "reference", "eval 2", "log 1", "checkpoint 2"),
        *("algorithm 2", "prompts 2", "reference", "eval 3", "log 2", "checkpoint 3"),
    ]
    assert "eval/held_out" not in logged[0].metrics and logged[1].metrics["eval/held_out"] == 0.5
    assert not math.isnan(logged[0].kl)


def weights_of(state):
    return [each.detach().clone() for each in [*state.model.parameters(), *state.ref_model.parameters()]]


def test_a_break_changes_no_number(tmp_path):
    logged = {}

    def run(state, iterations, name):
        logged[name] = []
        return train(
            state,
            [Task("What is 2 + 3?")],
            iterations,
            SHORT,
            create_algorithm_config("grpo", {"kl_coef": 0.1}),
            reward,
            ref_model_update_fn=create_ema_updater(decay=0.5),
            checkpoint_fn=lambda state: save_checkpoint(state, tmp_path / name),
            logger=logged[name].append,
            checkpoint_every=2,
            samples_per_prompt=3,
            train_truncated=True,
        )

    whole = run(new_state(reference=True, lr=1e-3), 4, "whole")
    resumed = load_checkpoint(new_state(reference=True, lr=1e-3), tmp_path / "whole" / "step_000002")
    assert resumed.iteration == 2
    resumed = run(resumed, 4, "resumed")
    assert logged["resumed"] == logged["whole"][2:]
    assert all(map(torch.equal, weights_of(whole), weights_of(resumed)))
    assert load_checkpoint(new_state(reference=True), tmp_path / "resumed").iteration == 4
    assert load_tokenizer(str(tmp_path / "whole" / "step_000004")).get_vocab() == TOKENIZER.get_vocab()


def test_a_checkpoint_that_cannot_be_read_changes_nothing(tmp_path):
    state = new_state()
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        load_checkpoint(state, tmp_path / "none")
    path = save_checkpoint(state._replace(iteration=7), tmp_path)
    assert path.name == "step_000007"
    with torch.no_grad():
        next(state.model.parameters()).add_(1.0)
    known = [each.detach().clone() for each in state.model.parameters()]
    with pytest.raises(ConfigError, match="has no reference; load it without one"):
        load_checkpoint(state._replace(ref_model=create_reference_model(state.model)), tmp_path)
    with (path / "trainer.pt").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"trainer\.pt has"):
        load_checkpoint(state, tmp_path)
    assert all(map(torch.equal, known, state.model.parameters()))


def test_quick_start(capsys):
    state = quick_start_training(
        "tiny",
        ["What is 2 + 3?", "What is 3 + 4?", "What is 4 + 5?"],
        lambda rollout: -len(rollout.generation.tokens) / 10,
        num_iterations=2,
        settings={"kl_coef": 0.1},
        gen_config=GenerationConfig(max_tokens=8),
        prompts_per_iteration=2,
        samples_per_prompt=2,
        train_truncated=True,
    )
    assert state.iteration == 2 and state.ref_model is not None
    assert state.optimizer.param_groups[0]["lr"] == 3e-4
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["iteration 0", "iteration 1"]


def test_logging_to_wandb_goes_through_the_package(monkeypatch, tmp_path):
    calls = []
    fake = types.ModuleType("wandb")
    run = types.SimpleNamespace(step=0, log=lambda values, step: calls.append((step, values)), finish=lambda: None)
    fake.Error, fake.Settings = RuntimeError, lambda **settings: settings
    fake.init = lambda **settings: calls.append(settings["project"]) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    _wandb.cache_clear()
    for iteration in (0, 1):
        log_to_wandb(stats_of(iteration), folder=tmp_path, project="p")
    assert calls == ["p", (0, {"train/loss": 0.5, "eval/score": 1.0}), (1, {"train/loss": 0.5, "eval/score": 1.0})]
    _wandb.cache_clear()


def stats_of(iteration):
    from rollouts.primitives import TrainingStats

    return TrainingStats(iteration, 0.5, metrics={"eval/score": 1.0})


def test_without_the_package_wandb_is_a_line_to_type(monkeypatch, tmp_path):
    found = index.scan()
    others = [each for each in found.components if each.name != "wandb"]
    monkeypatch.setattr(index, "scan", lambda: found._replace(components=others))
    _wandb.cache_clear()
    with pytest.raises(UserError, match=r"no logger is named 'wandb'[\s\S]*pip install \./plugins/wandb"):
        log_to_wandb(stats_of(0), folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def step_with(config, rollouts, **options):
    return lambda: training_step(new_state(), rollouts, config, **options)


def refusals():
    reply = Generation("x", [7, 8], [-1.0, -1.0], prompt_tokens=[5])
    two = [Rollout("p", reply, 1.0), Rollout("p", reply, 0.0)]
    state = TrainingState(None, TOKENIZER, None)
    flat = create_algorithm_config("grpo", loss_fn=lambda logprobs: logprobs.detach())
    bad = create_algorithm_config("grpo", loss_fn=lambda logprobs: logprobs * math.inf)
    yield step_with(GRPO, []), TrainingError, "no rollouts"
    yield step_with(flat, two), TrainingError, "the loss of grpo has no gradient"
    yield step_with(bad, two), TrainingError, "norm is nan; the weights are unchanged"
    yield step_with(create_algorithm_config("dapo"), two), TrainingError, "needs ref_logprobs"
    yield lambda: train(state, [], 1, SHORT, "grpo", reward), ConfigError, r"expected create_algorithm_config\("
    yield lambda: train(state, [], -1, SHORT, GRPO, reward), ConfigError, "num_iterations is -1"
    yield lambda: train(state, [], 1, SHORT, GRPO, reward, eval_every=0), ConfigError, "eval_every is 0"
    kl = create_algorithm_config("grpo", {"kl_coef": 0.1})
    yield lambda: train(state, [], 1, SHORT, kl, reward), ConfigError, "ref_model=create_reference_model"
    yield lambda: training_iteration(state, "Hi", SHORT, GRPO, reward), ConfigError, "prompts is str"
    yield lambda: quick_start_training("tiny", [], reward), ConfigError, "expected a list of prompts"
    yield lambda: quick_start_training("tiny", ["a"], reward, algorithm="x"), ConfigError, "no built-in algorithm 'x'"
    one = lambda: train(new_state(), ["2"], 1, SHORT, GRPO, reward, eval_fn=lambda state: "good", samples_per_prompt=1)  # noqa: E731
    yield one, ConfigError, "eval_fn returned 'good'"
    yield lambda: train(state, None, 1, SHORT, GRPO, reward), ConfigError, "prompts is NoneType; expected a list"
    yield lambda: train(state, lambda: [], 1, SHORT, GRPO, reward), ConfigError, r"called as prompt_loader\(iteration\)"
    yield (
        lambda: train(state, [], 1, SHORT, lambda iteration: 1 / 0, reward),
        TrainingError,
        "algorithm_config <lambda>",
    )
    yield step_with("grpo", two), ConfigError, "the algorithm_config is 'grpo'; expected create_"
    yield (
        step_with(GRPO, two, optimizer_step_fn=lambda model, optimizer: 3),
        ConfigError,
        "optimizer_step_fn returned 3",
    )
    yield step_with(GRPO, ["p"]), ConfigError, "expected a list of rollouts"


@pytest.mark.parametrize(("call", "error", "words"), [pytest.param(*each, id=each[2][:20]) for each in refusals()])
def test_bad_input_is_one_clear_error(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_rollouts_are_trained_at_the_temperature_at_which_they_were_sampled():
    """The sampler has the weights that are trained, so every ratio is 1: the policy's logprobs are the sampler's."""
    state = new_state(reference=True)
    warm = SHORT._replace(temperature=0.5)
    found = create_batch_rollouts(
        state.model, TOKENIZER, ["2 + 3 ="], warm, samples_per_prompt=4, ref_model=state.ref_model, reward_fn=reward
    )
    batch = create_batch(state.model, found)
    torch.testing.assert_close(batch.logprobs.detach(), batch.old_logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(batch.ref_logprobs, batch.old_logprobs, rtol=0, atol=1e-4)
    words = r"used at another one: 0\.5 and 1; leave `temperature` out"
    with pytest.raises(TrainingError, match=words):
        training_step(state, found, GRPO, temperature=1.0, train_truncated=True)
    others = create_batch_rollouts(state.model, TOKENIZER, ["2 + 3 ="], SHORT, reward_fn=reward)
    with pytest.raises(TrainingError, match=words):
        training_step(state, [*found, *others], GRPO, train_truncated=True)
    assert training_step(state, found, GRPO, train_truncated=True)[0].iteration == 1
