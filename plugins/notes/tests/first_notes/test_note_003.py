"""Note 003: the note's own loops give the numbers of ours, and its two programs run."""

from __future__ import annotations

import itertools
import re
import threading
from pathlib import Path

import pytest
import torch
import trio
from fake_engines import started
from note_blocks import block, execute

import rollouts.training
from rollouts.models.loading import TINY_PATH
from rollouts.training import (
    DataBuffer,
    PyTorchTrainingBackend,
    RLTrainingConfig,
    RolloutConfig,
    RolloutManager,
    Sample,
    TrainingConfig,
    create_adamw_optimizer,
    create_cross_entropy_loss,
    generate_rollout_batches,
    grpo_loss,
    load_hf_model,
)

PATHS = {"from training.": "from rollouts.training."}
"""The note mixes `training.x` and `rollouts.training.x`; here all of them are `rollouts.training.x`."""


def made_samples(*rewards: float, prompts=None) -> list[Sample]:
    """Three ids each, two of them trained; the last id differs."""
    return [
        Sample(
            prompts[number] if prompts else "?",
            "x",
            tokens=[5, 6, 7 + number],
            loss_mask=[0.0, 1.0, 1.0],
            metadata={"correct": bool(reward)},
        )
        for number, reward in enumerate(rewards)
    ]


def made_backend(model, loss_fn, folder) -> PyTorchTrainingBackend:
    return PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3), loss_fn, folder)


# --- phase 1: generators ---


def replies(prompts, **_):
    return made_samples(*(len(str(prompt)) % 2 for prompt in prompts), prompts=[str(prompt) for prompt in prompts])


def test_the_note_s_generator_gives_our_batches():
    """Its two functions that are only `...` there are imported."""
    code = block("003/rollout_generation", PATHS)
    stub = re.compile(r"^def (apply_sample_transforms|convert_to_batch)\(.*?^    \.\.\.\n", re.MULTILINE | re.DOTALL)
    code, count = stub.subn(r"from rollouts.training.rollout_generation import \1\n", code)
    assert count == 2
    config = RolloutConfig(batch_size=2, generate_fn=replies)
    both = [
        list(itertools.islice(function(DataBuffer(["a", "b", "c"], seed=0), config), 3))
        for function in (execute(code)["generate_rollout_batches"], generate_rollout_batches)
    ]
    assert [batch.tokens for batch in both[0]] == [batch.tokens for batch in both[1]]
    assert [batch.metadata["epoch_id"] for batch in both[0]] == [batch.metadata["epoch_id"] for batch in both[1]]
    assert [batch.metadata["step_id"] for batch in both[0]] == [0, 1, 2]


def test_the_manager_is_built_on_the_same_functions():
    lines = "\n".join(block("003/async_rollout_manager", PATHS).splitlines()[2:7])
    names = execute(lines)
    ours = rollouts.training
    assert names["convert_to_batch"] is ours.convert_to_batch
    assert names["apply_sample_transforms"] is ours.apply_sample_transforms


def test_the_old_class_warns_as_the_note_says():
    config = RolloutConfig(batch_size=1, generate_fn=replies)
    messages = []
    for kind in (execute(block("003/rollout_manager", PATHS))["RolloutManager"], RolloutManager):
        with pytest.warns(DeprecationWarning) as caught:
            kind(DataBuffer(["a"]), config)
        messages.append(str(caught[0].message))
    assert messages[0] == messages[1]


def test_old_and_new_give_the_same_batches():
    class EnoughError(Exception):
        pass

    seen = []

    def train_on_batch(batch):
        seen.append(batch.tokens)
        if len(seen) % 2 == 0:
            raise EnoughError

    old, new = block("003/rollout_example", PATHS).split("# NEW (generator-based):")
    given = {"config": RolloutConfig(batch_size=2, generate_fn=replies), "train_on_batch": train_on_batch}
    with pytest.raises(EnoughError), pytest.warns(DeprecationWarning):
        execute(old, data_buffer=DataBuffer(["a", "b", "c"]), RolloutManager=RolloutManager, **given)
    with pytest.raises(EnoughError):
        execute(new, data_buffer=DataBuffer(["a", "b", "c"]), **given)
    assert len(seen) == 4 and seen[:2] == seen[2:]


