"""Mistakes in the arguments of primitives: one clear error, instead of wrong numbers or a traceback of torch."""

from __future__ import annotations

import pytest
import torch

from rollouts.errors import ConfigError, RolloutsError
from rollouts.primitives import (
    Generation,
    Message,
    Rollout,
    TrainingState,
    compute_dapo_loss,
    compute_loss_by_algorithm,
    compute_ppo_advantages,
    create_algorithm_config,
    create_batch,
    create_multiturn_rollout,
    create_scripted_generator,
    encode_prompt,
    load_checkpoint,
    load_tokenizer,
    save_checkpoint,
    training_step,
)

REPLY = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])


def rollout(reward=1.0):
    return Rollout("2 + 2", REPLY, rewards=reward, ref_logprobs=[-0.5, -0.25])


def scored(count=2):
    batch = create_batch(None, [rollout(float(number)) for number in range(count)])
    return batch._replace(logprobs=batch.old_logprobs.clone().requires_grad_())


def fails(*given):
    raise ZeroDivisionError("one over zero")


def conversation(**options):
    generator = create_scripted_generator(["4"] * 3)
    return create_multiturn_rollout(None, load_tokenizer("tiny"), "2 + 2?", generator=generator, **options)


@pytest.mark.parametrize("pair", [(0, 9), (0,), (-1, 0), (1, 1), 3])
def test_a_pair_of_other_rollouts_is_refused(pair):
    with pytest.raises(RolloutsError, match=r"pair 0 is .*expected \(chosen, rejected\)"):
        compute_dapo_loss(scored(), [pair])


@pytest.mark.parametrize("reward", ["right", [1.0, "right"]])
def test_a_reward_that_is_no_number_is_named(reward):
    with pytest.raises(RolloutsError, match="the rollout has the reward 'right'"):
        create_batch(None, [rollout(reward)])


def test_a_reward_may_be_a_number_of_torch():
    rewards = (torch.tensor(0.5), torch.tensor([0.25, 0.5]))
    assert create_batch(None, [rollout(each) for each in rewards]).rewards.tolist() == [0.5, 0.75]


@pytest.mark.parametrize(
    ("settings", "message"), [({"kl_coef": "much"}, "kl_coef is 'much'"), (["clip_high"], "expected a dict")]
)
def test_settings_that_are_none(settings, message):
    with pytest.raises(ConfigError, match=message):
        create_algorithm_config("grpo", settings)


def test_the_name_of_an_algorithm_is_no_configuration():
    state = TrainingState(None, None, None)
    for use in (lambda: training_step(state, [rollout()], "grpo"), lambda: compute_loss_by_algorithm(scored(), "grpo")):
        with pytest.raises(ConfigError, match="algorithm_config is 'grpo'; expected create_algorithm_config"):
            use()


@pytest.mark.parametrize(
    ("use", "form"),
    [
        (lambda: conversation(stop_condition=fails), "stop_condition fails raised ZeroDivisionError"),
        (lambda: conversation(reply_fn=fails), "reply_fn fails raised ZeroDivisionError"),
        (lambda: conversation(tool_tracker=fails), "tool_tracker fails raised ZeroDivisionError"),
        (lambda: compute_ppo_advantages(scored(), value_fn=fails), "value_fn fails raised ZeroDivisionError"),
    ],
)
def test_a_function_that_raises_is_named(use, form):
    with pytest.raises(RolloutsError, match=form):
        use()


def test_a_new_chat_template_is_used():
    tokenizer, asked = load_tokenizer("tiny"), [Message("user", "Hi")]
    before = encode_prompt(tokenizer, asked)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<|im_start|>the ")
    assert len(encode_prompt(tokenizer, asked)) > len(before)


def test_a_checkpoint_has_the_value_function_of_the_optimizer(tmp_path):
    def state(head):
        model = torch.nn.Linear(2, 2)
        return TrainingState(model, load_tokenizer("tiny"), torch.optim.Adam([*model.parameters(), *head.parameters()]))

    saved, loaded = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    path = save_checkpoint(state(saved), tmp_path)
    load_checkpoint(state(loaded), path)
    assert loaded.weight.equal(saved.weight) and loaded.bias.equal(saved.bias)
