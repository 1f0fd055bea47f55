"""The settings files in configs/ compose on a machine without their models, and say the memory that they need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rollouts.cli import main
from rollouts.config.files import load_file
from rollouts.config.resolving import resolve
from rollouts.runs import dry_run
from rollouts.runs.plan import make_plan

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(path.name for path in CONFIGS.iterdir() if path.suffix in (".toml", ".py"))
OF_REAL_MODELS = [name for name in PRESETS if "tiny" not in name and "debug" not in name]
ROWS = {
    "math.jsonl": {"prompt": "What is 12 * 7?", "answer": "84"},
    "conversations.jsonl": {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]},
    "openwebtext.jsonl": {"text": "The town lies on the river, between two hills. " * 20},
}


def shape(kind: str, hidden: int, layers: int, heads: int, kv: int, size: int, ffn: int, vocabulary: int, tied: bool):
    """A model's configuration on the hub, as far as its size depends on it."""
    return lambda: AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=size,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
        pad_token_id=None,
    )


SHAPES = {
    "Qwen/Qwen3-0.6B": shape("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
    "Qwen/Qwen3-1.7B": shape("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True),
    "Qwen/Qwen3-4B": shape("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True),
    "Qwen/Qwen3-8B": shape("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
    "meta-llama/Llama-3.2-1B-Instruct": shape("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
    "meta-llama/Llama-3.2-3B-Instruct": shape("llama", 3072, 28, 24, 8, 128, 8192, 128256, True),
    "HuggingFaceTB/SmolLM2-135M-Instruct": shape("llama", 576, 30, 9, 3, 64, 1536, 49152, True),
    "HuggingFaceTB/SmolLM2-360M-Instruct": shape("llama", 960, 32, 15, 5, 64, 2560, 49152, True),
    "HuggingFaceTB/SmolLM3-3B": shape("smollm3", 2048, 36, 16, 4, 128, 11008, 128256, True),
}


@pytest.fixture
def files(tmp_path, monkeypatch) -> None:
    """A folder with the rows that the presets read, and with `configs`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(CONFIGS)
    for name, row in ROWS.items():
        lines = [json.dumps(row), *(json.dumps(json.loads(json.dumps(row).replace("2", str(n)))) for n in range(3, 99))]
        (tmp_path / name).write_text("\n".join(lines))


def resolved(name: str) -> Any:
    return resolve(*load_file(f"configs/{name}"))


FILES_FOR = {
    "sft_qwen.py": ["--data", "conversations.jsonl"],
    "rl_math.py": ["--data", "math.jsonl"],
    "sft_openwebtext.py": ["--env.data", "openwebtext.jsonl"],
}
"""These read datasets of the hub, which tests do without."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.nightly] if each in OF_REAL_MODELS else []) for each in PRESETS]
)
def test_a_preset_composes(name, files, capsys):
    """With the rehearsal: every tool, reward and function of its algorithm is called."""
    command = "sft" if name.startswith("sft") or name.endswith("_sft.toml") else "run"
    assert main([command, f"configs/{name}", *FILES_FOR.get(name, ()), "--dry-run"]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "\nok: " in printed
    if name in OF_REAL_MODELS:
        model = re.search(r'^model = "(.+)"$', (CONFIGS / name).read_text(), re.MULTILINE)[1]
        assert f"the configuration of {model} is not on this machine" in printed


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.nightly] if index % 4 else []) for index, each in enumerate(OF_REAL_MODELS)],
)
def test_a_preset_says_its_memory(name, files, monkeypatch):
    """The number in the comment is the estimate for the model's real shape."""
    monkeypatch.setattr(dry_run, "load_config", lambda model, **_: SHAPES[model]())
    parameters, total, *_ = dry_run.memory_lines(make_plan(resolved(name)))
    estimate = re.search(r"memory per rank( of \d+)? \(an estimate\): ([\d.]+) GiB", total)
    text = " ".join((CONFIGS / name).read_text().replace("\n#", "\n").split())
    ranks = " on each rank" if estimate[1] else ""
    assert f"Memory of training, estimated: {estimate[2]} GiB{ranks}." in text, parameters
    assert "What was measured on a GPU: docs/benchmarks.md." in text
    assert "Hardware: " in text and f"configs/{name}" in text


@pytest.mark.parametrize("data", [name for name in ROWS])
def test_data_that_is_not_there_is_one_error(data, files, capsys):
    Path(data).unlink()
    name = {"math": "rl_math", "conversations": "sft_qwen", "openwebtext": "sft_openwebtext"}[
        data.removesuffix(".jsonl")
    ]
    given = [f"configs/{name}.py", *FILES_FOR[f"{name}.py"], "--dry-run"]
    assert main(["run" if name == "rl_math" else "sft", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and data in error and "Traceback" not in error


def test_the_page_lists_every_preset_with_its_memory():
    page = (CONFIGS.parent / "docs" / "recipes.md").read_text()
    listed = dict(re.findall(r"^\| `([\w.]+)` \|.* ([\d.]+) \|$", page, re.MULTILINE))
    said = {name: re.search(r"estimated: ([\d.]+) GiB", (CONFIGS / name).read_text())[1] for name in OF_REAL_MODELS}
    assert listed == said
    assert all(f"| `{name}` |" in page for name in PRESETS)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("sft_qwen.py", {"messages": ROWS["conversations.jsonl"]["messages"], "category": "chat"}),
        ("rl_math.py", {"question": "What is 2 + 3?", "answer": "2 + 3 is 5.\n#### 5"}),
        ("sft_openwebtext.py", ROWS["openwebtext.jsonl"]),
    ],
)
def test_a_preset_starts_with_the_rows_of_its_dataset(name, row, files, monkeypatch, capsys):
    """Its own data: a dataset of the hub, of which this row has the columns."""
    asked = []

    def from_hub(source, config="", **options):
        asked.append(source)
        return [json.loads(json.dumps(row).replace("2", str(number))) for number in range(99)]

    monkeypatch.setattr("rollouts.data.loaders.load_hub", from_hub)
    command = "run" if name == "rl_math.py" else "sft"
    assert main([command, f"configs/{name}", "--dry-run"]) == 0, capsys.readouterr().err
    # A dry run asks no hub for the tokenizer of Qwen, so it reads no conversation.
    assert set(asked) == {"rl_math.py": {"openai/gsm8k"}, "sft_openwebtext.py": {"Skylion007/openwebtext"}}.get(
        name, set()
    )
    assert resolved(name).settings.data in ("", "HuggingFaceH4/no_robots", "openai/gsm8k")
