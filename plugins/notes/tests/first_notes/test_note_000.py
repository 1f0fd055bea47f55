"""Note 000: the signatures, the data types, and training in two phases."""

from __future__ import annotations

import inspect
import json

import pytest
import trio
from note_blocks import block, execute, interface

import rollouts.training
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutBatch, RolloutConfig, Sample, Status

SIGNATURES = (
    "run_sft_training",
    "run_rl_training",
    "generate_rollout_batches",
    "RolloutConfig",
    "Sample",
    "RolloutBatch",
    "TrainingBackend",
    "grpo_loss",
    "ppo_loss",
    "InferenceEngine",
    "sync_weights_to_engines",
)


class Names(dict):
    """The names of `rollouts.training`, as a mapping."""

    def __missing__(self, name):
        return getattr(rollouts.training, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_takes_what_the_note_gives(name):
    assert interface(block(f"000/{name}"), Names()) == [name]


def test_the_manager_has_the_note_s_fields_and_method():
    code = block("000/AsyncRolloutManager")
    assert interface(code, Names()) == ["AsyncRolloutManager"]
    manager = AsyncRolloutManager(DataBuffer(["a"]), RolloutConfig(1, generate_fn=lambda prompts: []))
    assert manager.partial_samples == []


def test_a_missing_parameter_would_be_noticed():
    with pytest.raises(AssertionError, match="loss_mask"):
        interface(block("000/grpo_loss"), {"grpo_loss": lambda logits, labels, advantages: None})
    with pytest.raises(AssertionError, match="prompt"):
        interface(block("000/Sample"), {"Sample": RolloutBatch})
    with pytest.raises(AssertionError, match=r"0\.1 against 0\.2"):
        interface(
            "def ppo_loss(logits, labels, loss_mask, advantages, old_log_probs, clip_range=0.2) -> torch.Tensor",
            {"ppo_loss": lambda logits, labels, loss_mask, advantages, old_log_probs, clip_range=0.1: None},
        )


def test_a_sample_has_the_note_s_defaults():
    sample = Sample("2 + 2?")
    assert (sample.response, sample.tokens, sample.loss_mask, sample.reward) == ("", [], [], 0.0)
    assert (sample.group_index, sample.rollout_log_probs, sample.metadata) == (None, None, {})
    assert sample.status is Status.PENDING


def test_configs_are_frozen():
    from rollouts.training import RLTrainingConfig, SFTTrainingConfig

    sft = SFTTrainingConfig(num_steps=2, batch_size=1, log_every=1, checkpoint_every=2)
    rl = RLTrainingConfig(num_steps=2, sync_every=1, baseline=0.5, log_every=1, checkpoint_every=1)
    for config in (sft, rl, RolloutConfig(2)):
        name = next(iter(vars(config)))
        with pytest.raises(AttributeError):
            setattr(config, name, 3)


def test_configs_have_the_fields_of_the_note_in_its_order():
    from rollouts.training import RLTrainingConfig, SFTTrainingConfig

    named = {"num_steps": 1000, "sync_every": 10, "baseline": 0.5, "log_every": 10, "checkpoint_every": 100}
    assert RLTrainingConfig(1000, 10, 0.5, 10, 100) == RLTrainingConfig(**named)
    named = {"num_steps": 1000, "batch_size": 4, "log_every": 100, "checkpoint_every": 500}
    assert SFTTrainingConfig(1000, 4, 100, 500) == SFTTrainingConfig(**named)


STEPS_OF_RUN_SFT = {
    "    # 1. Load tokenizer + data mixture\n": "    samples = load_sft_dataset(config.data, tokenizer)\n",
    "    # 2. Create training backend (PyTorch or FSDP)\n": (
        "    backend = create_pytorch_backend(config.model, lr=1e-3, num_steps=2)\n"
    ),
    "    # 3. Run SFT loop: await run_sft_training(backend, samples, config, logger)\n": (
        "    logger = JSONLLogger(output_dir)\n"
        "    await run_sft_training(backend, samples, config.sft, logger)\n    logger.close()\n"
    ),
    '    # 4. Save checkpoints to output_dir / "checkpoints"\n': (
        '    await backend.save(str(output_dir / "checkpoints" / "step_0002"))\n    backend.close()\n'
    ),
}
STEPS_OF_RUN_RL = {
    "    # 1. Load from SFT checkpoint (if provided)\n": "    model = str(source_checkpoint or config.model)\n",
    "    # 2. Create backend (same as SFT)\n": (
        "    backend = create_pytorch_backend(model, lr=1e-3, num_steps=1, algorithm='grpo')\n"
    ),
    "    # 3. Setup rollout generation (TODO: needs implementation)\n": (
        "    buffer = DataBuffer(prompts=['2 + 2?'])\n"
        "    rollout_mgr, engines = AsyncRolloutManager(buffer, config.rollout), []\n"
    ),
    "    # 4. Run RL loop: await run_rl_training(backend, buffer, rollout_mgr, engines, config)\n": (
        "    history.extend(await run_rl_training(backend, buffer, rollout_mgr, engines, config.rl))\n"
        "    backend.close()\n"
    ),
}
IN_MAIN = {
    "        latest_checkpoint = sorted(checkpoint_dir": (
        '        checkpoint_dir = output_dir / "checkpoints"\n        latest_checkpoint = sorted(checkpoint_dir'
    ),
}


def test_sft_and_then_rl_from_its_checkpoint(tmp_path, tokenizer):
    """The note's train.py; its comments are code here."""
    from types import SimpleNamespace

    from rollouts.training import RLTrainingConfig, SFTTrainingConfig

    rows = [{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def replies(prompts):
        """Two replies of two sampled ids each, one of them right."""
        ids = tokenizer("2 + 2?")["input_ids"]
        return [
            Sample(prompt, "4", [*ids, 5, 6], [0.0] * len(ids) + [1.0, 1.0], reward, status=Status.COMPLETED)
            for prompt, reward in zip(prompts, [1.0, 0.0], strict=True)
        ]

    config = SimpleNamespace(
        model="tiny",
        data=str(tmp_path / "rows.jsonl"),
        sft=SFTTrainingConfig(num_steps=2, batch_size=2),
        rl=RLTrainingConfig(num_steps=1),
        rollout=RolloutConfig(batch_size=1, n_samples_per_prompt=2, generate_fn=replies),
    )
    history: list[dict[str, float]] = []
    code = block("000/train", STEPS_OF_RUN_SFT | STEPS_OF_RUN_RL | IN_MAIN)
    names = {name: getattr(rollouts.training, name) for name in rollouts.training.__all__}
    given = {"config": config, "output_dir": tmp_path, "mode": "sft+rl", "tokenizer": tokenizer, "history": history}
    program = execute(code, **names, **given, trio=trio, Path=type(tmp_path))
    assert inspect.iscoroutinefunction(program["run_sft"])
    program["main"]()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1] and steps[1]["loss"] < steps[0]["loss"]
    assert len(history) == 1 and history[0]["mean_reward"] == 0.5
