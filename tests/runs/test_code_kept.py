"""The files that components came from: copied into the run's folder, hashed in its manifest, compared later."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import rollouts
from rollouts.cli import main
from rollouts.errors import UnknownComponentError
from rollouts.plugins.index import ComponentRef
from rollouts.runs.folder import RunFolder
from rollouts.runs.manifest import CODE_BYTES_MAX, changed_code, code_files, keep_code, make_manifest

ENV = """\
from rollouts import Task, reward


class Hello:
    def tasks(self, split, rng):
        while True:
            yield Task(f"Say {split} {rng.randrange(10 ** 6)}.")

    @reward
    def long(self, trajectory):
        return len(trajectory.last_text)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hello.py").write_text(ENV)
    return tmp_path


def copies(run):
    return {path.read_text() for path in Path(run, "code").iterdir()}


def test_a_run_keeps_its_files_and_says_when_they_have_changed(here, capsys):
    small = {"eval_tasks": 2, "max_tokens": 4, "max_turns": 1}
    Path("rewards.py").write_text("def flat(task):\n    return 1.0\n")
    rewards = ["env:1", "./rewards.py:flat"]
    rollouts.run(env="./hello.py:Hello", reward=rewards, steps=0, out="run", **small)
    first = json.loads(Path("run/manifest.json").read_text())["files"]
    assert [Path(file["path"]).name for file in first] == ["hello.py", "rewards.py"]
    for file in first:
        data = Path("run", file["copy"]).read_bytes()
        assert data == Path(file["path"]).read_bytes()
        assert file["sha256"] == hashlib.sha256(data).hexdigest()

    Path("hello.py").write_text(ENV + "\n# changed\n")
    note = "note: hello.py has changed since the run in run used it; it is used as it is now (the copy from then: "
    note += f"run/{first[0]['copy']})"
    assert main(["eval", "run", "--samples-per-prompt", "1", "--out", "evaluated"]) == 0
    assert note in capsys.readouterr().out
    assert copies("evaluated") == {ENV + "\n# changed\n", Path("rewards.py").read_text()}
    assert main(["resume", "run", "--steps", "0", "--checkpoint", "step_000000"]) == 0
    out = capsys.readouterr().out
    assert note in out and "rewards.py has changed" not in out
    assert {ENV, ENV + "\n# changed\n"} < copies("run")
    assert main(["resume", "run", "--steps", "0", "--checkpoint", "step_000000"]) == 0
    assert "has changed" not in capsys.readouterr().out, "it was said when the run was resumed"

    Path("hello.py").unlink()
    assert main(["resume", "run", "--steps", "1"]) == 2
    err = capsys.readouterr().err
    assert err.count("the run's copies of its files: run/code/hello_") == 1


def test_a_run_from_another_machine_names_its_copies(here, capsys, monkeypatch):
    Path("judge.py").write_text("def score(trajectory):\n    return 1.0\n")
    rollouts.run(
        **{"env": "hello.py:Hello", "reward": "./judge.py:score", "out": "run", "eval_tasks": 2, "max_tokens": 4},
        **{"max_turns": 1, "steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2},
    )
    manifest = json.loads(Path("run/manifest.json").read_text())
    file, judge = manifest["files"]
    Path("run/manifest.json").write_text(json.dumps(manifest | {"directory": "/lost", "folder": "/lost/run"}))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for command in (["rescore", "../run"], ["run", "--from", "../run", "--env", f"{here}/hello.py:Hello"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert f"\ntype the copy in place of ./judge.py:score: ../run/{judge['copy']}:score\n" in err
    assert main(["eval", "../run"]) == 2
    copy = f"../run/{file['copy']}:Hello"
    assert f"\ntype the copy in place of hello.py:Hello: {copy}\n" in capsys.readouterr().err
    rewards = ["--reward", f"../run/{judge['copy']}:score"]
    assert main(["eval", "../run", "--env", copy, *rewards, "--out", "evaluated"]) == 0


def test_what_is_not_in_a_file_is_not_kept():
    installed = ComponentRef("losses", "grpo", "rollouts.x:grpo", "rollouts-rl", "0")
    of_pack = ComponentRef("environments", "pack/any", "")
    assert code_files([installed, of_pack]) == []


def test_one_file_is_kept_once_and_a_large_one_only_hashed(here):
    Path("large.py").write_bytes(b"#" * (CODE_BYTES_MAX + 1))
    names = (("hello", "a"), ("hello", "b"), ("large", "c"))
    refs = [ComponentRef("rewards", name, f"{here}/{file}.py:{name}") for file, name in names]
    files = code_files(refs)
    folder = RunFolder(Path("run"))
    keep_code(folder, files)
    assert copies("run") == {ENV}
    folder.write_json("manifest.json", make_manifest(0, refs, files))
    assert not changed_code(folder.path, files)
    Path("large.py").write_text("")
    (note,) = changed_code(folder.path, code_files(refs))
    assert note == "large.py has changed since the run in run used it; it is used as it is now"


def test_a_folder_from_before_says_nothing(here):
    files = code_files([ComponentRef("environments", "Hello", f"{here}/hello.py:Hello")])
    Path("old").mkdir()
    Path("old/manifest.json").write_text("{}")
    assert changed_code(here / "old", files) == [] == changed_code(here / "lost", files)


def test_a_new_run_names_no_copies(here):
    with pytest.raises(UnknownComponentError) as caught:
        rollouts.run(env="./lost.py:Hello", out="run")
    assert "copies of its files" not in str(caught.value)
