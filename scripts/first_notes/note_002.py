"""Note 002: what exists, the config of a whole run, and its entry points."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from first_notes import rows
from first_notes.rows import Table, awaited, samples

ROWS = Table()
ROOT = Path(__file__).parents[2]


@ROWS("training/types.py")
def _() -> None:
    from rollouts.training import types

    wanted = "Sample Status RolloutBatch RolloutConfig SFTTrainingConfig RLTrainingConfig TrainingConfig TrainFuture"
    assert [name for name in [*wanted.split(), "InferenceEngine"] if not hasattr(types, name)] == []


@ROWS("dataset_loaders.py: HF datasets")
def _() -> None:
    """The library `datasets` reads a Parquet file, and a folder of them as it reads a dataset of the hub."""
    from rollouts.training import load_dataset

    path = Path(rows.parquet_file({"prompt": "2 + 2?", "answer": 4}, 3))
    for given in (path, path.parent):
        found = load_dataset({"dataset_id": str(given), "split": "train", "num_samples": 3})
        assert [sample.metadata["answer"] for sample in found] == [4] * 3


@ROWS("sft.py sample prep")
def _() -> None:
    from rollouts.training import compute_loss_mask, prepare_sft_batch, tokenize_conversation

    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    tokens, spans = tokenize_conversation(turns, rows.tokenizer())
    assert sum(compute_loss_mask(tokens, spans)) > 0
    assert prepare_sft_batch(samples(1.0, 0.0))["labels"].shape == (2, 3)


@ROWS("rollout_generation / async_rollout_manager / weight_sync / sft_loop / backends / data_buffer / rollout_manager")
def _() -> None:
    import rollouts.training

    homes = {
        "rollout_generation": "generate_rollout_batches",
        "async_rollout_manager": "AsyncRolloutManager",
        "weight_sync": "sync_weights_to_engines",
        "sft_loop": "run_sft_training",
        "backends": "PyTorchTrainingBackend",
        "data_buffer": "DataBuffer",
        "rollout_manager": "RolloutManager",
    }
    for module, name in homes.items():
        found = getattr(importlib.import_module(f"rollouts.training.{module}"), name)
        assert found is getattr(rollouts.training, name), f"{module}.{name}"


@ROWS("rl_loop.py", "rl_losses.py GRPO+PPO")
def _() -> None:
    from rollouts.training.rl_loop import run_rl_training
    from rollouts.training.rl_losses import grpo_loss, ppo_loss

    import rollouts.training

    backend = rows.new_backend(grpo_loss)
    config = rollouts.training.RLTrainingConfig(num_steps=1, baseline=0.5)
    (step,) = awaited(run_rl_training, backend=backend, samples=samples(1.0, 0.0), config=config)
    assert step["mean_reward"] == 0.0 or step["mean_reward"] == 0.5
    assert callable(ppo_loss)


PUBLIC = """
    Sample RLSample Status RolloutBatch RolloutConfig SFTTrainingConfig RLTrainingConfig TrainFuture
    ImmediateTrainFuture DataBuffer AsyncRolloutManager RolloutManager generate_rollout_batches apply_sample_transforms
    convert_to_batch extract_sample_fields compute_response_lengths build_batch_metadata run_sft_training
    run_rl_training compute_reward prepare_grpo_batch compute_advantages collate_batch prepare_sft_batch
    tokenize_conversation compute_loss_mask load_sft_dataset grpo_loss compute_grpo_loss ppo_loss TrainingBackend
    PyTorchTrainingBackend FSDPTrainingBackend create_pytorch_backend create_fsdp_backend load_hf_model
    create_adamw_optimizer create_cross_entropy_loss create_warmup_cosine_scheduler InferenceEngine SGLangEngine
    VLLMEngine WeightSyncManager sync_weights_to_engines MetricsLogger JSONLLogger check_reward_nonzero_std
    check_any_success check_min_reward check_response_diversity check_reasonable_length check_quality_and_diversity
    ModelConfig DataConfig TrainingConfig DeploymentConfig Config
