"""An exported model says how it was trained, and is uploaded whole or kept; the hub here is on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from runs.fake_hub import TOKEN, FakeHub

from rollouts.errors import ConfigError, RunError
from rollouts.runs import publish
from rollouts.runs.publish import model_card, portable, write_usage

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub
EVALUATION = {"reward_mean": 0.25, "greedy_mean": None, "parts": {"correct": 0.25}, "tasks": 8, "judged": 8}
PUSH = """
import sys
from pathlib import Path
from rollouts.runs.publish import check_push, push
check_push(sys.argv[2])
print(push(Path(sys.argv[1]), sys.argv[2], is_public="--public" in sys.argv))
"""


@pytest.fixture
def hub():
    with FakeHub() as made:
        yield made


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    return folder


def push(folder, name, hub_url, tmp_path, *flags):
    """In a new process. What huggingface_hub reads when it is imported is not this machine's own."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_", "HUGGING"))}
    given = {"HF_ENDPOINT": hub_url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    command = [sys.executable, "-c", PUSH, str(folder), name, *flags]
    env = own | given | {"HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_folder_is_uploaded_whole_to_a_private_repository(hub, model, tmp_path):
    done = push(model, "ada/first", hub.url, tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{hub.url}/ada/first\n"), done.stderr
    (made,) = hub.repositories.values()
    assert made["private"]
    assert made["files"] == {file.name: file.read_bytes() for file in model.iterdir()}
    (model / "config.json").write_text('{"a": 1}')
    again = push(model, "ada/first", hub.url, tmp_path, "--public")  # it exists: its visibility stays
    assert again.returncode == 0, again.stderr
    assert made["private"]
    assert made["files"]["config.json"] == b'{"a": 1}'


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    """What huggingface_hub has read when it was imported, in this process: the hub, and the right token."""
    from huggingface_hub import close_session, constants

    for name, value in {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_TOKEN_PATH": str(tmp_path / "none"),
                        "HF_HUB_DISABLE_XET": True}.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield constants
    close_session()


def test_a_new_repository_is_public_if_you_ask_for_it(here, hub, model):
    publish.push(model, "open", is_public=True)
    assert not hub.repositories["ada/open"]["private"]


@pytest.mark.parametrize(
    ("name", "token", "offline", "words"),
    [
        ("a/b/c", TOKEN, False, "type the name as USER/MODEL"),
        ("ada/first", "", False, "type: hf auth login, or export HF_TOKEN="),
        ("ada/first", TOKEN, True, "type: unset HF_HUB_OFFLINE, or leave --push out"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(here, hub, monkeypatch, name, token, offline, words):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(here, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ConfigError, match=words):
        publish.check_push(name)
    assert hub.repositories == {}


@pytest.mark.parametrize(
    ("fails", "status", "token", "words"),
    [
        ("", 0, "hf_wrong", r"refuses the token \(status 401"),
        ("/api/repos/create", 403, TOKEN, r"refuses the token \(status 403"),
        ("/commit/", 400, TOKEN, "answered with status 400"),
    ],
)
def test_a_failed_upload_says_why_and_how_to_retry(here, hub, model, monkeypatch, fails, status, token, words):
    hub.fails, hub.status = fails, status
    monkeypatch.setenv("HF_TOKEN", token)
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    with pytest.raises(RunError, match=words) as raised:
        publish.push(model, "ada/first")
    assert f"type: hf upload ada/first '{model}' . --private" in str(raised.value)
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


def test_a_hub_that_is_not_there(here, model, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(here, "ENDPOINT", url)
    with pytest.raises(RunError, match=f"{url} cannot be reached"):
        publish.push(model, "ada/first")


# --- the model card ---------------------------------------------------------------------------------------------------


def run_folder(path: Path, config: str, step: int = 10, **summary) -> Path:
    """A run's folder as far as a model card reads it; returns its checkpoint."""
    checkpoint = path / "checkpoints" / f"step_{step:06d}"
    checkpoint.mkdir(parents=True)
    (path / "config.toml").write_text(config)
    (path / "summary.json").write_text(json.dumps({"checkpoint": f"checkpoints/step_{step:06d}"} | summary))
    (path / "manifest.json").write_text('{"rollouts": "0.1.0", "python": "3.12.1", "distributions": {"torch": "2.9"}}')
    return checkpoint


def test_a_card_says_how_the_model_was_trained(tmp_path):
    after = EVALUATION | {"reward_mean": 0.75, "greedy_mean": 1.0, "parts": {"correct": 0.75}}
    config = 'model = "Qwen/Qwen3-0.6B"\nseed = 3\nenv = "calculator"\nloss = "dapo"\n'
    checkpoint = run_folder(tmp_path / "run", config, evaluation={"before": EVALUATION, "after": after})
    card = model_card(checkpoint, "first")
    assert "begins from |" not in card and "LoRA" not in card
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "base_model: Qwen/Qwen3-0.6B\n" in card
    for line in (
        "# first",
        "| base model | Qwen/Qwen3-0.6B |",
        "| environment | calculator |",
        "| trained by | reinforcement (rl) |",
        "| loss | dapo |",
        "| steps | 10 |",
        "| seed | 3 |",
        "On 8 held-out tasks. Before: the model that the run begins from.",
        "| reward, sampled | 0.250 | 0.750 |",
        "| reward, greedy | – | 1.000 |",
        "| correct | 0.250 | 0.750 |",
        "| torch | 2.9 |",
    ):
        assert line in card.splitlines(), card


def test_the_rewards_of_the_end_are_not_those_of_an_earlier_checkpoint(tmp_path):
    run_folder(tmp_path / "run", 'env = "calculator"\n', evaluation={"before": EVALUATION, "after": EVALUATION})
    early = tmp_path / "run" / "checkpoints" / "step_000004"
    early.mkdir()
    card = model_card(early, "early")
    assert "| steps | 4 |" in card
    assert "Rewards" not in card


def test_the_base_model_of_a_run_after_a_run_is_the_first_one(tmp_path):
    first = run_folder(tmp_path / "sft", 'model = "tiny"\nenv = "calculator"\nmode = "sft"\n')
    second = run_folder(tmp_path / "rl", f'model = "{first}"\nenv = "calculator"\nlora_rank = 8\n')
    card = model_card(second, "both")
    assert "| base model | tiny (comes with rollouts) |" in card
    assert "| begins from | sft/checkpoints/step_000010, which begins from tiny (comes with rollouts) |" in card
    assert "| LoRA rank | 8 |" in card
    assert "base_model:" not in card  # no name on the hub


@pytest.mark.parametrize("eval_tasks", [8, 4])
def test_the_card_of_a_run_of_two_phases_has_three_columns_if_the_tasks_are_the_same(tmp_path, eval_tasks):
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "config.toml").write_text('mode = "sft+rl"\nenv = "calculator"\n')
    start, middle, end = (EVALUATION | {"reward_mean": mean, "parts": {"right": mean}} for mean in (0.006, 1.0, 0.975))
    config = f'env = "calculator"\nmode = "sft"\neval_tasks = {eval_tasks}\n'
    sft = run_folder(tmp_path / "both" / "sft", config, steps=60, evaluation={"before": start, "after": middle})
    config = f'env = "calculator"\neval_tasks = 8\nmodel = "{sft}"\n'
    rl = run_folder(tmp_path / "both" / "rl", config, evaluation={"before": middle, "after": end})
    lines = model_card(rl, "both").splitlines()
    assert "| trained by | demonstrations, then reinforcement (sft+rl) |" in lines
    assert "| supervised steps | 60 |" in lines and "| steps | 10 |" in lines
    assert ("| | before | after SFT | after RL |" in lines) is (eval_tasks == 8)
    own = "0.006 | 1.000 | 0.975" if eval_tasks == 8 else "1.000 | 0.975"
    assert f"| reward, sampled | {own} |" in lines and f"| right | {own} |" in lines
    assert "| trained by | demonstrations (sft) |" in model_card(sft, "first").splitlines()


def test_the_card_of_an_adapter_names_the_base_model_that_it_needs(tmp_path):
    checkpoint = run_folder(tmp_path / "run", 'env = "calculator"\nlora_rank = 2\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text('{"base_model_name_or_path": "/models/base"}')
    card = model_card(checkpoint, "first", tmp_path / "out")
    assert "This folder has only the adapter. It needs the base model `/models/base`." in card.splitlines()


def test_a_card_without_a_run_or_with_settings_that_cannot_be_read(tmp_path):
    assert model_card(tmp_path, "plain") == ""
    checkpoint = run_folder(tmp_path / "run", "no_such_setting = 1\n")
    card = model_card(checkpoint, "odd")
    assert "| settings | they cannot be read (" in card
    assert "| rollouts | 0.1.0 |" in card


# --- the settings of an exported model --------------------------------------------------------------------------------


def test_an_exported_model_has_no_paths_of_this_machine(tmp_path):
    model = run_folder(tmp_path / "first", 'model = "org/base"\nenv = "calculator"\n')
    code = tmp_path / "mine.py"
    config = f"""
model = "{model}"
data = "{tmp_path}/rows.jsonl"
system = "/no_think"
out = "{tmp_path}/run"
lora_rank = 8
env = {{ name = "{code}:Env", table = "{tmp_path}/table.db", digits = 2, eval_data = "held.jsonl", places = ["~/a"] }}
reward = {{ r = {{ name = "./rewards/short.py:short", weight = 0.5 }}, env = {{ name = "env", weight = 1.0 }} }}
inference = {{ name = "openai", base_url = "http://10.0.0.1/v1" }}
"""
    checkpoint = run_folder(tmp_path / "run", config)
    exported = tmp_path / "exported"
    exported.mkdir()
    write_usage(checkpoint, exported)
    text = (exported / "rollouts.toml").read_text()
    assert str(tmp_path) not in text
    assert tomllib.loads(text) == {
        "model": "org/base",
        "system": "/no_think",
        "env": {"name": "./mine.py:Env", "digits": 2, "places": []},
        "reward": {"r": {"name": "./rewards/short.py:short", "weight": 0.5}, "env": {"name": "env", "weight": 1.0}},
    }
    assert portable(tomllib.loads(config))[1] == ["./mine.py", "./rewards/short.py"]


def test_what_an_exported_model_does_not_say_is_not_on_its_card(tmp_path):
    (tmp_path / "rollouts.toml").write_text('mode = "rl"\nenv = "calculator"\n')
    card = model_card(tmp_path, "again")
    assert "| environment | calculator |" in card
    assert "base model" not in card and "| loss |" not in card


def test_the_settings_are_uploaded(here, hub, model):
    (model / "rollouts.toml").write_text('env = "calculator"\nsystem = "/no_think"\n')
    publish.push(model, "ada/first")
    (made,) = hub.repositories.values()
    assert made["files"]["rollouts.toml"] == (model / "rollouts.toml").read_bytes()
