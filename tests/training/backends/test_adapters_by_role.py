"""One adapter a role over one model: each is served exactly, and trained by its own role's samples alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import trio
from peft import PeftModel

from rollouts.errors import InferenceError, TrainingError
from rollouts.inference.base import GenerateRequest
from rollouts.inference.embedded.hf import HFInference
from rollouts.models import lora
from rollouts.models.loading import load_hf_model, no_peft_warnings
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batches import Row, TrainBatch
from rollouts.training.batching import make_batch

ROLES = ("a", "a-b")  # one name begins with the other


@pytest.fixture
def backend_of(tiny):
    made = []

    def make(model=None, **settings):
        causal = copy.deepcopy(model) if model is not None else tiny.qwen3()
        adapter = lora.add_lora(causal, rank=4, alpha=None, targets="all-linear", seed=0, roles=ROLES)
        chosen = TrainerSettings(**{"lr": 1e-2, **settings})
        made.append(TorchBackend(Executor(Trainer(causal, {"main": GRPO}, chosen, adapter=adapter))))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def samples(tiny):
    """Two groups of each role, in turns."""
    found = tiny.make_samples(4, 3)
    for sample in found:
        sample.metadata["role"] = ROLES[sample.group_index % 2]
    return found


def batch_of(samples, *flat):
    """A batch with advantages of both signs; 0 for the roles in `flat`. D is that of all samples."""
    advantages = [0.0 if s.metadata["role"] in flat else math.sin(3.0 * n + 1) for n, s in enumerate(samples)]
    return make_batch(samples, advantages, aggregation="token_mean", step=0)


def train(backend, batch):
    backend.forward_backward(batch).wait(60)
    return backend.optim_step().wait(60)


def weights_of(backend, role):
    return {n: t for n, t in backend.get_weights("adapter").wait(60).items() if n.startswith(f"{role}/")}


def same(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def says(model, tokens):
    """Logprobs by another way: the whole model, without caches."""
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
    return [float(table[t, token]) for t, token in enumerate(tokens[1:])]


def test_each_role_is_served_exactly_and_no_other_adapter_gives_its_numbers(tiny, backend_of, samples, tmp_path):
    model = tiny.qwen3()
    model.save_pretrained(tmp_path / "model")
    backend = backend_of(load_hf_model(str(tmp_path / "model")))
    train(backend, batch_of(samples))
    backend.save(str(tmp_path / "step")).wait(60)
    merged = {role: load_hf_model(str(tmp_path / "step" / "adapters" / role)) for role in ROLES}
    said = []

    async def main():
        async with HFInference(backend.model, backend, roles=ROLES) as engine:
            sessions = [engine.open_session((0, number)) for number in range(3)]

            async def play(number):
                contexts = {role: [5, 3, 17, 22 + number] for role in ROLES}
                for turn, place in enumerate((0, 0, 1, 0)):  # in one session, with equal beginnings
                    role = ROLES[(place + number) % 2]
                    seed, context = 10 * turn + number, contexts[role]
                    request = GenerateRequest(
                        list(context), 5, (), seed, order=(0, number, turn), session=sessions[number], role=role
                    )
                    reply = await engine.generate(request)
                    said.append((role, [*context, *reply.tokens], reply.logprobs))
                    contexts[role] = [*context, *reply.tokens, 7, 8]
                engine.close_session(sessions[number])

            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(play, number)
            for role, tokens, _ in said[:4]:
                assert await engine.score(tokens, role=role) == pytest.approx(
                    [0.0, *says(merged[role], tokens)], abs=1e-4
                )
            with pytest.raises(InferenceError, match="a request names none; there are adapters of a, a-b"):
                await engine.score([1, 2])
            with pytest.raises(InferenceError, match="the role c has no adapter"):
                await engine.generate(GenerateRequest([1, 2], 1, (), 0, role="c"))
            assert engine._decoder.statistics.reused > 0, "caches were used"

    trio.run(main)
    for role, tokens, logprobs in said:
        (other,) = set(ROLES) - {role}
        assert logprobs == pytest.approx(says(merged[role], tokens)[-5:], abs=1e-4)
        wrong = says(merged[other], tokens)[-5:]
        assert max(abs(a - b) for a, b in zip(wrong, logprobs, strict=True)) > 1e-3, "with the adapters exchanged"
        zeros = [0.0] * len(tokens)
        row = Row(tokens, zeros, zeros, zeros, zeros, 0, 0, role=role)
        trained = backend.forward(TrainBatch([row], 1.0, [0.0], 0)).wait(60).logprobs[0]
        assert logprobs == pytest.approx(trained[-5:], abs=1e-4)


def test_the_samples_of_a_role_train_its_adapter_alone(backend_of, samples, tiny):
    model = tiny.qwen3()
    both, alone, first = backend_of(model), backend_of(model), backend_of(model)
    before = {role: weights_of(both, role) for role in ROLES}
    assert same(before["a"], weights_of(alone, "a"))
    assert not same(before["a"], {n.replace("a-b/", "a/"): t for n, t in before["a-b"].items()}), "they begin apart"
    batch = batch_of(samples)
    own = TrainBatch([row for row in batch.rows if row.role == "a"], batch.denominator, batch.rewards, 0)
    for backend, given in ((both, batch), (alone, own)):
        # Two steps: the second one has momentum.
        train(backend, given)
        train(backend, given)
    assert same(weights_of(alone, "a-b"), before["a-b"])
    assert not same(weights_of(both, "a-b"), before["a-b"])
    assert not same(weights_of(alone, "a"), before["a"])
    assert same(weights_of(alone, "a"), weights_of(both, "a")), "also clipped as if there were no other role"
    train(first, own)
    assert not same(weights_of(first, "a"), weights_of(alone, "a"))


@pytest.mark.parametrize("flat", [("a",), ROLES])
def test_a_role_without_advantages_moves_as_if_it_were_trained_in_full(backend_of, samples, tiny, flat):
    model, batch = tiny.qwen3(), batch_of(samples)
    quick, full = backend_of(model), backend_of(model)
    full._trainer._never_flat.add("main")  # every row has a backward pass
    for backend in (quick, full):
        train(backend, batch)
        before = weights_of(backend, "a")
        train(backend, batch_of(samples, *flat))
        assert not same(before, weights_of(backend, "a")), "momentum moves it"
    assert same(weights_of(quick, "a"), weights_of(full, "a"))
    assert same(weights_of(quick, "a-b"), weights_of(full, "a-b"))


def test_a_checkpoint_has_the_adapter_of_each_role_and_the_next_step_is_bit_equal(backend_of, samples, tiny, tmp_path):
    model, batch = tiny.qwen3(), batch_of(samples)
    backend, again = backend_of(model), backend_of(model)
    train(backend, batch)
    backend.save(str(tmp_path / "step")).wait(60)
    again.load(str(tmp_path / "step")).wait(60)
    for each in (backend, again):
        train(each, batch)
    assert same(backend.get_weights("adapter").wait(60), again.get_weights("adapter").wait(60))
    with no_peft_warnings():
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "step" / "adapters" / "a-b")
    again.load(str(tmp_path / "step")).wait(60)
    lora.use_adapter(again.model, "a-b")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, again.model(ids).logits), "as peft reads it"
        lora.use_adapter(again.model, "a")
        assert not torch.equal(loaded(ids).logits, again.model(ids).logits)


def test_a_sample_without_a_role_and_merged_weights_are_refused(backend_of, samples):
    backend = backend_of()
    samples[0].metadata.clear()
    with pytest.raises(TrainingError, match=r"a sample is of the role '', and there are adapters of a, a-b"):
        backend.forward_backward(make_batch(samples, [1.0] * 12, aggregation="token_mean", step=0)).wait(60)
    with pytest.raises(TrainingError, match="each role has an adapter, so there are no merged weights"):
        backend.get_weights("full").wait(60)
