"""Paths in a settings file begin at its folder, also if the command is typed elsewhere."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from rollouts.config.files import load_file
from rollouts.config.paths import Move, file_base
from rollouts.config.render import to_toml
from rollouts.config.resolving import moved, resolve

FILES = ("judge.py", "rows.jsonl", "chat.csv", "reader.py", "notes.txt", "harder.py", "base/config.json", "tiny/x")

MOVED = {
    'reward = ["./judge.py:short"]': ["../proj/judge.py:short"],
    'reward = ["brief=judge.py:short:-0.1", "env:1", "acme/brevity"]': [
        "brief=../proj/judge.py:short:-0.1",
        "env:1",
        "acme/brevity",
    ],
    'reward = { brief = { name = "./judge.py:short", notes = "notes.txt", api_key = "notes.txt" } }': {
        "brief": {"name": "../proj/judge.py:short", "notes": "../proj/notes.txt", "api_key": "notes.txt"}
    },
    'env = { name = "prompts", data = "rows.jsonl", words = ["./notes.txt", "./new.txt", "a.b", "notes"] }': {
        "name": "prompts",
        "data": "../proj/rows.jsonl",
        "words": ["../proj/notes.txt", "../proj/new.txt", "a.b", "notes"],
    },
    'env = [{ name = "calculator", alias = "a", weight = "./harder.py:weight" }]': [
        {"name": "calculator", "alias": "a", "weight": "../proj/harder.py:weight"}
    ],
    'env = "./lost.py:Env"': "../proj/lost.py:Env",
    'env = "./only_here.py:Env"': "./only_here.py:Env",
    'data = "rows.jsonl"': "../proj/rows.jsonl",
    'data = "lost.jsonl"': "../proj/lost.jsonl",
    'data = "csv:chat.csv"': "csv:../proj/chat.csv",
    'data = "./reader.py:rows:notes.txt"': "../proj/reader.py:rows:../proj/notes.txt",
    'data = { name = "rows.jsonl", prompt = "a.b" }': {"name": "../proj/rows.jsonl", "prompt": "a.b"},
    'data = "acme/rows"': "acme/rows",
    'data = "code/prompts_d842d630.jsonl"': "code/prompts_d842d630.jsonl",
    'model = "base"': "../proj/base",
    'model = "tiny"': "tiny",
    'model = "acme/base@v1.0"': "acme/base@v1.0",
    'teacher = "./lost"': "../proj/lost",
    'role = { judge = { model = "base", inference = "./judge.py:Engine", folder = "./notes.txt", name = "x" } }': {
        "judge": {
            "model": "../proj/base",
            "inference": "../proj/judge.py:Engine",
            "folder": "../proj/notes.txt",
            "name": "x",
        }
    },
    'worker = { kind = "wss://host:1", token_file = "notes.txt" }': {
        "kind": "wss://host:1",
        "token_file": "../proj/notes.txt",
    },
    'sft = { data = "chat.csv", steps = 3 }': {"data": "../proj/chat.csv", "steps": 3},
    'schedule = [{ step = 3, loss = "./judge.py:loss" }]': [{"step": 3, "loss": "../proj/judge.py:loss"}],
    'logger = { jsonl = { name = "jsonl", file = "rows.jsonl" } }': {"jsonl": {"name": "jsonl", "file": "rows.jsonl"}},
    'from_run = ["runs/a", "/runs/b"]': ["../proj/runs/a", "/runs/b"],
    'out = "runs/new"': "../proj/runs/new",
    'system = "notes.txt"': "notes.txt",
}


@pytest.fixture
def proj(tmp_path, monkeypatch):
    """A folder with settings and files, beside the working directory."""
    for name in FILES:
        (tmp_path / "proj" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proj" / name).touch()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    Path("only_here.py").touch()
    return tmp_path / "proj"


@pytest.mark.parametrize("line", MOVED)
def test_a_path_begins_at_the_folder_of_the_file(proj, monkeypatch, line):
    (proj / "run.toml").write_text(line)
    (found,) = load_file("../proj/run.toml")[0].values()
    assert found == MOVED[line]
    (written,) = (load_file("run.toml")[0] for _ in [monkeypatch.chdir(proj)])
    assert load_file(proj / "run.toml")[0] == written == load_file("../proj/run.toml")[0]
    assert written == tomllib.loads(line), "where the file is, nothing changes"


MINE = """\
from pathlib import Path


def judge(task):
    return 1.0


