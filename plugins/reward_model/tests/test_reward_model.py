"""A small reward model, trained here: its scores equal transformers' own, and what cannot score is refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import shutil
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
import trio
from rollouts_reward_model import compute_reward_model_score, load_reward_model, reward_model
from rollouts_reward_model.loading import check_model
from rollouts_reward_model.scoring import score_conversations
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from rollouts import Message, Task, Trajectory, primitives
from rollouts.cli import main
from rollouts.errors import ConfigError, ModelError, RewardError
from rollouts.models.loading import TINY_PATH
from rollouts.primitives import Generation, Rollout

GOOD, BAD = "The answer is 84.", "I do not know."
REPLIES = (GOOD, BAD, "7", "", "a longer reply, with several words of no use " * 3, "<|im_end|>")


def said(*replies: str) -> Trajectory:
    task = Task("What is 12 * 7?")
    turns = [[Message("assistant", reply), Message("user", "Go on.")] for reply in replies]
    return Trajectory(task, [*task.messages, *list(itertools.chain(*turns))[:-1]])


def scored(*groups: list[Trajectory], **settings):
    """The scores of these groups, in one call; of one group without the outer list."""
    found = trio.run(functools.partial(reward_model, list(groups), **settings))
    return found[0] if len(groups) == 1 else found


@contextlib.contextmanager
def passes_of(model, after=lambda count: None):
    """The shapes of the forward passes in this block. `after` is called after each, with their number."""
    shapes: list[tuple[int, int]] = []

    def hook(module, args, kwargs, output) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))
        after(len(shapes))

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()


def save(folder: Path, *, labels: int = 1, pad: int | None = None, positions: int = 512, steps: int = 0) -> str:
    """A Llama of ten thousand parameters with a head and the tokenizer of `tiny`, which likes GOOD after some steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=469, max_position_embeddings=positions, num_labels=labels, pad_token_id=pad, **sizes
    )
    if labels == 3:
        config.id2label, config.label2id = {0: "bad", 1: "fair", 2: "good"}, {"bad": 0, "fair": 1, "good": 2}
    model = LlamaForSequenceClassification(config)
    tokenizer = AutoTokenizer.from_pretrained(TINY_PATH)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        good, bad = (own_logits(model, tokenizer, said(text))[0] for text in (GOOD, BAD))
        loss = torch.nn.functional.softplus(bad - good)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def own_logits(model, tokenizer, trajectory: Trajectory, last: int = 0) -> torch.Tensor:
    """What transformers itself computes for one conversation, without a batch."""
    shown = [{"role": each.role, "content": each.text} for each in trajectory.messages]
    ids = tokenizer.apply_chat_template(shown, tokenize=True, add_generation_prompt=False, return_dict=True)[
        "input_ids"
    ]
    return model(input_ids=torch.tensor([ids[-last:]])).logits[0]


def upstream(folder: str):
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda *arguments: own_logits(model, tokenizer, *arguments).tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("models") / "likes_answers", steps=12)


@pytest.mark.parametrize("pad", [None, 0], ids=["no padding token", "a padding token"])
def test_batches_equal_one_by_one_and_transformers(tmp_path: Path, pad: int | None) -> None:
    folder = save(tmp_path / "model", pad=pad)
    trajectories = [said(reply) for reply in REPLIES[:5]]
    wanted = [upstream(folder)(each)[0] for each in trajectories]
    for size in (1, 100, 10**6):
        found = [each.value for each in scored(trajectories, model=folder, tokens_per_batch=size)]
        assert found == pytest.approx(wanted, abs=1e-5)
    assert len({round(each, 4) for each in wanted}) == len(wanted)  # control: the scores differ
    loaded = load_reward_model(folder)
    assert loaded is load_reward_model(folder) and loaded.model.config.pad_token_id == pad
    # What the model wrote is no control token of the template: the spelled-out end of a turn is not its id.
    last = REPLIES[5]
    assert scored([said(last)], model=folder)[0].value != pytest.approx(upstream(folder)(said(last))[0], abs=1e-6)


