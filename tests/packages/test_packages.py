"""A stranger's packages work unchanged, mixed in one command; what is wrong with one of them stops nothing else."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "sources"
SMALL = (
    "--steps",
    "2",
    "--prompts-per-step",
    "2",
    "--samples-per-prompt",
    "2",
    "--eval-tasks",
    "4",
    "--max-tokens",
    "64",
)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def documented_metrics() -> re.Pattern[str]:
    """What docs/run-folder.md names: `<part>` stands for anything."""
    page = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text()
    names = [
        name for row in re.findall(r"^\| (`\w+/.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)
    ]
    return re.compile("|".join(re.sub(r"<\w+>", ".+", re.escape(name)) for name in names))


def assert_mistake(done, *words: str) -> None:
    """Exit code 2, one message without a traceback, that says these words."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.slow
def test_a_setting_out_of_a_strangers_domain_is_refused_before_a_model_loads(rollouts, acme):
    done = rollouts("run", "--env", "calculator", "--loss", "acme_loss", "--loss.cap=-1", "--dry-run", path=(acme,))
    assert_mistake(done, "--loss.cap: expected a number (above 0); got -1")


def test_four_packages_in_one_command(rollouts, acme, tmp_path):
    chosen = ("--env", "acme_env", "--loss", "acme_loss", "--reward", "env:1", "--reward", "acme_rewards/brevity:-0.1")
    own = ("--env.longest", "3", "--loss.cap", "1.5", "--reward.brevity.target-tokens", "5")
    done = rollouts(
        "run", *chosen, *own, "--filter", "acme_filter", *SMALL, "--out", "run", "--logger", "jsonl", path=(acme,)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    for when in ("before", "after"):
        assert {"counted", "brevity"} <= set(summary["evaluation"][when]["parts"])
    steps = [line for line in read_metrics(folder) if "reward/mean" in line]
    assert len(steps) == 2
    for line in steps:
        mixed = line["reward_part/counted"] - 0.1 * line["reward_part/brevity"]
        assert line["reward/mean"] == pytest.approx(mixed, abs=1e-6)
    undocumented = {name for line in read_metrics(folder) for name in line if not documented_metrics().fullmatch(name)}
    assert undocumented == {"step"}
    written = tomllib.loads((folder / "config.toml").read_text())
    assert written["env"] == {"name": "acme_env", "longest": 3, "letters": "abc"}
    assert written["loss"]["cap"] == 1.5
    assert written["reward"]["brevity"] == {"name": "acme_rewards/brevity", "weight": -0.1, "target_tokens": 5}
    manifest = (folder / "manifest.json").read_text()
    assert all(name in manifest for name in ("acme-env", "acme-rewards", "acme-loss", "acme-filter"))


def test_the_list_says_whose_they_are(rollouts, acme):
    done = rollouts("plugins", "list", path=(acme,))
    assert done.returncode == 0, done.stderr
    rows = {tuple(line.split()[:4]) for line in done.stdout.splitlines()}
    assert {
        ("environments", "acme_env", "acme-env", "1.2"),
        ("rewards", "brevity", "acme-rewards", "0.3"),
        ("losses", "acme_loss", "acme-loss", "2.0"),
        ("filters", "acme_filter", "acme-filter", "0.1"),
    } <= rows


def test_all_is_well_with_them(rollouts, acme):
    done = rollouts("plugins", "doctor", path=(acme,))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_tool_a_tool_parser_and_an_optimizer_in_one_run(rollouts, pip_install, tmp_path):
    site = pip_install("acme_parts")
    parts = ("--tool", "find=acme_parts/acme_search", "--tool-parser", "acme_calls", "--optimizer", "acme_sign")
    own = ("--tool.find.top-k", "5", "--optimizer.beta", "0.5")
    shown = rollouts("run", "--env", "calculator", *parts, *own, "--dry-run", path=(site,))
    assert shown.returncode == 0, shown.stderr
    assert "call: find(query='1')" in shown.stdout and "answer: '5 notes about 1'" in shown.stdout
    few = ("--steps", "1", "--eval-tasks", "0", "--out", "run")
    done = rollouts("run", "--env", "calculator", *parts, *own, *SMALL, *few, path=(site,))
    assert done.returncode == 0, done.stdout + done.stderr
    again = rollouts("resume", "run", "--steps", "2", path=(site,))
    assert again.returncode == 0, again.stdout + again.stderr
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["tool"]["find"] == {"name": "acme_parts/acme_search", "top_k": 5}
    assert written["tool_parser"] == {"name": "acme_calls", "word": "CALL"}
    assert written["optimizer"] == {"name": "acme_sign", "beta": 0.5}
    assert "acme-parts" in (tmp_path / "run" / "manifest.json").read_text()
    listed = {tuple(line.split()[:3]) for line in rollouts("plugins", "list", path=(site,)).stdout.splitlines()}
    kinds = {"tools": "acme_search", "tool_parsers": "acme_calls", "optimizers": "acme_sign"}
    assert {(kind, name, "acme-parts") for kind, name in kinds.items()} <= listed


@pytest.mark.nightly
def test_two_distributions_with_one_name(rollouts, acme, pip_install):
    twin = pip_install("acme_twin")
    done = rollouts("run", "--env", "acme_env", "--dry-run", path=(acme, twin))
    assert_mistake(done, "acme-env/acme_env", "acme-twin/acme_env")
    done = rollouts("run", "--env", "acme_env/acme_env", "--dry-run", path=(acme, twin))
    assert done.returncode == 0, done.stderr
    done = rollouts("plugins", "doctor", path=(acme, twin))
    assert done.returncode == 1 and "acme-twin/acme_env" in done.stdout


@pytest.mark.nightly
def test_a_package_that_does_not_import(rollouts, acme, pip_install, tmp_path):
    broken = pip_install("acme_broken")
    done = rollouts("run", "--env", "acme_broken", "--dry-run", path=(acme, broken))
    assert_mistake(done, "acme-broken 0.0.1", "RuntimeError: acme_broken was built for another world")
    done = rollouts("run", "--env", "acme_env", "--dry-run", path=(acme, broken))
    assert done.returncode == 0, done.stderr
    done = rollouts("plugins", "doctor", path=(acme, broken))
    assert done.returncode == 1 and "acme-broken 0.0.1" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_an_environment_as_short_as_the_design_s(rollouts, tmp_path):
    source = (SOURCES / "my_env.py").read_text()
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 25
    (tmp_path / "my_env.py").write_text(source)
    done = rollouts("run", "--env", "./my_env.py:MyEnv", *SMALL, "--env.digits", "1", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "correct" in summary["evaluation"]["after"]["parts"]


@pytest.mark.slow
def test_a_loss_from_the_documentation_is_the_core_s(rollouts, pip_install, tmp_path):
    """docs/losses.md builds CISPO from scratch: as a package it trains as the core's own does, number for number."""
    site = pip_install("acme_cispo")
    common = ("--env", "calculator", "--loss.clip-high", "0.5", *SMALL, "--eval-tasks", "0")
    common += ("--minibatches", "2", "--lr", "0.01")
    for name in ("acme_cispo", "cispo"):
        done = rollouts("run", *common, "--loss", name, "--out", name, path=(site,))
        assert done.returncode == 0, done.stdout + done.stderr
    own, core = (read_metrics(tmp_path / name) for name in ("acme_cispo", "cispo"))
    timed = ("time/", "perf/", "sync/seconds", "rollout/latency")
    for mine, theirs in zip(own, core, strict=True):
        assert mine.keys() - theirs.keys() <= {"policy/capped_frac", "policy/weight_max"}
        compared = [name for name in theirs if not name.startswith(timed)]
        assert {name: mine[name] for name in compared} == {name: theirs[name] for name in compared}
    assert any(line.get("optim/grad_norm", 0.0) > 0 for line in core)
    assert any("policy/weight_max" in line for line in own)


@pytest.mark.nightly
def test_an_environment_of_another_contract_version_is_refused_before_it_is_imported(rollouts, acme, pip_install):
    done = rollouts("plugins", "show", "acme_env", path=(acme,))
    assert done.returncode == 0 and re.search(r"^  contract +1$", done.stdout, re.MULTILINE), done.stdout + done.stderr
    later = pip_install("acme_later")
    for command in (("run", "--env", "acme_later", "--dry-run"), ("plugins", "show", "acme_later")):
        done = rollouts(*command, path=(later,))
        assert_mistake(done, "is written for version 2 of the contract", "runs version 1")
        assert_mistake(done, "type: pip install --upgrade rollouts-rl, or install another release")
    assert "acme_later" in rollouts("plugins", "list", path=(later,)).stdout
