"""Note 003: functions instead of classes, and two training programs."""

from __future__ import annotations

import contextlib
import io
import itertools
from pathlib import Path

from first_notes import rows
from first_notes.note_000 import small_rl
from first_notes.rows import Table, awaited, new_backend, samples

ROWS = Table()
EXAMPLES = Path(__file__).parents[2] / "examples"


@ROWS("rollouts.training: generate_rollout_batches, apply_sample_transforms, convert_to_batch")
def _() -> None:
    from rollouts.training import (
        RolloutConfig,
        apply_sample_transforms,
        convert_to_batch,
        generate_rollout_batches,
    )

    config = RolloutConfig(2, generate_fn=rows.replies)
    (batch,) = itertools.islice(generate_rollout_batches(rows.buffer(), config), 1)
    made = convert_to_batch(apply_sample_transforms(rows.replies(["a", "b"]), config), 0, 0)
    assert batch.tokens == made.tokens


@ROWS("rollouts.training.rollout_generation module path")
def _() -> None:
    from rollouts.training.rollout_generation import generate_rollout_batches

    import rollouts.training

    assert generate_rollout_batches is rollouts.training.generate_rollout_batches


@ROWS("RolloutManager deprecation warning")
def _() -> None:
    from rollouts.training.rollout_manager import RolloutManager

    from rollouts.training import RolloutConfig

    with rows.warned("Use generate_rollout_batches"):
        RolloutManager(rows.buffer(), RolloutConfig(1, generate_fn=rows.replies))


@ROWS("examples/test_rollout_generation.py, sft_pipeline_example.py", "examples/run_sft.py, examples/run_rl.py")
def _() -> None:
    for name in ("rollout_generation.py", "sft_pipeline_example.py", "run_sft.py", "run_rl.py"):
        compile((EXAMPLES / name).read_text(), name, "exec")


@ROWS("rollouts.training.sft_loop / rl_loop module paths")
def _() -> None:
    from rollouts.training.rl_loop import run_rl_training
    from rollouts.training.sft_loop import run_sft_training

    import rollouts.training

    assert run_rl_training is rollouts.training.run_rl_training
    assert run_sft_training is rollouts.training.run_sft_training


def trained() -> tuple[list[dict[str, float]], str, Path]:
    """Three steps by this note's TrainingConfig: the history, the printed text, and the checkpoint."""
    from rollouts.training import TrainingConfig, run_sft_training

    out, backend = io.StringIO(), new_backend()
    config = TrainingConfig(num_steps=3, batch_size=2, log_every=1, checkpoint_every=2)
    with contextlib.redirect_stdout(out):
        history = awaited(run_sft_training, backend, samples(1.0, 0.0, 1.0), config)
    (saved,) = [line.rpartition(" ")[2] for line in out.getvalue().splitlines() if "Saved checkpoint" in line]
    return history, out.getvalue(), Path(saved)


@ROWS(
    "run_sft_training(backend, samples, TrainingConfig)",
    "log line every log_every steps",
    "save_checkpoint every checkpoint_every inside the loops",
)
def _() -> None:
    history, printed, checkpoint = trained()
    assert len(history) == 3 and history[-1]["step"] == 2 and history[-1]["loss"] < history[0]["loss"]
    lines = [line for line in printed.splitlines() if line.startswith("Step ")]
    assert len(lines) == 3 and all("grad_norm=" in line and "lr=" in line for line in lines)
    assert (checkpoint / "config.json").is_file()


@ROWS("rollouts.training.types: Sample, TrainingConfig, RolloutBatch, RolloutConfig, RLTrainingConfig, InferenceEngine")
def _() -> None:
    import rollouts.training
    from rollouts.training import types

    names = ("Sample", "TrainingConfig", "RolloutBatch", "RolloutConfig", "RLTrainingConfig", "InferenceEngine")
    assert all(getattr(types, name) is getattr(rollouts.training, name) for name in names)


@ROWS("collate_batch(samples, batch_size, step)")
def _() -> None:
    from rollouts.training.sft_loop import collate_batch

    batch = collate_batch(samples(1.0, 0.0, 1.0), 2, 1)
    assert batch["input_ids"].tolist() == [[5, 6, 9], [5, 6, 7]]  # it wraps around


@ROWS("prepare_sft_batch(samples)")
def _() -> None:
    from rollouts.training.sft_loop import prepare_sft_batch

    batch = prepare_sft_batch(samples(1.0))
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 7]],
        "labels": [[5, 6, 7]],
        "loss_mask": [[0.0, 1.0, 1.0]],
    }


@ROWS("preconditions checked")
def _() -> None:
    from rollouts.training import SFTTrainingConfig, run_sft_training

    with rows.refused("samples"):
        awaited(run_sft_training, new_backend(), [], SFTTrainingConfig(1, 1))
    with rows.refused("num_steps"):
        SFTTrainingConfig(num_steps=-1, batch_size=1)


