from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
import trio
import trio.testing

from rollouts.errors import ConfigError, InferenceError, ModelError
from rollouts.inference.base import GenerateRequest, Generation, InferenceBackend, WeightUpdate
from rollouts.inference.embedded.hf import HFInference, create_hf_inference
from rollouts.models.futures import TorchThread


class Training:
    """As much of a training backend as the engine may touch."""

    model_files = None

    def __init__(self, model: Any) -> None:
        self.model, self.version, self.thread = model, 3, TorchThread()


def request(tokens: list[int], seed: int = 0, **settings: Any) -> GenerateRequest:
    return GenerateRequest(tokens, **{"max_tokens": 6, "stop_ids": (), "seed": seed} | settings)


def use(model: Any, body: Callable[[HFInference], Awaitable[Any]], training: Any = None, **settings: Any) -> Any:
    async def main() -> Any:
        with trio.fail_after(30):
            async with HFInference(model, training, **settings) as engine:
                return await body(engine)

    return trio.run(main)


async def episode(
    engine: HFInference, session: str, order: tuple[int, int], found: dict[Any, Any], chance: Any
) -> None:
    context = [1 + order[0], 2, 3]
    for turn in range(1 + order[1] % 3):
        for _ in range(chance.randrange(4)):
            await trio.lowlevel.checkpoint()  # tasks reach generate in any order
        seed = hash((*order, turn))
        reply = await engine.generate(request(context, seed, order=(*order, turn), session=session))
        found[(*order, turn)] = (reply.tokens, reply.logprobs)
        context = context + reply.tokens + [4]
    engine.close_session(session)


async def play(engine: HFInference, shuffle: int) -> dict[Any, Any]:
    chance = random.Random(shuffle)
    found: dict[Any, Any] = {}
    sessions = {order: engine.open_session(order) for order in [(g, m) for g in range(3) for m in range(4)]}
    items = list(sessions.items())
    chance.shuffle(items)
    async with trio.open_nursery() as nursery:
        for order, session in items:
            nursery.start_soon(episode, engine, session, order, found, chance)
    assert engine.statistics().open_sessions == 0
    return dict(sorted(found.items()))


def test_one_seed_one_result_whatever_the_order_of_tasks(models):
    model = models("qwen3")
    first = use(model, lambda engine: play(engine, 0))
    assert len(first) == 3 * (1 + 2 + 3 + 1)
    for shuffle in (1, 2):
        assert use(model, lambda engine, shuffle=shuffle: play(engine, shuffle)) == first  # logprobs to the last bit
    smaller = use(model, lambda engine: play(engine, 0), rows_max=2)
    assert {key: tokens for key, (tokens, _) in smaller.items()} == {key: tokens for key, (tokens, _) in first.items()}


def test_batches_follow_the_sessions(models):
    async def body(engine: HFInference) -> None:
        await play(engine, 0)
        assert engine.statistics().batches == 3
        assert engine.statistics().reused > 0

    use(models("qwen3"), body)


def test_with_training_it_shares_model_thread_and_version(make_model):
    training = Training(make_model("qwen3"))

    async def body(engine: HFInference) -> None:
        assert engine.model is training.model and engine.capabilities.trainable and engine.context_tokens_max == 256
        reply = await engine.generate(request([1, 2, 3]))
        assert reply.finish == "length" and reply.versions == [3] * 6 and len(reply.logprobs) == 6
        with torch.no_grad():
            training.model.lm_head.weight.mul_(-1)
        training.version = 4
        await engine.update_weights(WeightUpdate(4))
        assert (await engine.generate(request([1, 2, 3]))).versions == [4] * 6
        with pytest.raises(InferenceError, match=r"has version 5.*of version 4"):
            await engine.update_weights(WeightUpdate(5))
        with pytest.raises(InferenceError, match="shares the trainer's parameters"):
            await engine.update_weights(WeightUpdate(4, path="somewhere"))
        health = await engine.health()
        assert health.ok and health.version == 4 and health.detail == "decoding with session caches"

    use(training.model, body, training)
    assert training.thread.submit(lambda: 7).wait(5) == 7  # the trainer's thread lives on
    training.thread.close()