def test_the_public_names():
    names = execute(block("003/public_api", PATHS))
    for name in ("generate_rollout_batches", "apply_sample_transforms", "convert_to_batch"):
        assert names[name] is getattr(rollouts.training, name)


# --- phase 2: SFT ---


def sft_samples() -> list[Sample]:
    return [
        Sample(
            input_ids=torch.tensor([5, 6, 7 + number]),
            labels=torch.tensor([5, 6, 7 + number]),
            loss_mask=torch.tensor([0.0, 1.0, 1.0]),
        )
        for number in range(3)
    ]


def test_the_note_s_sft_loop_gives_our_numbers(tmp_path, capsys):
    """Also the same batches, which wrap around at the end of the samples, and the same printed losses."""
    names = execute(block("003/sft_loop"), torch=torch)
    config = TrainingConfig(num_steps=3, batch_size=2, log_every=1, checkpoint_every=10)
    found, printed = [], []
    for loop in (names["run_sft_training"], rollouts.training.run_sft_training):
        backend = made_backend(load_hf_model("tiny", device="cpu"), create_cross_entropy_loss(), tmp_path)
        found.append(trio.run(loop, backend, sft_samples(), config))
        printed.append(capsys.readouterr().out)
        backend.close()
    for theirs, ours in zip(*found, strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs)
    assert len(found[0]) == 3 and found[0][-1]["loss"] < found[0][0]["loss"]
    assert re.findall(r"loss=\S+", printed[0]) == re.findall(r"loss=\S+", printed[1]) != []
    for step in range(4):
        theirs = names["collate_batch"](sft_samples(), 2, step)
        assert as_lists(theirs) == as_lists(rollouts.training.collate_batch(sft_samples(), 2, step))


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: value.tolist() for name, value in batch.items()}


def test_the_sft_program(tmp_path, tokenizer, capsys):
    """examples/run_sft.py of the note: 1000 steps are 3 here."""
    changes = {
        "tokenizer = ...  # Load your tokenizer": "tokenizer = given_tokenizer",
        "model = ...  # Your model": "model = load_hf_model('tiny', device='cpu')",
        '"/tmp/sft_checkpoints"': repr(str(tmp_path)),
        "num_steps=1000": "num_steps=3",
        "log_every=100": "log_every=1",
        "checkpoint_every=500": "checkpoint_every=2",
    }
    names = {"compute_loss": create_cross_entropy_loss(), "load_hf_model": load_hf_model, "given_tokenizer": tokenizer}
    trio.run(execute(block("003/run_sft", changes), **names, __file__=__file__)["main"])
    out = capsys.readouterr().out
    assert len(re.findall(r"^Step \d: loss=\d+\.\d{4}, grad_norm=\d+\.\d{4}, lr=1\.0000e-04$", out, re.MULTILINE)) == 3
    first, last = (float(each) for each in re.findall(r"loss=(\S+),", out)[::2])
    assert last < first
    assert "  Total steps: 3\n" in out and re.search(r"Saved checkpoint to (\S+)", out)
    assert (Path(re.search(r"Saved checkpoint to (\S+)", out)[1]) / "config.json").is_file()


# --- phase 3: RL ---

FORGOTTEN = """
import torch
from typing import Dict, List
from rollouts.training.types import RLTrainingConfig, RolloutBatch, Sample
"""
"""What the note's loop uses and does not import."""


def test_the_note_s_grpo_loss_is_ours_for_shifted_labels():
    """The note's function expects logits and labels of the same position; ours shifts, as the SFT loss does."""
    theirs = execute(block("003/rl_losses"))["grpo_loss"]
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 5, 7, generator=generator), torch.randint(0, 7, (2, 5), generator=generator)
    mask, advantages = torch.tensor([[0.0, 1, 1, 0, 1], [0, 0, 0, 1, 1]]), torch.tensor([1.5, -0.5])
    shifted = theirs(logits[:, :-1], labels[:, 1:], mask[:, 1:], advantages)
    assert grpo_loss(logits, labels, mask, advantages).item() == pytest.approx(shifted.item(), rel=1e-6)