def test_all_groups_that_wait_share_forward_passes_of_bounded_size(trained: str) -> None:
    groups = [[said(f"{reply} {number}") for reply in REPLIES[:5]] for number in range(16)]
    model = load_reward_model(trained).model
    with passes_of(model) as apart:
        one_by_one = [scored(group, model=trained) for group in groups]
    for tokens, most in ((10**6, 1), (2048, 4), (400, 20)):
        with passes_of(model) as together:
            found = scored(*groups, model=trained, tokens_per_batch=tokens)
        assert len(together) <= most and sum(rows for rows, _ in together) == 16 * 5
        assert all(rows * width <= tokens for rows, width in together)
        for group, alone in zip(found, one_by_one, strict=True):
            assert [each.value for each in group] == pytest.approx([each.value for each in alone], abs=1e-5)
    assert len(apart) == 16  # control: each group had a pass of its own
    with passes_of(model) as wide:  # a conversation that is longer than a batch has a pass of its own
        scored(groups[0], model=trained, tokens_per_batch=1)
    assert [rows for rows, _ in wide] == [1] * 5
    assert scored([], [said(GOOD)], model=trained)[0] == []


def test_scoring_that_is_cancelled_ends_with_its_forward_pass(trained: str) -> None:
    model, settings = load_reward_model(trained).model, {"model": trained, "tokens_per_batch": 1}
    group = [said(f"reply {number}") for number in range(50)]

    async def cancelled(after: int) -> int:
        trio.to_thread.current_default_thread_limiter().total_tokens = 1
        scope = trio.CancelScope()
        cancel = functools.partial(trio.from_thread.run_sync, scope.cancel)
        with passes_of(model, lambda count: cancel() if count == after else None) as shapes:
            with scope:
                await reward_model([group], **settings)
            assert scope.cancelled_caught
            await trio.to_thread.run_sync(len, "")  # there is one thread: this waits until it has ended
        return len(shapes)

    assert trio.run(cancelled, 3) <= 4
    with passes_of(model) as whole:  # control: without a cancellation there are 50
        scored(group, **settings)
    assert len(whole) == 50


def test_a_good_answer_is_above_a_bad_one(trained: str) -> None:
    good, bad = scored([said(GOOD), said(BAD)], model=trained)
    assert good.value > bad.value + 1 and good.parts == {"cut": 0.0}
    likely, unlikely = scored([said(GOOD), said(BAD)], model=trained, probability=True)
    assert 0 < unlikely.value < 0.5 < likely.value < 1
    loaded = load_reward_model(trained)
    rollout = Rollout("What is 12 * 7?", Generation(GOOD))
    for given in (said(GOOD), rollout, said(GOOD).messages):
        assert compute_reward_model_score(loaded, given) == pytest.approx(good.value, abs=1e-6)
    with pytest.raises(RewardError, match="not str"):
        compute_reward_model_score(loaded, GOOD)


def test_the_primitives_of_these_names_are_its_functions(trained: str) -> None:
    rollout = Rollout("What is 2 + 2?", Generation("4"))
    model = primitives.load_reward_model(trained)
    assert model is load_reward_model(trained)
    score = primitives.compute_reward_model_score(model, rollout)
    assert score == compute_reward_model_score(model, rollout) and isinstance(score, float)


