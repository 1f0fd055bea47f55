"""Properties of learning rates, refused settings, and optimizers that continue from a saved state."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import forks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rollouts.errors import ConfigError
from rollouts.training.backends.optimizer import (
    TrainerSettings,
    check_settings,
    check_sharded,
    check_trained_weights,
    lr_factor,
    make_optimizer,
    optimizer_tensors,
)

SCRIPT = Path(__file__).with_name("optimizer_ranks.py")
_spec = importlib.util.spec_from_file_location("optimizer_ranks", SCRIPT)
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)

NAMES = ("adamw", "adafactor", "sgd")
plans = st.fixed_dictionaries(
    {
        "warmup_steps": st.integers(0, 30),
        "lr_schedule": st.sampled_from(["linear", "cosine"]),
        "lr_final": st.floats(0, 1),
        "steps": st.integers(1, 60),
    }
).map(lambda chosen: TrainerSettings(lr=1e-3, **chosen))


@given(plans, st.sampled_from(["constant", None]))
def test_learning_rates_rise_through_the_warmup_and_fall_to_their_end(plan, schedule):
    if schedule:
        plan = dataclasses.replace(plan, lr_schedule=schedule, lr_final=0.0)
    check_settings(plan)
    factors = [lr_factor(plan, version) for version in range(plan.steps + plan.warmup_steps + 3)]
    rising, falling = factors[: plan.warmup_steps], factors[plan.warmup_steps :]
    assert rising == sorted(set(rising)) and all(factor > 0 for factor in rising), "each step is larger"
    assert not rising or rising[-1] == 1.0
    assert falling == sorted(falling, reverse=True)
    end = 1.0 if plan.lr_schedule == "constant" else plan.lr_final
    assert all(end <= factor <= 1.0 for factor in falling)
    assert all(factor == pytest.approx(end) for factor in factors[max(plan.steps, plan.warmup_steps) :])
    if plan.steps > plan.warmup_steps:
        assert falling[0] == 1.0
        # Nowhere more than the steepest slope of a half cosine: no jumps.
        largest = math.pi / 2 / (plan.steps - plan.warmup_steps)
        assert all(a - b <= largest + 1e-12 for a, b in itertools.pairwise(falling))


@given(plans, st.integers(0, 90))
def test_learning_rates_are_those_of_transformers(plan, version):
    from transformers import (
        get_cosine_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup,
        get_linear_schedule_with_warmup,
    )

    plan = dataclasses.replace(plan, steps=plan.steps + plan.warmup_steps)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    linear = plan.lr_schedule == "linear"
    if linear:
        theirs = get_linear_schedule_with_warmup(optimizer, plan.warmup_steps, plan.steps)
    else:
        theirs = get_cosine_schedule_with_warmup(optimizer, plan.warmup_steps, plan.steps)
        kept = get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, plan.warmup_steps, plan.steps, min_lr_rate=plan.lr_final
        )
    if version < plan.warmup_steps:  # theirs is one step behind
        assert lr_factor(plan, version) == pytest.approx(theirs.lr_lambdas[0](version + 1))
        return
    version = min(version, plan.steps)  # beyond its end their cosine turns up again
    whole = dataclasses.replace(plan, lr_final=0.0)
    assert lr_factor(whole, version) == pytest.approx(theirs.lr_lambdas[0](version), abs=1e-12)
    if not linear:
        assert lr_factor(plan, version) == pytest.approx(kept.lr_lambdas[0](version), abs=1e-12)


def test_without_a_schedule_the_learning_rate_is_what_it_was():
    plan = TrainerSettings(lr=1e-3)
    assert [lr_factor(plan, version) for version in (0, 3, 4, 5, 10_000)] == [0.2, 0.8, 1.0, 1.0, 1.0]
    assert lr_factor(dataclasses.replace(plan, warmup_steps=0), 0) == 1.0
    assert lr_factor(dataclasses.replace(plan, warmup_steps=4, lr_schedule="cosine", steps=4), 4) == 0.0, (
        "nothing is left to fall"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "adam"}, r"--training.optimizer adam: .*adamw, adafactor, sgd; did you mean adamw\?"),
        ({"optimizer": "x"}, r"--training.optimizer x: expected one of adamw, adafactor, sgd$"),
        ({"optimizer": None}, r"--training.optimizer None: expected one of adamw, adafactor, sgd$"),
        ({"lr_schedule": "cosin", "steps": 3}, r"--training.lr-schedule cosin: .*did you mean cosine\?"),
        ({"lr_schedule": "linear"}, r"--training.lr-schedule linear: .*give --steps"),
        ({"lr_final": 0.1}, r"--training.lr-final 0.1: .*--training.lr-schedule cosine"),
        ({"lr_final": -0.1, "lr_schedule": "linear", "steps": 3}, r"--training.lr-final -0.1: expected a fraction"),
        ({"lr_final": math.nan, "lr_schedule": "linear", "steps": 3}, r"--training.lr-final nan: expected a fraction"),
        ({"lr_final": 1.5, "lr_schedule": "linear", "steps": 3}, r"--training.lr-final 1.5: expected a fraction"),
        ({"steps": -1}, r"--steps -1: expected a whole number, 0 or more"),
        ({"warmup_steps": -1}, r"--training.warmup-steps -1: expected a whole number"),
        ({"betas": (0.9, 1.0)}, r"--training.betas \[0.9, 1.0\]: expected two numbers"),
    ],
)
def test_settings_that_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        check_settings(TrainerSettings(**{"lr": 1e-3, **given}))


def test_training_all_weights_in_float16_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"float16: all weights would .* type --training.dtype bfloat16"):
        check_trained_weights(0, None, "float16")
    with pytest.raises(ConfigError, match=r"float16: --critic tiny: all of its weights .* --training.dtype bfloat16"):
        check_trained_weights(8, None, "float16", "tiny")
    check_trained_weights(8, None, "float16")
    check_trained_weights(0, None, "bfloat16", "tiny")


def test_only_adafactor_is_refused_where_weights_are_sharded():
    for name in ("adamw", "sgd"):
        check_sharded(TrainerSettings(lr=1e-3, optimizer=name))
    with pytest.raises(ConfigError, match=r"--training.optimizer adafactor: .*--training.optimizer adamw or sgd"):
        check_sharded(TrainerSettings(lr=1e-3, optimizer="adafactor"))


def test_sets_become_groups_with_a_fused_kernel_where_there_is_one():
    for name in NAMES:
        groups = ranks.make(name).optimizer.param_groups
        assert [group["lr"] for group in groups] == [1e-2, 3e-3]
        assert [group.get("fused") for group in groups] == [True if name == "adamw" else None] * 2
    halves = [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]
    plan = TrainerSettings(lr=1.0, betas=(0.5, 0.6), eps=1e-4, weight_decay=0.2)
    (group,) = make_optimizer([(halves, 1.0)], plan).param_groups
    assert not group["fused"]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-4, 0.2)
    (group,) = make_optimizer([(halves, 1.0)], dataclasses.replace(plan, optimizer="sgd")).param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.2)


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_learn(name):
    trained = ranks.make(name)
    inputs = torch.randn(6, 7)

    def loss():
        return trained.network(inputs).square().sum()

    before = loss().item()
    for _ in range(20):
        loss().backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
    assert loss().item() < before


@pytest.mark.parametrize("version", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_goes_on_where_another_one_stopped(name, version):
    first, second = ranks.make(name), ranks.make(name)
    ranks.train(first, range(version))
    tensors = optimizer_tensors(first.optimizer, first.names)
    template = optimizer_tensors(second.optimizer, second.names)
    assert {key: (value.shape, value.dtype) for key, value in template.items()} == {
        key: (value.shape, value.dtype) for key, value in tensors.items()
    }
    assert not any(value.any() for value in template.values())
    assert all(value.any() for value in tensors.values()) == (version > 0)
    second.network.load_state_dict(first.network.state_dict())
    ranks.copy_state(second, tensors)
    fresh = ranks.make(name)  # control: without the state the next step is another one
    fresh.network.load_state_dict(first.network.state_dict())
    for each in (first, second, fresh):
        ranks.train(each, [version])
    assert all(torch.equal(a, b) for a, b in pairs_of(first, second))
    assert all(torch.equal(a, b) for a, b in pairs_of(first, fresh)) == (version == 0)
    after = optimizer_tensors(second.optimizer, second.names)
    assert all(torch.equal(value, after[key]) for key, value in optimizer_tensors(first.optimizer, first.names).items())
    assert not any(value is tensors[key] for key, value in after.items()), "copies"


def pairs_of(one, other):
    return zip(one.network.parameters(), other.network.parameters(), strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_what_a_first_step_begins_with(name):
    asked, untouched = ranks.make(name), ranks.make(name)
    assert optimizer_tensors(asked.optimizer, asked.names)
    for each in (asked, untouched):
        ranks.train(each, range(2))
    assert all(torch.equal(a, b) for a, b in pairs_of(asked, untouched))


def test_a_fused_state_goes_into_an_optimizer_that_is_not_fused():
    fused, loop = ranks.make("adamw"), ranks.make("adamw", kernel={"fused": False, "foreach": False})
    ranks.train(fused, range(2))
    loop.network.load_state_dict(fused.network.state_dict())
    ranks.copy_state(loop, optimizer_tensors(fused.optimizer, fused.names))
    for each in (fused, loop):
        ranks.train(each, [2])
    for a, b in pairs_of(fused, loop):
        torch.testing.assert_close(a, b)


def test_a_parameter_without_a_gradient_keeps_its_zeros():
    trained = ranks.make("adamw")
    trained.network[3].weight.requires_grad_(False)
    ranks.train(trained, range(2))
    tensors = optimizer_tensors(trained.optimizer, trained.names)
    assert tensors["3.weight.step"] == 0 and tensors["3.bias.step"] == 2


def test_sgd_without_momentum_has_no_state():
    optimizer = make_optimizer(
        [([nn.Parameter(torch.ones(2))], 1.0)], TrainerSettings(lr=1.0, betas=(0.0, 0.0), optimizer="sgd")
    )
    names = {parameter: "w" for parameter in optimizer.param_groups[0]["params"]}
    assert optimizer_tensors(optimizer, names) == {}


@contextlib.contextmanager
def alone():
    """torch warns of every checkpoint that one process writes or reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two gloo processes found: they read what one process wrote under `one`, and write under `two`."""
    import torch.distributed.checkpoint as dcp

    folder = tmp_path_factory.mktemp("ranks")
    for name in ranks.OPTIMIZERS:
        trained = ranks.make(name)
        for version in (0, ranks.STEPS):
            ranks.train(trained, range(version))
            with alone():
                dcp.save(ranks.state_of(trained), checkpoint_id=folder / f"one/{name}/{version}")
    command = [sys.executable, str(SCRIPT), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        forks.popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0].decode() for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    return folder, torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.OPTIMIZERS)
def test_two_ranks_step_as_one_process_does(found, name):
    _, results = found
    trained = ranks.make(name)
    ranks.train(trained, range(ranks.STEPS + 1))
    assert results[f"{name}/fused"] == [name == "adamw"] * 2
    for key, value in trained.network.state_dict().items():
        torch.testing.assert_close(results[f"{name}/next"][key], value, rtol=0, atol=1e-7)
        torch.testing.assert_close(results[f"{name}/foreach"][key], value, rtol=0, atol=1e-5)
    kinds = results[f"{name}/kinds"]
    assert {kind for key, kind in kinds.items() if not key.endswith(".step")} == {"DTensor"}
    assert {kind for key, kind in kinds.items() if key.endswith(".step")} <= {"Tensor"}


@pytest.mark.slow
@pytest.mark.parametrize("version", [0, ranks.STEPS])
@pytest.mark.parametrize("name", ranks.OPTIMIZERS)
def test_a_state_of_two_ranks_is_that_of_one_process_and_the_other_way_round(found, name, version):
    """Bit for bit as it is read; a fused kernel on a CPU rounds the ends of shares otherwise, in the steps after it."""
    folder, results = found
    trained = ranks.make(name)
    ranks.train(trained, [17])  # whatever it had is overwritten
    with alone():
        ranks.load(trained, str(folder / f"two/{name}/{version}"))
    theirs = results[f"{name}/state/{version}"]
    own = optimizer_tensors(trained.optimizer, trained.names)
    assert set(own) == set(theirs) and all(torch.equal(theirs[key], value) for key, value in own.items())
    ranks.train(trained, range(version, ranks.STEPS + 1))
    for key, value in trained.network.state_dict().items():
        torch.testing.assert_close(results[f"{name}/next"][key], value, rtol=0, atol=1e-7)
    written = ranks.make(name)
    with alone():
        ranks.load(written, str(folder / f"one/{name}/{version}"))
    theirs = results[f"{name}/state_from_one/{version}"]
    for key, value in optimizer_tensors(written.optimizer, written.names).items():
        assert torch.equal(theirs[key], value)
    for key, value in trained.network.state_dict().items():
        torch.testing.assert_close(results[f"{name}/from_one/{version}"][key], value, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_two_ranks_go_on_where_two_ranks_stopped(found):
    _, results = found
    for name in ranks.OPTIMIZERS:
        for version in (0, ranks.STEPS):
            for key, value in results[f"{name}/next"].items():
                assert torch.equal(results[f"{name}/from_two/{version}"][key], value)


@pytest.mark.slow
def test_what_torch_cannot_do_with_sharded_weights(found):
    """The reasons for `check_sharded` and `_kernel`; where torch has learned it, they can go."""
    _, results = found
    assert "placement" in results["adafactor"]
    assert torch.all(results["mixed"] < 1), "sharded and plain weights in one set"
