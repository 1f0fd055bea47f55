"""What a dry run says of memory, for models here and elsewhere, backends of the core and of strangers."""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

import pytest
from rollouts_fsdp.backend import create_fsdp_backend

from rollouts.errors import ConfigError, ModelError
from rollouts.models.loading import TINY_PATH
from rollouts.runs.components import Chosen
from rollouts.runs.dry_run import amount_lines, describe, memory_lines
from rollouts.types import Task

sys.path.insert(0, str(Path(__file__).parent))
from composing import plan


def table(**settings):
    """(total, parts) in GiB."""
    return read(memory_lines(plan(**settings)))


def read(lines):
    total = float(re.fullmatch(r"memory per rank.* \(an estimate\): ([0-9.]+) GiB", lines[1])[1])
    rows = [re.fullmatch(r"  (\S.*?) +([0-9.]+) GiB", line) for line in lines[2:]]
    return total, {row[1]: float(row[2]) for row in rows}


def save_config(folder, **changes):
    """The configuration of a model of billions; no weights."""
    settings = json.loads((TINY_PATH / "config.json").read_text())
    settings |= {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": ["full_attention"] * 36,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return str(folder)


def sharded(given, **settings):
    """The plan with the FSDP backend of the core."""
    chosen = given.one("training")
    ref = chosen.ref.__class__("training", "fsdp", "somewhere:fsdp", "rollouts-rl", "0")
    own = {"processes": 0, "replicas": 1, "device": "cpu"}
    return given._replace(
        chosen=given.chosen | {"training": [Chosen("fsdp", create_fsdp_backend, chosen.settings | own | settings, ref)]}
    )


def test_a_dry_run_shows_the_table():
    found = plan()
    lines = memory_lines(found)
    assert lines[0] == "parameters: 0.36 M, all of them trained"
    assert "\n".join(lines) in describe(found).text
    total, parts = read(lines)
    assert "activations of 16384 tokens" in parts and "keys and values, at most" in parts
    assert 0.95 * total < sum(parts.values()) <= 1.001 * total
    assert all(number > 0.01 * total for number in parts.values())


def test_a_large_model_in_a_folder_needs_no_memory(tmp_path):
    folder = save_config(tmp_path / "large")
    plan_of_it = plan(model=folder, tokens_per_microbatch=4096)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = memory_lines(plan_of_it)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "kB: its weights are 16 times as many"
    assert lines[0] == "parameters: 4.02 B, all of them trained"
    total, parts = read(lines)
    assert parts["weights"] == parts["gradients"] == pytest.approx(4.0224 * 4e9 / 2**30, abs=0.02)
    assert parts["moments of adamw"] == pytest.approx(2 * parts["weights"], abs=0.02)
    assert parts["keys and values, at most"] == 8.0  # 4 of `cache_gib` decoded, 4 waiting
    assert total > 60


def test_adapters(tmp_path):
    folder = save_config(tmp_path / "large")
    lines = memory_lines(plan(model=folder, lora_rank=16, training={"name": "torch", "dtype": "bfloat16"}))
    assert re.fullmatch(r"parameters: 4\.06 B, 33\.03 M of them trained", lines[0])
    _, parts = read(lines)
    assert parts["weights"] == pytest.approx(4.0224 * 2e9 / 2**30 + 33.03e6 * (4 + 2) / 2**30, abs=0.02)
    assert "moments of adamw" not in parts  # less than a hundredth


def test_settings_that_change_it(tmp_path):
    folder = save_config(tmp_path / "large")
    _, plain = table(model=folder)
    _, saving = table(model=folder, training={"name": "torch", "gradient_checkpointing": True})
    name = "activations of 16384 tokens"
    assert saving[name] < 0.2 * plain[name]
    _, fewer = table(model=folder, tokens_per_microbatch=4096)
    assert fewer["activations of 4096 tokens"] == pytest.approx(plain[name] / 4, rel=0.01)
    few = {"model": folder, "tokens_per_microbatch": 256}
    _, small_cache = table(**few, inference={"name": "hf", "cache_gib": 1.0})
    assert small_cache["keys and values, at most"] == 2.0
    _, short = table(
        **few, inference={"name": "hf", "context_tokens": 1024, "rows_max": 4}, eval_tasks=0, samples_per_prompt=1
    )
    assert short["keys and values, at most"] == pytest.approx((4 + 8) * 1024 * 2 * 36 * 1024 * 4 / 2**30, abs=0.01)


def test_models_beside_the_policy():
    alone, _ = table(kl="none")
    followed, parts = table(kl="rk3_loss")
    assert followed >= alone
    critic, _ = table(loss="ppo", critic="tiny")
    assert critic > table(loss="ppo", critic="head")[0]
    assert "critic" not in str(parts)


def test_large_models_beside_the_policy(tmp_path):
    folder = save_config(tmp_path / "large")
    _, parts = table(model=folder, kl="rk3_loss", loss="ppo", critic=folder)
    assert parts["reference policy"] == parts["weights"]
    assert parts["critic (4.02 B)"] == pytest.approx(4 * parts["weights"], abs=0.02)
    _, parts = table(loss="opd", teacher=folder)
    assert parts["teacher (4.02 B)"] == pytest.approx(4.0224 * 4e9 / 2**30, abs=0.02)


def test_ranks_share(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = plan(model=save_config(tmp_path / "large"))
    lines = memory_lines(sharded(found, processes=8, dtype="bfloat16"))
    assert lines[1].startswith("memory per rank of 8 (an estimate): ")
    _, parts = read(lines)
    assert parts["weights"] == pytest.approx(4.0224 * 4e9 / 8 / 2**30, abs=0.02)
    assert parts["the engine's copy"] == pytest.approx(4.0224 * 2e9 / 2**30, abs=0.02)
    assert "layers put together" in parts
    _, replicated = read(memory_lines(sharded(found, processes=8, replicas=2)))
    assert replicated["weights"] == pytest.approx(2 * parts["weights"], abs=0.02)
    assert memory_lines(sharded(found))[1].startswith("memory per rank (an estimate)")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert memory_lines(sharded(found))[1].startswith("memory per rank of 4 ")


def test_ranks_share_a_base_that_is_only_read(tmp_path):
    found = plan(model=save_config(tmp_path / "large"), lora_rank=16, tokens_per_microbatch=256)
    _, parts = read(memory_lines(sharded(found, processes=4, dtype="bfloat16")))
    assert parts["weights"] == pytest.approx(4.0224 * 2e9 / 4 / 2**30, abs=0.05)


def test_a_model_that_is_not_here():
    for settings in ({"model": "nobody/has-this"}, {"loss": "opd", "teacher": "nobody/has-this"}):
        (line,) = memory_lines(plan(**settings))
        assert line.startswith("memory: cannot be estimated: the configuration of nobody/has-this is not on this")
        assert "hf download nobody/has-this config.json" in line
    assert "cannot be estimated" in describe(plan(loss="opd", teacher="nobody/has-this")).text


def test_a_model_that_cannot_be_built_without_weights(tmp_path, monkeypatch):
    from rollouts.runs import dry_run

    def refuse(*_, **__):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors\nand more")

    monkeypatch.setattr(dry_run, "model_size", refuse)
    (line,) = memory_lines(plan())
    assert line.endswith("tiny cannot be built without weights: Tensor.item() cannot be called on meta tensors")


def test_a_backend_of_a_stranger():
    found = plan()
    chosen = found.one("training")
    theirs = chosen._replace(component=lambda model: None)
    (line,) = memory_lines(found._replace(chosen=found.chosen | {"training": [theirs]}))
    assert line.startswith("memory: not estimated: ") and "torch" in line


def test_what_the_run_would_refuse(tmp_path):
    with pytest.raises(ModelError, match="unknown dtype 'int3'"):
        memory_lines(plan(training={"name": "torch", "dtype": "int3"}))
    with pytest.raises(ConfigError, match="match no layer"):
        memory_lines(plan(lora_rank=4, training={"name": "torch", "lora_targets": "nothing"}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="could not be loaded"):
        memory_lines(plan(model=str(tmp_path / "broken")))
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match="is no causal language model"):
        memory_lines(plan(model=str(tmp_path / "t5")))


def test_every_part_is_documented():
    from rollouts.models.estimates import ModelSize, estimate_memory

    page = (Path(__file__).parents[2] / "docs" / "memory-and-speed.md").read_text(encoding="utf-8")
    table = page.partition("| part | bytes |")[2].partition("\n\n")[0]
    parts = estimate_memory(ModelSize(1, 1, 1, 1, 1, 1, 1, 1, True), tokens=1)
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(parts)


def test_the_documented_table_is_what_is_said(tmp_path):
    """The page shows what a dry run says of a model of this shape."""
    page = (Path(__file__).parents[2] / "docs" / "memory-and-speed.md").read_text(encoding="utf-8")
    folder = save_config(
        tmp_path / "qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        layer_types=["full_attention"] * 28,
        max_position_embeddings=40960,
    )
    lines = memory_lines(plan(model=folder, training={"name": "torch", "gradient_checkpointing": True}))
    assert "\n".join(f"    {line}" for line in lines) in page


# --- how much is played and written -----------------------------------------------------------------------------------


def amounts(tasks=512, chosen=0, **settings):
    found = plan(**settings)
    return amount_lines(found, [Task("2 + 2?")] * tasks, chosen)


def test_evaluations_and_trajectories_are_counted(tmp_path):
    (evaluations, disk) = amounts(steps=100, prompts_per_step=8, samples_per_prompt=8, max_tokens=1000, eval_every=40)
    assert evaluations == (
        "evaluations: 4 (before step 1, 2 times between steps, and at the end) of 512 tasks, sampled and greedy: "
        "1,024 episodes each, at most 1,024,000 tokens"
    )
    assert disk.startswith("trajectories: 10,496 episodes, at most about 0.2 GiB on the disk")
    _, more, less = amounts(steps=100, keep_trajectories=5, prompts_per_step=1, samples_per_prompt=8)
    assert "play more episodes than the training (800); to play fewer, type --eval-tasks 64" in more
    assert less.startswith("trajectories: 2,088 episodes, ")
    assert not amounts(steps=0, tasks=0)