@ROWS("Sample(input_ids=, labels=, loss_mask=)")
def _() -> None:
    import torch
    from rollouts.training.types import Sample

    ids, mask = torch.tensor([5, 6]), torch.tensor([0.0, 1.0])
    sample = Sample(input_ids=ids, labels=ids, loss_mask=mask)
    assert sample.input_ids.equal(ids) and sample.labels.equal(ids) and sample.tokens == [5, 6]


@ROWS("load_sft_samples('dataset.jsonl')")
def _() -> None:
    from rollouts.training import load_sft_samples

    file = rows.write_rows({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [5], "loss_mask": [1]})
    assert [sample.tokens for sample in load_sft_samples(file)] == [[5, 6, 7], [5]]
    found = load_sft_samples(rows.conversations_file(), rows.tokenizer())
    assert len(found) == 2 and 0 < sum(found[0].loss_mask) < len(found[0].tokens)


@ROWS("sample_prep.tokenize_conversation → tokens, user_spans", "sample_prep.compute_loss_mask(tokens, user_spans)")
def _() -> None:
    import torch
    from rollouts.training.sample_prep import compute_loss_mask, tokenize_conversation

    turns = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "2+2 equals 4."}]
    tokens, user_spans = tokenize_conversation(turns, rows.tokenizer())
    mask = torch.tensor(compute_loss_mask(tokens, user_spans))
    assert mask.shape == torch.tensor(tokens).shape
    for begin, end in user_spans:
        assert not mask[begin:end].any()


@ROWS(
    "run_rl_training(backend, buffer, manager, engines, config)",
    "step metrics mean_reward, max_reward, min_reward, grad_norm, lr",
    "PyTorchTrainingBackend(model, optimizer, loss_fn=grpo_loss) in run_rl_training",
)
def _() -> None:
    backend, history, _ = small_rl([])
    assert backend.weight_version == 3
    for step in history:
        assert (step["mean_reward"], step["max_reward"], step["min_reward"]) == (0.5, 1.0, 0.0)
        assert step["grad_norm"] > 0 and step["lr"] == 1e-3


@ROWS("async with rollout_manager", "batch.samples", "RolloutConfig(batch_size, generate_fn=my_agent.run)")
def _() -> None:
    from rollouts.training import AsyncRolloutManager, RolloutConfig

    class Agent:
        def run(self, prompts: list) -> list:
            return rows.replies(prompts)

    async def main() -> list:
        async with AsyncRolloutManager(rows.buffer(), RolloutConfig(2, generate_fn=Agent().run)) as manager:
            batch = await manager.generate_batch()
            return list(batch.samples)
        raise AssertionError

    found = awaited(main)
    assert [sample.input_ids.tolist() for sample in found] == [[5, 6, 7]] * 2
    assert found[0].loss_mask.tolist() == [0.0, 1.0, 1.0]


@ROWS("compute_reward / prepare_grpo_batch / compute_advantages")
def _() -> None:
    from rollouts.training.rl_loop import compute_advantages, compute_reward, prepare_grpo_batch

    from rollouts.training import RLTrainingConfig, convert_to_batch

    batch = convert_to_batch(samples(1.0, 0.0), 0, 0)
    rewards = [compute_reward(sample) for sample in batch.samples]
    made = prepare_grpo_batch(batch, rewards, RLTrainingConfig(num_steps=1, baseline=0.5))
    assert made["advantages"].tolist() == compute_advantages(rewards, 0.5) == [0.5, -0.5]


@ROWS("grpo_loss", exception="Labels of the same position")
def _() -> None:
    import torch
    from rollouts.training.rl_losses import grpo_loss

    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2] = 9.0  # position 0 predicts the label at position 1
    loss = grpo_loss(logits, torch.tensor([[0, 2, 0]]), torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([1.0]))
    assert loss.item() < 0.01


@ROWS("PyTorchTrainingBackend.save_checkpoint(step, metrics)")
def _() -> None:
    path = awaited(new_backend().save_checkpoint, 3, {"loss": 1.0})
    assert Path(path).name == "step_000003"


@ROWS("SGLangEngine(base_url=)")
def _() -> None:
    from rollouts.training.weight_sync import SGLangEngine

    with rows.server() as (url, asked):
        small_rl([SGLangEngine(base_url=url)], sync_every=1)
    assert asked.count("/update_weights_from_disk") == 3


@ROWS("DataBuffer(prompts=)")
def _() -> None:
    from rollouts.training.data_buffer import DataBuffer

    assert sorted(task.prompt for task in DataBuffer(prompts=["a", "b"]).get_prompts(2)) == ["a", "b"]


@ROWS("any SFT dataset")
def _() -> None:
    from rollouts.training import load_sft_samples

    answered = rows.write_rows({"prompt": "2 + 2?", "response": "4"})
    for file in (rows.conversations_file(), answered):
        assert all(sum(sample.loss_mask) > 0 for sample in load_sft_samples(file, rows.tokenizer()))