def test_a_changed_model_recomputes_the_sessions_cache(make_model):
    training = Training(make_model("qwen3"))

    async def body(engine: HFInference) -> None:
        session = engine.open_session((0, 0))
        first = await engine.generate(request([1, 2, 3], session=session))
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(1.2)
        training.version += 1
        context = [1, 2, 3, *first.tokens, 9]
        second = await engine.generate(request(context, 1, session=session))
        scores = await engine.score(context + second.tokens)
        assert torch.allclose(torch.tensor(scores[len(context) :]), torch.tensor(second.logprobs), atol=1e-5)

    use(training.model, body, training)
    training.thread.close()


def test_stop_ids_and_greedy(models):
    async def body(engine: HFInference) -> None:
        greedy = await engine.generate(request([1, 2], temperature=0.0, max_tokens=8))
        again = await engine.generate(request([1, 2], 9, temperature=0.0, max_tokens=8, stop_ids=(greedy.tokens[2],)))
        cut = greedy.tokens.index(greedy.tokens[2]) + 1
        assert again.tokens == greedy.tokens[:cut] and again.finish == "stop"
        scores = await engine.score([1, 2, *greedy.tokens], 0.0)
        assert torch.allclose(torch.tensor(scores[2:]), torch.tensor(greedy.logprobs), atol=1e-5)

    use(models("llama"), body)


def test_requests_without_sessions_share_a_batch(models):
    async def body(engine: HFInference) -> None:
        replies: dict[int, Generation] = {}

        async def one(seed: int) -> None:
            replies[seed] = await engine.generate(request([1, 2, 3], seed))

        async with trio.open_nursery() as nursery:
            for seed in range(6):
                nursery.start_soon(one, seed)
        assert engine.statistics().batches == 1
        alone = await engine.generate(request([1, 2, 3], 4))
        assert alone.tokens == replies[4].tokens

    use(models("qwen3"), body)


def test_a_row_that_finishes_is_delivered_while_others_decode(models):
    async def body(engine: HFInference) -> None:
        ended: list[str] = []
        long, short = engine.open_session((0, 0)), engine.open_session((0, 1))

        async def one(session: str, max_tokens: int) -> None:
            await engine.generate(request([1, 2], session=session, max_tokens=max_tokens))
            ended.append(session)
            engine.close_session(session)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, long, 200)
            nursery.start_soon(one, short, 1)
        assert ended == [short, long]

    use(models("qwen3"), body)


@pytest.mark.parametrize("moment", ["waiting", "decoding"])
def test_a_cancelled_waiter_stops_nobody(models, moment):
    async def body(engine: HFInference) -> None:
        cancelled, kept = engine.open_session((0, 0)), engine.open_session((0, 1))
        scope = trio.CancelScope()
        done = trio.Event()

        async def gives_up() -> None:
            with scope:
                await engine.generate(request([1, 2], session=cancelled, max_tokens=200))
            engine.close_session(cancelled)

        async def goes_on() -> None:
            if moment == "waiting":
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
            reply = await engine.generate(request([1, 2], 1, session=kept, max_tokens=3))
            assert len(reply.tokens) == 3
            scope.cancel()
            reply = await engine.generate(request([1, 2, *reply.tokens], 2, session=kept, max_tokens=3))
            assert len(reply.tokens) == 3
            engine.close_session(kept)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(gives_up)
            nursery.start_soon(goes_on)
        assert done.is_set() and engine.statistics().open_sessions == 0

    use(models("qwen3"), body)


def test_waiting_for_others_has_a_deadline(models):
    async def body(engine: HFInference) -> None:
        waits, engine_forgot = engine.open_session((0, 0)), engine.open_session((0, 1))
        with pytest.raises(InferenceError, match=f"0.05 s for 1 other episodes.*{engine_forgot}.*wait-seconds"):
            await engine.generate(request([1, 2], session=waits))
        engine.close_session(engine_forgot)
        assert (await engine.generate(request([1, 2], session=waits))).tokens
        # once a batch runs the deadline is off
        assert len((await engine.generate(request([1, 2], session=waits, max_tokens=250))).tokens) == 250

    use(models("qwen3"), body, wait_seconds=0.05)