""".split()


@ROWS("training/__init__.py public API")
def _() -> None:
    import rollouts.training

    assert [name for name in PUBLIC if name not in rollouts.training.__all__] == []
    assert all(getattr(rollouts.training, name) is not None for name in PUBLIC)
    assert callable(rollouts.Endpoint) and callable(rollouts.CalculatorEnvironment)


@ROWS("metrics system")
def _() -> None:
    from rollouts.training.metrics import JSONLLogger, MetricsLogger

    folder = rows.new_folder()
    logger: MetricsLogger = JSONLLogger(folder)
    logger.log({"loss": 1.0}, 0)
    logger.close()
    assert rows.metrics_of(folder) == [{"step": 0, "loss": 1.0}]


@ROWS("examples/run_sft.py", "examples/run_rl.py", "examples/training_with_metrics.py", "10 more examples (13 in all)")
def _() -> None:
    found = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert {"run_sft.py", "run_rl.py", "training_with_metrics.py"} <= set(found) and len(found) >= 13
    for name, text in found.items():
        compile(text, name, "exec")


@ROWS("rollouts/deploy.py: SGLang server deployment", "  launch SGLang if RL", "SGLang automatic launch for RL")
def _() -> None:
    from rollouts_servers.sglang import serve_sglang

    assert "sglang.launch_server" in str(serve_sglang.__module__) or callable(serve_sglang)
    shown = rows.command("run", "--env", "calculator", "--inference", "sglang", "--steps", "1", "--dry-run")
    assert "sglang" in shown


@ROWS("run_eval.py evaluation pipeline")
def _() -> None:
    out = rows.new_folder() / "eval"
    small = ("--eval-tasks", "4", "--max-tokens", "48", "--out", str(out))
    assert "reward" in rows.command("eval", "--env", "calculator", "--model", "tiny", *small)
    assert "reward_mean" in (out / "summary.json").read_text()


# --- the config ---


def config() -> object:
    from rollouts.training import Config, DataConfig, DeploymentConfig, ModelConfig, TrainingConfig

    return Config(
        output={"mode": "sft"},
        model=ModelConfig(model_id="tiny", dtype="float32", device="cpu"),
        data=DataConfig(dataset_id=rows.conversations_file(), split="train", num_samples=2),
        training=TrainingConfig(num_steps=1, batch_size=2, lr=1e-3),
        deployment=DeploymentConfig(sglang_port=30000),
    )


@ROWS("ModelConfig", "DataConfig", "TrainingConfig", "DeploymentConfig", "Config", "Config.save / load")
def _() -> None:
    from rollouts.training import Config, DeploymentConfig

    made, path = config(), rows.new_folder() / "config.json"
    made.save(path)
    assert Config.load(path) == made and json.loads(path.read_text())["deployment"]["sglang_port"] == 30000
    assert DeploymentConfig(gpu_ranks=[0, 1], gpu_type="H100", sglang_port=30000).gpu_ranks == [0, 1]


@ROWS("validation in __post_init__")
def _() -> None:
    from rollouts.training import Config, TrainingConfig

    with rows.refused("num_steps"):
        TrainingConfig(num_steps=-1)
    with rows.refused("mode"):
        Config(output={"mode": "slf"})


def loads(name: str, mode: str) -> None:
    """The file's settings are valid, and compose with rows in place of the hub."""
    from rollouts.config.files import load_file
    from rollouts.config.resolving import resolve

    tree, _ = load_file(ROOT / "configs" / f"{name}.py")
    assert resolve(tree).settings.model == tree["model"] != "tiny"
    assert resolve(tree).settings.mode == mode and resolve(tree).settings.steps == tree["steps"] > 0
    if mode == "rl":
        own = rows.write_rows(*({"prompt": f"{number} + 2?", "answer": str(number + 2)} for number in range(99)))
        assert "\nok: " in rows.command("run", str(ROOT / "configs" / f"{name}.py"), "--data", own, "--dry-run")


@ROWS("configs/sft_qwen.py")
def _() -> None:
    loads("sft_qwen", "sft")


@ROWS("configs/rl_math.py")
def _() -> None:
    loads("rl_math", "rl")


@ROWS("configs/sft_openwebtext.py")
def _() -> None:
    loads("sft_openwebtext", "sft")


@ROWS("example configs folder", "model presets (Qwen, Llama …)")
def _() -> None:
    found = [path for suffix in ("toml", "py") for path in (ROOT / "configs").rglob(f"*.{suffix}")]
    text = "".join(path.read_text() for path in found).lower()
    names = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "llama-3.2-1b", "llama-3.2-3b", "smollm")
    assert len(found) >= 10 and [name for name in names if name not in text] == []