def test_one_of_several_labels(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", labels=3)
    logits = upstream(folder)(said(GOOD))
    for label, place in (("good", 2), ("1", 1), ("bad", 0)):
        assert scored([said(GOOD)], model=folder, label=label)[0].value == pytest.approx(logits[place], abs=1e-6)
    score = scored([said(GOOD)], model=folder, label="good", probability=True)[0]
    assert score.value == pytest.approx(torch.tensor(logits).softmax(0)[2].item(), abs=1e-6)
    with pytest.raises(ConfigError, match=r"has 3 labels: bad \(0\), fair \(1\), good \(2\)\ntype: .*label 0"):
        check_model(folder, "", None)
    with pytest.raises(ConfigError, match=r"label goood: the labels of .*; did you mean good"):
        check_model(folder, "goood", None)


def test_each_turn_earns_what_it_added(trained: str) -> None:
    whole = said(BAD, GOOD, BAD)
    by_turn, alone = (scored([whole], model=trained, per=per)[0] for per in ("turn", "rollout"))
    prefixes = [scored([said(*(BAD, GOOD, BAD)[:count])], model=trained)[0].value for count in (1, 2, 3)]
    assert by_turn.turns == pytest.approx([prefixes[0], prefixes[1] - prefixes[0], prefixes[2] - prefixes[1]])
    assert sum(by_turn.turns) == pytest.approx(by_turn.value) and by_turn.value == pytest.approx(alone.value)
    assert alone.turns == []
    assert scored([Trajectory(Task("?"), [Message("user", "?")])], model=trained)[0].value is None


def test_a_longer_conversation_loses_its_beginning(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", positions=24)
    long, short = said(REPLIES[4]), said("7")
    with pytest.warns(UserWarning, match="reads 24 tokens, .* the beginnings of longer ones are left out"):
        first, second = scored([long, short], model=folder)
    assert first.value == pytest.approx(upstream(folder)(long, 24)[0], abs=1e-6)
    assert first.parts == {"cut": 1.0} and "tokens were left out" in first.why
    loaded = load_reward_model(folder)
    assert (loaded.cut_count, loaded.scored_count) == (2 if second.parts["cut"] else 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        (kept,) = score_conversations(loaded, [long.messages], max_tokens=8)
    assert kept.value == pytest.approx(upstream(folder)(long, 8)[0], abs=1e-6)
    with pytest.raises(ConfigError, match="has 24 positions; type a smaller number"):
        check_model(folder, "", 25)


def test_what_cannot_score_is_refused(trained: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        check_model(str(tmp_path / "nothing"), "", None)
    with pytest.raises(ModelError, match="is Qwen3ForCausalLM, which has no head for scores"):
        check_model("tiny", "", None)
    headless = tmp_path / "headless"
    shutil.copytree(TINY_PATH, headless)
    config = json.loads((headless / "config.json").read_text())
    (headless / "config.json").write_text(json.dumps(config | {"architectures": None, "num_labels": 1}))
    with pytest.raises(ModelError, match=r"have no score\.weight, so that its scores would be random"):
        load_reward_model(str(headless))
    untold = tmp_path / "untold"
    shutil.copytree(trained, untold)
    (untold / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template"):
        load_reward_model(str(untold))


def test_a_run_is_rewarded_by_it_and_rescored_alike(trained: str, tmp_path: Path, capsys) -> None:
    reward = ["--reward", "reward_model", "--reward.reward_model.model", trained]
    sizes = "--steps 1 --prompts-per-step 3 --samples-per-prompt 2 --eval-tasks 5 --max-tokens 24".split()
    run, again = tmp_path / "run", tmp_path / "again"
    with passes_of(load_reward_model(trained).model) as shapes:
        assert main(["run", "--env", "calculator", *sizes, *reward, "--out", str(run)]) == 0
    # Before and after training a sampled and a greedy pass over the held-out tasks, and one step in between.
    assert [rows for rows, _ in shapes] == [5, 5, 6, 5, 5]
    with passes_of(load_reward_model(trained).model) as shapes:
        assert main(["rescore", str(run), *reward, "--out", str(again)]) == 0
    assert [rows for rows, _ in shapes] == [6]
    live, rescored = (
        [
            json.loads(line)
            for file in sorted(folder.glob("trajectories/step_*"))
            for line in file.read_text().splitlines()
        ]
        for folder in (run, again)
    )
    assert [line["reward"] for line in live] == pytest.approx([line["reward"] for line in rescored], abs=1e-6)
    score = load_reward_model(trained)
    messages = [msgspec.convert(line["messages"], list[Message]) for line in live]
    alone = [compute_reward_model_score(score, each) for each in messages]
    assert [line["reward"] for line in live] == pytest.approx(alone, abs=1e-5)
    capsys.readouterr()
    assert main(["run", "--env", "calculator", "--reward", "reward_model", "--reward.reward_model.model", "tiny"]) == 2
    assert "has no head for scores" in capsys.readouterr().err