def test_what_cannot_be_asked(models):
    async def body(engine: HFInference) -> None:
        for tokens in ([1, 67], [-1, 2]):
            with pytest.raises(InferenceError, match="outside the vocabulary of 67"):
                await engine.generate(request(tokens))
            with pytest.raises(InferenceError, match="outside the vocabulary"):
                await engine.score(tokens)
        with pytest.raises(InferenceError, match="95 tokens and a reply of up to 6 do not fit into the 100"):
            await engine.generate(request([1] * 95))
        with pytest.raises(InferenceError, match="101 tokens do not fit"):
            await engine.score([1] * 101)
        assert len((await engine.generate(request([1] * 94))).tokens) == 6
        for wrong in (request([1], max_tokens=0), request([]), request([1], temperature=-1.0)):
            with pytest.raises(AssertionError):
                await engine.generate(wrong)

    use(models("qwen3"), body, context_tokens=100)


def test_a_failure_in_the_model_reaches_every_waiter_and_the_engine_lives(make_model):
    model = make_model("qwen3")
    right = model.model.layers[1].forward

    async def body(engine: HFInference) -> None:
        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of memory")

        model.model.layers[1].forward = broken
        failures: list[str] = []

        async def one(seed: int) -> None:
            with pytest.raises(InferenceError, match="RuntimeError: out of memory") as caught:
                await engine.generate(request([1, 2], seed))
            assert caught.value.__cause__ is None, "it would hold the tensors of the pass"
            failures.append(str(caught.value))

        async with trio.open_nursery() as nursery:
            for seed in range(3):
                nursery.start_soon(one, seed)
        assert len(failures) == 3 and all("type a smaller --inference.cache-gib" in words for words in failures)
        with pytest.raises(InferenceError, match="failed to score"):
            await engine.score([1, 2])
        assert not (await engine.health()).ok
        model.model.layers[1].forward = right
        assert (await engine.health()).ok
        assert (await engine.generate(request([1, 2]))).tokens

    use(model, body)


def test_a_model_of_another_kind_says_how_it_is_decoded(models):
    async def body(engine: HFInference) -> None:
        assert "sliding_attention" in (await engine.health()).detail

    use(models("gemma3"), body)


def test_create_shares_or_loads(make_model, tmp_path):
    training = Training(make_model("qwen3"))
    shared = create_hf_inference("tiny", training, 0, rows_max=7)
    assert shared.model is training.model
    training.model.save_pretrained(tmp_path / "model")
    loaded = create_hf_inference(str(tmp_path / "model"), None, 0, device="cpu")
    assert loaded.model is not training.model and loaded.version == 0
    training.thread.close()

    async def main() -> Generation:
        async with loaded as engine:
            return await engine.generate(request([1, 2, 3]))

    assert len(trio.run(main).tokens) == 6


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rows_max", 0, "--inference.rows-max 0: expected 1 or more"),
        ("cache_gib", 0.0, "--inference.cache-gib 0.0: expected a number above 0"),
        ("cache_gib", float("inf"), "--inference.cache-gib inf: expected"),
        ("prefill_tokens_max", -5, "--inference.prefill-tokens-max -5: expected 1 or more"),
        ("context_tokens", -1, "--inference.context-tokens -1: expected 0 "),
        ("wait_seconds", 0.0, "--inference.wait-seconds 0.0: expected a number above 0"),
    ],
)
def test_settings_out_of_bounds_are_refused_before_weights_are_read(name, value, words):
    with pytest.raises(ConfigError) as caught:
        create_hf_inference("./nowhere", None, 0, **{name: value})
    assert words in str(caught.value)
    with pytest.raises(ModelError, match="there is no folder"):  # control
        create_hf_inference("./nowhere", None, 0)


def test_it_is_an_inference_backend(models):
    engine: InferenceBackend = HFInference(models("qwen3"))
    assert engine.capabilities.trainable
    asked = [name for name in vars(InferenceBackend) if not name.startswith("_")]
    assert asked and all(callable(getattr(HFInference, name)) for name in asked)
    engine._thread.close()  # type: ignore[attr-defined]


def test_the_engine_is_imported_without_torch():
    code = "import sys, rollouts.inference; assert not {'torch', 'trio', 'transformers', 'msgspec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, rollouts.inference.embedded.hf; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_setting_has_its_words():
    from rollouts.plugins.signature import read_signature

    signature = read_signature(create_hf_inference, "inference")
    assert signature.requests == ("model", "training", "seed", "lora_roles", "pinned")
    assert all(setting.doc and "\n" not in setting.doc and len(setting.doc) < 120 for setting in signature.settings)