@ROWS("config from a Python file (load_config_from_file)")
def _() -> None:
    path = rows.new_folder() / "run.py"
    path.write_text("config = {'env': 'calculator', 'steps': 3}\n")
    assert "steps = 3" in rows.command("run", str(path), "--dry-run").replace("  ", " ")


@ROWS("GPUConfig.get_cuda_visible_devices")
def _() -> None:
    from rollouts.training import GPUConfig

    assert GPUConfig(gpu_ranks=[0, 2], gpu_type="H100").get_cuda_visible_devices() == "0,2"


ROWS.later(
    "starting a training on another machine",
    "deploy_training(config, remote)",
    "  GPU availability check",
    "  environment bootstrap (venv, dependencies)",
    "  sync results back",
    "  local deployment with tmux",
    "  broker/bifrost provisioning, cleanup",
)


@ROWS("rollouts/__main__.py", "mode routing from the config")
def _() -> None:
    path = rows.new_folder() / "config.json"
    config().save(path)
    out = path.parent / "run"
    rows.command(str(path), "--out", str(out), "--eval-tasks", "0")
    assert 'mode = "sft"' in (out / "config.toml").read_text() and len(rows.metrics_of(out)) == 1


@ROWS("reproducibility (saved config)")
def _() -> None:
    from rollouts.config.files import load_file

    tree, _ = load_file(rows.both_phases() / "config.toml")
    assert tree["seed"] == 0 and tree["mode"] == "sft+rl"


@ROWS("web UI for config creation")
def _() -> None:
    """The page of `rollouts view --new`, and the settings file that it writes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollouts", "view", "--new", "--port", "0"],
        cwd=rows.new_folder(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "BROWSER": "true", "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        found = (re.search(r"http://\S+", line) for line in process.stdout)
        address = next(match for match in found if match)[0]
        keeps_cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with keeps_cookies.open(address, timeout=60) as page:
            assert b"<html" in page.read().lower()
    finally:
        process.terminate()
        process.wait()


@ROWS("distributed training")
def _() -> None:
    assert (rows.sharded_run() / "summary.json").is_file()


@ROWS("mixed SFT/RL pipelines")
def _() -> None:
    run = rows.both_phases()
    assert rows.metrics_of(run / "sft") and rows.metrics_of(run / "rl")


@ROWS("custom reward model integration", needs="rollouts-reward-model")
def _() -> None:
    out, own = rows.new_folder() / "run", ("--reward.reward_model.model", rows.reward_model_folder())
    rewards = ("--reward", "env:1", "--reward", "reward_model:0.5", *own)
    small = ("--steps", "1", "--eval-tasks", "0", *rows.SMALL)
    rows.command("run", "--env", "calculator", *rewards, *small, "--out", str(out))
    assert "reward_part/reward_model" in rows.metrics_of(out)[0]


@ROWS("experiment tracking (W&B etc.)", needs="rollouts-tensorboard")
def _() -> None:
    out = rows.new_folder() / "run"
    own = ("--logger", "jsonl", "--logger", "tensorboard", "--steps", "1", "--eval-tasks", "0", *rows.SMALL)
    rows.command("run", "--env", "calculator", *own, "--out", str(out))
    assert list(out.rglob("events.out.tfevents*"))


@ROWS("SFT on any dataset (dataset_id, split, num_samples)")
def _() -> None:
    made = config()
    from rollouts.training import SFTTrainingConfig, create_pytorch_backend, load_sft_dataset, run_sft_training

    made.data.num_samples = 1
    assert len(load_sft_dataset(made.data, rows.tokenizer())) == 1
    made.data.num_samples = None
    found = load_sft_dataset(made.data, rows.tokenizer())
    backend = create_pytorch_backend("tiny", lr=1e-3, num_steps=1)
    (step,) = awaited(run_sft_training, backend, found, SFTTrainingConfig(1, 2))
    backend.close()
    assert step["loss"] > 0


@ROWS("comprehensive documentation")
def _() -> None:
    assert len(list((ROOT / "docs").glob("*.md"))) >= 30
