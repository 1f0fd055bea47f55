"""Note 001: the imports, and the two ways to start reinforcement learning."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import trio
from fake_engines import started
from note_blocks import block, execute

import rollouts.training
from rollouts.models.loading import TINY_PATH

BACKEND = 'create_pytorch_backend("tiny", lr=1e-3, num_steps=2, algorithm="grpo", seed=0)'


@pytest.fixture(scope="module")
def sglang():
    with started("sglang", TINY_PATH, numbers="transformers") as server:
        yield server


@pytest.mark.parametrize("name", ["datasets", "evidence", "types"])
def test_the_imports(name):
    execute(block(f"001/{name}"))


def test_a_sample_has_all_fields_of_rl():
    lists = {"rollout_log_probs=[...]": "rollout_log_probs=[0.0, -0.5]", "tokens=[...]": "tokens=[1, 2]"}
    sample = execute(block("001/sample", lists | {"loss_mask=[...]": "loss_mask=[0, 1]"}))["sample"]
    assert (sample.reward, sample.rollout_log_probs, sample.response) == (1.0, [0.0, -0.5], "4")
    assert sample.advantages is None


def test_the_grpo_loss_of_samples():
    """-advantage * the mean logprob of the trained tokens, over the samples."""
    from rollouts.training import RLTrainingConfig, Sample

    samples = [
        Sample("2 + 2?", "4", tokens=[1, 2, 3], loss_mask=[0, 1, 1], reward=reward, rollout_log_probs=[0.0, -0.5, -1.5])
        for reward in (1.0, 0.0)
    ]
    config = RLTrainingConfig(num_steps=1, baseline=0.25)
    loss = execute(block("001/compute_grpo_loss"), samples=samples, config=config)["loss"]
    assert float(loss) == pytest.approx((0.75 * 1.0 - 0.25 * 1.0) / 2)


def config_of(tmp_path, mode="rl"):
    """The settings that the note's train.py reads, and two tasks in a file."""
    rows = [{"prompt": "What is 2 * 3?", "answer": 6}, {"prompt": "What is 4 * 5?", "answer": 20}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SimpleNamespace(
        data=SimpleNamespace(rl_mixture=[str(tmp_path / "rows.jsonl")]),
        rl=SimpleNamespace(examples_per_step=2, num_samples=2, num_epochs=1, batch_size=4, matrix_lr=1e-3),
        output=SimpleNamespace(mode=mode, source_checkpoint=None),
    )


def names_of(config, tmp_path) -> dict:
    """What the note's snippets have imported."""
    from rollouts import CalculatorEnvironment, Endpoint

    names = {name: getattr(rollouts.training, name) for name in rollouts.training.__all__}
    given = {"Endpoint": Endpoint, "CalculatorEnvironment": CalculatorEnvironment}
    return names | given | {"config": config, "output_dir": tmp_path, "Path": type(tmp_path)}


def endpoint(server) -> dict[str, str]:
    """The note has `...` where the address is."""
    return {'Endpoint(provider="sglang", ...)': f'Endpoint(provider="sglang", api_base="{server.url}")'}


def test_filters_and_over_sampling(sglang, tmp_path):
    """Groups without any success are dropped."""
    names = names_of(config_of(tmp_path), tmp_path)
    given = names["Endpoint"](provider="sglang", api_base=sglang.url)
    environment = names["CalculatorEnvironment"]()
    made = names["RolloutConfig"](endpoint=given, environment=environment, batch_size=2, n_samples_per_prompt=4)
    found = execute(block("001/filters"), **names | {"config": made})
    kept = [group for batch in found["batches"] for group in batch.kept]
    assert found["manager"].config.over_sampling_factor == 1.5
    assert kept and all(any(reward for reward in group.rewards) for group in kept)


def run_rl_block(server, **more: str) -> str:
    return block(
        "001/run_rl", endpoint(server) | {"create_pytorch_backend(...)  # After factory refactor": BACKEND} | more
    )


def test_approach_1_extends_train_py(sglang, tmp_path):
    """`main` routes to `run_rl`, which trains on the file's tasks with the server's replies, and syncs it."""
    config, before = config_of(tmp_path), sglang.statistics()["loads"]
    names = names_of(config, tmp_path) | {"use_fsdp": False, "logger": logging.getLogger("note")}
    program = execute(run_rl_block(sglang, **{"        metrics_logger=None,": "        metrics_logger=kept,"}), **names)
    lines = []
    program["kept"] = SimpleNamespace(log=lambda metrics, step: lines.append(dict(metrics)), close=lambda: None)
    trio.run(program["main"])
    assert len(lines) == 2 and all(0 <= line["reward/mean"] <= 1 for line in lines)
    assert sglang.statistics()["loads"] > before


def test_approach_1_runs_both_phases(tmp_path, sglang):
    """The mode sft+rl runs SFT, and then RL from its checkpoint."""
    config, order = config_of(tmp_path, "sft+rl"), []
    names = names_of(config, tmp_path) | {"use_fsdp": False, "logger": logging.getLogger("note")}
    program = execute(run_rl_block(sglang), **names)

    async def run_sft(*_):
        order.append(("sft", config.output.source_checkpoint))

    async def run_rl(*_):
        order.append(("rl", config.output.source_checkpoint))

    program |= {"run_sft": run_sft, "run_rl": run_rl}
    trio.run(program["main"])
    assert order == [("sft", None), ("rl", str(tmp_path / "checkpoints" / "sft_final"))]


PARTS = {
    "create_pytorch_backend(...)": BACKEND,
    "AsyncRolloutManager(...)": (
        "AsyncRolloutManager(rollout_config=RolloutConfig(endpoint=given_endpoint, environment=CalculatorEnvironment(),"
        " batch_size=2, n_samples_per_prompt=2))"
    ),
}


def test_approach_2_is_a_script_of_its_own(sglang, tmp_path):
    """With a reward function of the user's own."""
    from rollouts.training import RLTrainingConfig

    config, seen = config_of(tmp_path), []
    names = names_of(config, tmp_path)
    reward_fn = execute(block("001/reward_fn"), **names, is_correct=lambda response, answer: str(answer) in response)[
        "reward_fn"
    ]
    assert reward_fn(names["Sample"]("?", "it is 6", metadata={"answer": 6})) == 1.0
    assert reward_fn(names["Sample"]("?", "it is 7", metadata={"answer": 6})) == 0.0

    def my_reward_fn(sample):
        seen.append(sample.metadata["answer"])
        return reward_fn(sample)

    given = {
        "rl_samples": names["load_dataset"](config.data.rl_mixture[0]),
        "rl_config": RLTrainingConfig(num_steps=1),
        "my_reward_fn": my_reward_fn,
        "given_endpoint": names["Endpoint"](provider="sglang", api_base=sglang.url),
    }
    program = execute(block("001/train_rl", PARTS) + "    return metrics\n", **names | given)
    (metrics,) = trio.run(program["main"])
    assert sorted(seen) == [6, 6, 20, 20]
    assert metrics["step"] == 0 and "loss" in metrics and "mean_reward" in metrics


def test_the_manager_and_the_call_by_themselves(sglang, tmp_path):
    from rollouts.training import RLTrainingConfig, create_pytorch_backend

    config = config_of(tmp_path)
    names = names_of(config, tmp_path)
    manager = execute(block("001/endpoint", endpoint(sglang)), **names)["rollout_manager"]
    backend = create_pytorch_backend("tiny", lr=1e-3, num_steps=1, algorithm="grpo")
    given = {
        "backend": backend,
        "rollout_manager": manager,
        "rl_samples": names["load_dataset"](config.data.rl_mixture[0]),
        "rl_config": RLTrainingConfig(num_steps=1),
        "reward_fn": lambda sample: float(len(sample.response)),
    }
    metrics = execute(block("001/call"), **names | given)["metrics"]
    assert len(metrics) == 1 and metrics[0]["max_reward"] >= metrics[0]["min_reward"]
    backend.close()


def test_the_loop_with_samples_alone(tmp_path):
    """Offline: no engine, only samples that have rewards."""
    from rollouts.training import RLTrainingConfig, Sample, Status, create_pytorch_backend

    backend = create_pytorch_backend("tiny", lr=1e-3, num_steps=2, algorithm="grpo")
    samples = [
        Sample("?", "x", [5, 6, 7], [0, 1, 1], reward, 0, [0.0, -1.0, -1.0], status=Status.COMPLETED)
        for reward in (1.0, 0.0)
    ]
    logger = rollouts.training.JSONLLogger(tmp_path)
    given = {"backend": backend, "rl_samples": samples, "rl_config": RLTrainingConfig(num_steps=2), "logger": logger}
    metrics = execute(block("001/run_rl_training"), **given)["metrics"]
    backend.close()
    logger.close()
    assert [line["mean_reward"] for line in metrics] == [0.5, 0.5]
    assert metrics[0]["grad_norm"] > 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