def test_the_note_s_three_functions_are_ours():
    names = execute(FORGOTTEN + "def compute_reward" + block("003/rl_loop").partition("def compute_reward")[2])
    sample = Sample("?", metadata={"correct": True})
    assert names["compute_reward"](sample) == rollouts.training.compute_reward(sample) == 1.0
    assert names["compute_advantages"]([1.0, 0.0], 0.5) == rollouts.training.compute_advantages([1.0, 0.0], 0.5)
    batch = rollouts.training.convert_to_batch(made_samples(1.0, 0.0), 0, 0)
    config = RLTrainingConfig(num_steps=1, baseline=0.5)
    theirs, ours = (
        prepare(batch, [1.0, 0.0], config)
        for prepare in (names["prepare_grpo_batch"], rollouts.training.prepare_grpo_batch)
    )
    assert as_lists(theirs) == as_lists(ours)
    assert ours["advantages"].tolist() == [0.5, -0.5]


class MyAgent:
    """Two replies of a prompt; the longer prompt's are right."""

    def run(self, prompts):
        return made_samples(*(float("5*7" in str(prompt)) for prompt in prompts), prompts=[str(p) for p in prompts])


def test_the_note_s_rl_loop_gives_our_numbers(tmp_path):
    """The same rewards, losses and gradients, from the same tasks."""
    found = []
    for loop in (
        execute(FORGOTTEN + block("003/rl_loop", PATHS))["run_rl_training"],
        rollouts.training.run_rl_training,
    ):
        backend = made_backend(load_hf_model("tiny", device="cpu"), grpo_loss, tmp_path)
        buffer = DataBuffer(["Solve 2+2", "Calculate 5*7", "What is 10-3?"])
        manager = rollouts.training.AsyncRolloutManager(buffer, RolloutConfig(2, generate_fn=MyAgent().run))
        config = RLTrainingConfig(num_steps=2, sync_every=10, baseline=0.5, log_every=1, checkpoint_every=10)
        found.append(trio.run(loop, backend, buffer, manager, [], config))
        backend.close()
    for theirs, ours in zip(*found, strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-4)
    assert [step["mean_reward"] for step in found[1]] != [0.0, 0.0]


def test_the_rl_program_and_its_server(tmp_path, capsys):
    """examples/run_rl.py of the note against a server that loads the checkpoints: 1000 steps are 3 here."""
    with started("sglang", TINY_PATH) as server:
        changes = PATHS | {
            "http://localhost:30000": server.url,
            "model = ...  # Your model": "model = load_hf_model('tiny', device='cpu')",
            '"/tmp/rl_checkpoints"': repr(str(tmp_path)),
            "num_steps=1000": "num_steps=3",
            "sync_every=10": "sync_every=1",
            "log_every=10": "log_every=1",
            "checkpoint_every=100": "checkpoint_every=2",
        }
        names = {"torch": torch, "my_agent": MyAgent(), "grpo_loss": grpo_loss, "load_hf_model": load_hf_model}
        trio.run(execute(block("003/run_rl", changes), **names, __file__=__file__)["main"])
        assert server.statistics()["loads"] >= 2
    out = capsys.readouterr().out
    assert len(re.findall(r"^Step \d: reward=\d\.\d\d, loss=\S+, grad_norm=\d", out, re.MULTILINE)) == 3
    assert "Synced weights to 1 engines" in out and "Saved checkpoint to " in out
    assert "  Total steps: 3\n" in out and re.search(r"Final mean reward: \d\.\d\d\n", out)


def test_submit_go_on_and_await_later(model, tmp_path):
    """Pipelining: both calls return at once, in the order of submission, and their results are awaited later."""
    backend = made_backend(model, create_cross_entropy_loss(), tmp_path)

    gate = threading.Event()

    async def main():
        backend.thread.submit(gate.wait)
        batches = [rollouts.training.collate_batch(sft_samples(), 2, step) for step in range(3)]
        futures = [(backend.forward_backward(batch), backend.optim_step()) for batch in batches]
        assert not any(future.done() for pair in futures for future in pair)
        gate.set()
        return [await forward.result() | await step.result() for forward, step in futures]

    losses = [metrics["loss"] for metrics in trio.run(main)]
    assert backend.weight_version == 3 and losses[-1] < losses[0]
    backend.close()