out = str(Path(__file__).parent / "runs")
reward = ["./judge.py:short", judge]
"""


def test_a_file_of_python_may_name_its_own_folder(proj):
    (proj / "mine.py").write_text(MINE)
    tree, _ = load_file("../proj/mine.py")
    assert tree["out"] == str(proj / "runs")
    assert tree["reward"] == ["../proj/judge.py:short", {"name": "../proj/mine.py:judge"}]


def test_a_run_of_another_project_here_is_not_taken_for_the_files(proj):
    (proj / "run.toml").write_text('out = "runs/mine"\nresume = "auto"\n')
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.toml").touch()
    assert load_file("../proj/run.toml")[0]["out"] == "../proj/runs/mine"


def test_a_text_that_is_no_path_stays(proj):
    (proj / "e.g.").touch()
    (proj / "words.txt").touch()
    (proj / "run.toml").write_text(
        '[env]\nname = "calculator"\nsep = "."\nend = ".."\nsay = "e.g."\nfile = "words.txt"\n'
    )
    env = load_file("../proj/run.toml")[0]["env"]
    assert (env["sep"], env["end"], env["say"]) == (".", "..", "e.g.") and env["file"] == "../proj/words.txt"


@pytest.mark.parametrize("folder", ["lr=1", "~t", "json:x", "a@v1", "-x"])
def test_a_folder_whose_name_means_something_else(proj, monkeypatch, folder):
    """It begins with ./, so that it is not an alias, a home, a loader, a revision or a flag."""
    proj.rename(there := proj.parent / folder)
    monkeypatch.chdir(there.parent)
    (there / "run.toml").write_text('env = "./judge.py:Shop"\ndata = "rows.jsonl"\n')
    tree, _ = load_file(there / "run.toml")
    assert Path(tree["env"].partition(".py")[0] + ".py").is_file() and tree["env"].startswith(f"./{folder}/")
    assert Path(tree["data"]).is_file() and tree["data"].endswith(f"{folder}/rows.jsonl")


def test_the_paths_of_a_run_begin_where_it_was_begun(proj, tmp_path):
    run, here = proj / "runs/mine", str(tmp_path / "other")
    run.mkdir(parents=True)
    config = run / "config.toml"
    assert file_base(config, here) == str(run), "it is a file like others if no manifest is beside it"
    (run / "manifest.json").write_text('{"name": "a web app"}')
    assert file_base(config, here) == str(run), "the manifest is that of another program"
    manifest = {"directory": str(proj), "rollouts": "0.1.0"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert file_base(config, here) == file_base(config, str(tmp_path)) == str(proj)
    copied = tmp_path / "other/runs/mine"
    run.parent.rename(copied.parent)
    assert file_base(copied / "config.toml", here) == here, "the run was copied into another folder"
    (copied / "manifest.json").write_text(json.dumps(manifest | {"folder": str(copied)}))
    assert file_base(copied / "config.toml", here) == str(proj), "--out named that folder"
    (copied / "manifest.json").write_text(json.dumps(manifest | {"folder": str(tmp_path / "other/runs/renamed")}))
    assert file_base(copied / "config.toml", str(tmp_path)) == str(proj), "it was renamed"
    (copied / "manifest.json").write_text(json.dumps(manifest | {"folder": str(proj / "runs/mine")}))
    assert file_base(copied / "config.toml", here) == here, "the whole project was copied"
    (copied / "manifest.json").write_text(json.dumps(manifest | {"directory": str(tmp_path / "lost")}))
    assert file_base(copied / "config.toml", here) == here, "the run comes from another machine"
    (copied / "manifest.json").write_text("[")
    assert file_base(copied / "config.toml", here) == here
    (copied / "rl").mkdir()
    (copied / "manifest.json").rename(copied / "rl/manifest.json")
    (copied / "rl/manifest.json").write_text(json.dumps(manifest | {"folder": str(copied / "rl")}))
    assert file_base(copied / "config.toml", here) == str(proj), "a run of mode sft+rl"


def test_settings_are_written_for_another_folder(proj, tmp_path):
    (proj / "run.toml").write_text('data = "rows.jsonl"\nreward = ["./judge.py:short"]\nmodel = "./base"\n')
    found = resolve(*load_file("../proj/run.toml"))
    text = to_toml(moved(found, Move(str(tmp_path / "other"), str(proj))))
    assert 'name = "./judge.py:short"' in text and 'model = "base"' in text and "../" not in text
