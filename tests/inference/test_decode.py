"""Sampler versus model: every returned logprob is that of a fresh forward pass over that one sequence."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from rollouts.errors import InferenceError
from rollouts.inference.embedded.cache import SavedCache, SessionCaches, SlotCache
from rollouts.inference.embedded.decode import Decoder, common_prefix, split_batch, uniforms
from rollouts.inference.embedded.decode_slots import DecodeRow

FAST = ["qwen3", "qwen3_eager", "llama", "gpt_neox", "gpt2"]
SLOW = ["gemma3", "mamba"]


def rarely(name: str) -> Any:
    """Models whose layers are like those of another are in the nightly run."""
    return pytest.param(name, marks=pytest.mark.nightly if name in ("qwen3_eager", "llama", "gpt2") else ())


def engine_of(model: Any, rows_max: int = 64, cache_bytes: int = 1 << 28, prefill_tokens_max: int = 1 << 14) -> Decoder:
    return Decoder(model, rows_max=rows_max, cache_bytes=cache_bytes, prefill_tokens_max=prefill_tokens_max)


def row_of(tokens, seed, *, max_tokens=9, temperature=1.0, session=None, stop_ids=()) -> DecodeRow:
    return DecodeRow(list(tokens), max_tokens, frozenset(stop_ids), temperature, uniforms(seed), session)


def run(engine: Decoder, rows: list[DecodeRow], version: int = 0) -> list[DecodeRow]:
    delivered: list[DecodeRow] = []
    engine.run(rows, version, delivered.extend)
    assert sorted(map(id, delivered)) == sorted(map(id, rows))
    return rows


def expected_logprobs(model: Any, row: DecodeRow) -> torch.Tensor:
    """Full forward over that one sequence, no cache, no padding."""
    ids = torch.tensor([row.tokens + row.sampled])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    table = (logits / (row.temperature or 1.0)).log_softmax(-1)
    first = len(row.tokens) - 1
    return table[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0]


def worst_error(model: Any, rows: list[DecodeRow]) -> float:
    return max((torch.tensor(row.logprobs) - expected_logprobs(model, row)).abs().max().item() for row in rows)


def play(engine: Decoder, *, turns: int = 3, seed: int = 0) -> list[DecodeRow]:
    """Groups that share prompts of mixed lengths, several turns each, temperatures and limits mixed, a stop id."""
    chance = random.Random(seed)
    episodes: list[tuple[str, list[int], float]] = []
    for group in range(4):
        prompt = [chance.randrange(60) for _ in range(chance.randrange(1, 18))]
        for member in range(3):
            session = f"{group}.{member}"
            engine.sessions.open(session)
            episodes.append((session, prompt, chance.choice([0.6, 1.0])))
    played: list[DecodeRow] = []
    for turn in range(turns):
        rows = []
        for index, (session, context, temperature) in enumerate(episodes):
            limit = chance.randrange(1, 14)
            rows.append(
                row_of(
                    context,
                    97 * index + turn,
                    max_tokens=limit,
                    temperature=temperature,
                    session=session,
                    stop_ids=(5,),
                )
            )
        played += run(engine, rows)
        episodes = [
            (
                name,
                row.tokens + row.sampled + [chance.randrange(60) for _ in range(chance.randrange(1, 6))],
                temperature,
            )
            for (name, _, temperature), row in zip(episodes, rows, strict=True)
            if chance.random() < 0.85
        ]
    return played


@pytest.mark.parametrize("name", [*map(rarely, FAST + SLOW)])
def test_logprobs_are_those_of_a_fresh_forward_pass(models, name):
    model = models(name)
    engine = engine_of(model)
    rows = play(engine)
    assert (engine.cache_support.shape is not None) == (name in FAST), engine.cache_support.reason
    assert worst_error(model, rows) < (1e-5 if name != "mamba" else 1e-4)
    assert all(len(row.sampled) <= row.max_tokens and 5 not in row.sampled[:-1] for row in rows)
    if name in FAST:
        assert engine.statistics.reused > 0


@pytest.mark.parametrize("rows_max", [pytest.param(1, marks=pytest.mark.nightly), 5])
def test_neither_batch_size_nor_refill_nor_buffer_size_changes_what_is_sampled(models, rows_max):
    model = models("qwen3")
    whole = play(engine_of(model))
    parts = play(
        engine_of(model, rows_max=rows_max, cache_bytes=40_000 if rows_max == 5 else 1 << 28, prefill_tokens_max=20)
    )
    assert [row.sampled for row in parts] == [row.sampled for row in whole]
    assert worst_error(model, parts) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mamba"])
def test_row_order_and_company_change_nothing(models, name):
    engine = engine_of(models(name))
    contexts = [[1, 2, 3], [4] * 9, [1, 2, 3], [7, 8], [9] * 5]
    together = run(engine, [row_of(c, seed, max_tokens=4 + seed) for seed, c in enumerate(contexts)])
    backwards = run(engine, [row_of(c, seed, max_tokens=4 + seed) for seed, c in reversed(list(enumerate(contexts)))])
    for seed, context in enumerate(contexts):
        alone = run(engine, [row_of(context, seed, max_tokens=4 + seed)])[0]
        assert alone.sampled == together[seed].sampled == backwards[-1 - seed].sampled


def test_negative_control_a_visible_slot_beyond_the_row(models, monkeypatch):
    model = models("qwen3")
    engine = engine_of(model)
    assert engine.cache_support.shape is not None
    right = SlotCache.visible

    def one_more(self, positions, width):
        return right(self, positions + (positions.shape[1] == 1), width)  # the column after the token just fed

    monkeypatch.setattr(SlotCache, "visible", one_more)
    assert worst_error(model, play(engine)) > 1e-3


def test_negative_control_a_position_too_far(models, monkeypatch):
    model = models("qwen3")
    engine = engine_of(model)
    assert engine.cache_support.shape is not None
    right = engine.network.forward

    def shifted(ids, *, position_ids, **arguments):
        return right(ids, position_ids=position_ids + (ids.shape[1] == 1), **arguments)

    monkeypatch.setattr(engine.network, "forward", shifted)
    assert worst_error(model, play(engine)) > 1e-3


def test_negative_control_stale_weights(make_model):
    model = make_model("qwen3")
    engine = engine_of(model)
    engine.sessions.open("s")
    first = run(engine, [row_of([1, 2, 3], 0, session="s")], version=0)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    context = [*first.tokens, *first.sampled, 4]
    stale = run(engine, [row_of(context, 1, session="s")], version=0)
    assert worst_error(model, stale) > 1e-3
    fresh = run(engine, [row_of(context, 1, session="s")], version=1)
    assert worst_error(model, fresh) < 1e-5


def test_the_probe_refuses_a_cache_that_shows_what_it_must_hide(models, monkeypatch):
    monkeypatch.setattr(SlotCache, "visible", lambda self, p, width: (p.unsqueeze(-1) >= 0).expand(*p.shape, width))
    model = models("qwen3")
    engine = engine_of(model)
    rows = play(engine, turns=1)
    assert "differ" in engine.cache_support.reason
    assert worst_error(model, rows) < 1e-5


def test_a_model_with_a_layer_that_keeps_no_keys_takes_the_slower_way(models):
    engine = engine_of(models("qwen3"))
    right = engine.network.forward

    def forward(ids, **arguments):
        logits, cache = right(ids, **arguments)
        cache.layers.append(DynamicLayer())  # of a layer that uses another one's keys
        return logits, cache

    engine.network.forward = forward  # type: ignore[method-assign]
    assert engine.cache_support.shape is None and engine.cache_support.reason == "some of its layers keep no keys"


def test_a_group_is_prefilled_once_and_a_turn_only_what_is_new(models):
    engine = engine_of(models("qwen3"))
    assert engine.cache_support
    for session in "abcd":
        engine.sessions.open(session)
    before = engine.statistics.prefilled
    rows = run(engine, [row_of([1, 2, 3, 4, 5], seed, session=s) for seed, s in enumerate("abcd")])
    assert engine.statistics.prefilled - before == 5
    before = engine.statistics.prefilled
    run(engine, [row_of([*r.tokens, *r.sampled, 6, 6], seed, session=r.session) for seed, r in enumerate(rows)])
    assert engine.statistics.prefilled - before == 4 * 3  # the token sampled last, and two new ones


def test_a_rewritten_history_keeps_only_the_common_prefix(models):
    model = models("qwen3")
    engine = engine_of(model)
    engine.sessions.open("s")
    first = run(engine, [row_of([1, 2, 3, 4], 0, session="s")])[0]
    second = run(engine, [row_of([1, 2, 3, *first.sampled[2:], 9], 1, session="s")])
    assert worst_error(model, second) < 1e-5
    third = run(engine, [row_of([1, 2], 2, session="s")])  # shorter than what is cached
    assert worst_error(model, third) < 1e-5


def test_steps_end_with_the_longest_row_and_rows_leave(models):
    engine = engine_of(models("qwen3"))
    assert engine.cache_support
    sizes: list[int] = []
    right = engine.network.forward
    engine.network.forward = lambda ids, **kw: sizes.append(ids.shape[0]) or right(ids, **kw)  # type: ignore[method-assign]
    run(engine, [row_of([1, 2, 3], seed, max_tokens=n) for seed, n in enumerate([1, 2, 4, 4, 6])])
    assert sizes == [1, 4, 3, 3, 1, 1]


def test_sessions_caches_are_bounded_and_dropped_when_closed():
    def saved(version: int, length: int) -> SavedCache:
        return SavedCache(version, [0] * length, torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1))

    caches = SessionCaches(80)
    assert not caches.has_room("a", 8)
    caches.open("a")
    assert caches.has_room("a", 80) and not caches.has_room("a", 81)
    caches.store("a", saved(0, 4))
    assert not caches.has_room("a", 64)
    caches.store("gone", saved(0, 4))
    assert len(caches) == 1
    assert caches.take("a", 1) is None and len(caches) == 0
    caches.store("a", saved(1, 4))
    caches.close("a")
    caches.close("a")
    assert len(caches) == 0
    caches.open("a")
    assert caches.has_room("a", 80)


def test_a_small_memory_forgets_sessions_but_not_correctness(models):
    model = models("qwen3")
    engine = engine_of(model, cache_bytes=30_000)
    rows = play(engine)
    assert worst_error(model, rows) < 1e-5


def test_the_modes_of_modules_are_restored(make_model):
    model = make_model("qwen3").train()
    frozen = model.model.norm.eval()
    run(engine_of(model), [row_of([1, 2], 0)])
    assert model.training and model.model.layers[0].training and not frozen.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_abandoned_row_leaves_at_the_next_step(models):
    engine = engine_of(models("qwen3"))
    rows = [row_of([1, 2], 0, max_tokens=30), row_of([3], 1, max_tokens=5)]
    rows[1].numbers = (setattr(rows[0], "abandoned", True) or 0.5 for _ in range(9))
    run(engine, rows)
    assert len(rows[0].sampled) == 1 and len(rows[1].sampled) == 5


def test_logits_that_are_not_finite_stop_with_a_word(make_model):
    model = make_model("qwen3")
    engine = engine_of(model)
    assert engine.cache_support
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(InferenceError, match=r"not finite.*--lr"):
        run(engine, [row_of([1, 2], 0)])


def test_score_is_a_forward_pass(models):
    engine = engine_of(models("qwen3"))
    row = run(engine, [row_of([1, 2, 3], 0, temperature=0.6)])[0]
    scores = engine.score(row.tokens + row.sampled, 0.6)
    assert scores[0] == 0.0
    assert torch.allclose(torch.tensor(scores[3:]), torch.tensor(row.logprobs), atol=1e-5)
    assert engine.score([4], 1.0) == [0.0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks the old name
def test_peft_adapters_take_part(make_model):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model("qwen3"), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    engine = engine_of(model.eval())
    rows = play(engine, turns=2)
    assert engine.cache_support.shape is not None
    assert worst_error(model, rows) < 1e-5
    with model.disable_adapter():
        assert worst_error(model, rows) > 1e-3


def test_batches_are_bounded_by_rows_and_tokens():
    def rows(*widths: int) -> list[DecodeRow]:
        return [row_of([0] * (width - 1), 0, max_tokens=1) for width in widths]

    def sizes(plan):
        return [([row.width_max for row in batch], slots) for batch, slots in plan]

    assert sizes(split_batch(rows(30, 10, 20), 8, 1000)) == [([10, 20, 30], 3)]
    assert sizes(split_batch(rows(30, 10, 20), 2, 1000)) == [([10, 20, 30], 2)]
    # 3 slots of 32 columns fit, one of them for what padding writes; then 6 of 16.
    assert sizes(split_batch(rows(30, 10, 20, 10), 8, 100)) == [([20, 30], 2), ([10, 10], 2)]
    assert sizes(split_batch(rows(500), 8, 60)) == [([500], 1)]
    assert sizes(split_batch(rows(5000, 900, 4000), 8, 10**6)) == [([4000, 5000], 2), ([900], 1)]
    assert split_batch([], 8, 60) == []


def test_a_buffer_of_many_short_rows_is_not_widened_for_a_few_long_ones(models, monkeypatch):
    from rollouts.inference.embedded import decode as room

    monkeypatch.setattr(room, "GROWTH", 8)
    model = models("qwen3")
    token_bytes = engine_of(model).cache_support.shape.token_bytes
    engine = engine_of(model, rows_max=128, cache_bytes=(128 + 1) * 16 * token_bytes)
    assert engine.cache_support
    seen: list[tuple[int, int]] = []
    right = SlotCache._allocate

    def allocate(self, columns):
        right(self, columns)
        assert self.keys.nbytes + self.values.nbytes == (self.slots + 1) * self.columns * token_bytes
        seen.append((self.slots, self.columns))

    monkeypatch.setattr(SlotCache, "_allocate", allocate)
    run(engine, [row_of([1, 2, seed % 60], seed, max_tokens=4) for seed in range(128)])
    run(engine, [row_of([3, 4, seed % 60], seed, max_tokens=4) for seed in range(100)])
    assert seen == [(128, 16)], "equal batches share a buffer"
    rows = run(engine, [row_of([1, 2, seed], seed, max_tokens=200) for seed in range(8)])
    assert max((slots + 1) * columns for slots, columns in seen) <= 129 * 16
    assert seen[1] == (8, 16) and seen[-1] == (8, 208), "growth ends at what the longest row needs"
    assert worst_error(model, rows) < 1e-5
    run(engine, [row_of([1, 2, seed % 60], seed, max_tokens=4) for seed in range(128)])
    assert seen[-1] == (128, 16)


def test_common_prefix():
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2]) == 2
    assert common_prefix([1, 2, 3], [1, 3]) == 1
