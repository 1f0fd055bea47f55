"""A batch has the model's logprobs of exactly the ids that were sampled, with their gradient."""

from __future__ import annotations

import math

import pytest
import torch
from rollouts_notes.primitives.rollouts import rollout_samples, sampled_logprobs

from rollouts.errors import TrainingError
from rollouts.primitives import Generation, Rollout, create_batch, load_model


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")


def turn(prompt, tokens, logprobs=None, finish="stop"):
    return Generation("x", tokens, logprobs or [-1.0] * len(tokens), finish, prompt_tokens=prompt)


def two_turns(prompt, tokens, between, more, **fields):
    turns = [turn(prompt, tokens), turn([*prompt, *tokens, *between], more)]
    return Rollout("two", turns[-1], 1.0, turns=turns, **fields)


def logprobs_of(model, tokens, places, temperature=1.0):
    logits = model(input_ids=torch.tensor([tokens])).logits[0] / temperature
    return torch.stack([logits[at - 1].log_softmax(-1)[tokens[at]] for at in places])


def test_a_conversation_is_one_row_and_only_sampled_ids_count(model):
    rollout = two_turns([5, 6, 7], [8, 9], [10, 11], [12])
    (sample,) = rollout_samples([rollout])
    assert sample.tokens == [5, 6, 7, 8, 9, 10, 11, 12] and sample.loss_mask == [0, 0, 0, 1, 1, 0, 0, 1]
    batch = create_batch(model, [rollout], temperature=0.7)
    expected = logprobs_of(model, sample.tokens, [3, 4, 7], 0.7)
    assert batch.tokens.tolist() == [8, 9, 12] and batch.mask.tolist() == [1, 1, 1]
    torch.testing.assert_close(batch.logprobs, expected)
    weights = list(model.parameters())
    for own, other in zip(
        torch.autograd.grad(batch.logprobs.sum(), weights), torch.autograd.grad(expected.sum(), weights), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


def test_a_template_that_rewrites_history_makes_two_rows(model):
    turns = [turn([5, 6], [8, 9]), turn([5, 6, 9, 10], [12])]
    rollouts = [Rollout("a", turns[-1], 1.0, turns=turns), Rollout("b", turn([7], [3]), 0.0)]
    assert [each.tokens for each in rollout_samples(rollouts)] == [[5, 6, 8, 9], [5, 6, 9, 10, 12], [7, 3]]
    batch = create_batch(model, rollouts)
    expected = [*logprobs_of(model, [5, 6, 8, 9], [2, 3]), *logprobs_of(model, [5, 6, 9, 10, 12], [4])]
    torch.testing.assert_close(batch.logprobs, torch.stack([*expected, *logprobs_of(model, [7, 3], [1])]))
    assert batch.rollout_index.tolist() == [0, 0, 0, 1] and batch.group_index.tolist() == [0, 0, 0, 1]
    assert [len(each) for each in sampled_logprobs(model, rollouts)] == [3, 1]


def test_rollouts_of_one_prompt_share_it_and_keep_their_order(model):
    prompt = list(range(20, 60))
    rollouts = [Rollout("p", turn(prompt, [30 + n] * (n % 4 + 1)), float(n)) for n in range(12)]
    batch = create_batch(model, rollouts)
    expected = [
        logprobs_of(model, [*prompt, *e.generation.tokens], range(40, 40 + len(e.generation.tokens))) for e in rollouts
    ]
    torch.testing.assert_close(batch.logprobs, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_what_is_not_trained(model):
    rollouts = [
        Rollout("a", turn([5], [6, 7]), None),
        Rollout("a", turn([5], [6], finish="length"), 1.0),
        Rollout("a", turn([5], [8]), [0.5, 1.0]),
    ]
    batch = create_batch(None, rollouts)
    assert batch.mask.tolist() == [0, 0, 0, 1]
    assert batch.rewards.tolist()[1:] == [1.0, 1.5] and math.isnan(batch.rewards[0])
    assert create_batch(None, rollouts, train_truncated=True).mask.tolist() == [0, 0, 1, 1]


def test_unknown_logprobs_of_the_sampler_are_those_of_the_policy(model):
    rollout = Rollout("a", Generation("x", [6, 7], prompt_tokens=[5]), 1.0)
    assert create_batch(None, [rollout]).old_logprobs.isnan().all()
    batch = create_batch(model, [rollout])
    torch.testing.assert_close(batch.old_logprobs, batch.logprobs.detach())
    assert not batch.old_logprobs.requires_grad


def test_dropout_is_off_while_a_batch_is_scored_and_the_mode_stays(model):
    model.train()
    assert create_batch(model, [Rollout("a", turn([5], [6]), 1.0)]).logprobs.requires_grad and model.training
    model.eval()


@pytest.mark.parametrize(
    ("rollouts", "words"),
    [
        ([], "there are no rollouts"),
        ([Rollout("a", Generation("text only"), 1.0)], "0 prompt ids and 0 sampled ids.*from the generator"),
        ([Rollout("a", turn([5], [6, 7], [-1.0]), 1.0)], "2 sampled ids with 1 logprobs"),
        ([Rollout("a", turn([5], [6, 7]), 1.0, ref_logprobs=[-1.0])], "2 sampled ids and 1 ref_logprobs"),
    ],
)
def test_bad_rollouts(rollouts, words):
    with pytest.raises(TrainingError, match=words):
        create_batch(None, rollouts)
