"""The form for settings, without a browser: what it checks, what it imports, and where it writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_view import component_reader, settings_files
from rollouts_view.api import APIError, ViewAPI
from rollouts_view.catalog import Catalog
from rollouts_view.component_reader import ComponentReader
from rollouts_view.drafts import Draft, Part, check, draft_of, text_of

from rollouts.cli import main
from rollouts.config.files import load_as_written, load_file
from rollouts.config.flags import read_flag
from rollouts.config.resolving import resolve

CALCULATOR = {"env": [{"name": "calculator", "settings": {"digits": "3"}}]}
SCRIPT = '''
from pathlib import Path
Path("ran").write_text("")

def brevity(trajectory, *, target: int = 50, most: float | None = None) -> float:
    """Short replies. They <b>earn</b> more.

    Args:
        target: the <img src=x> length
    """
    return 0.0
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An opened folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("opened").mkdir()
    return Path("opened")


@pytest.fixture
def api(folder):
    """Asks the API: `api("/api/settings")`; with a body it is a POST."""
    own = ViewAPI(Catalog([folder]))

    def ask(path, body=None, query=""):
        method = "GET" if body is None else "POST"
        return json.loads(own.answer(method, path, query, b"" if body is None else json.dumps(body).encode()))

    return ask


def refusal(api, *request):
    with pytest.raises(APIError) as refused:
        api(*request)
    return refused.value.status, str(refused.value)


def written(api, name="my.toml", **more):
    draft = {"values": {"steps": "40"}, "components": CALCULATOR}
    return api("/api/settings/file", {"draft": draft, "root": "opened", "name": name} | more)


DRAFTS = {
    "nothing": Draft(),
    "one environment": Draft({"steps": "40", "lr": "1e-4"}, {"env": [Part("calculator", settings={"digits": "3"})]}),
    "several environments": Draft(
        {},
        {
            "env": [
                Part("calculator", "easy", "2", {"digits": "1"}),
                Part("calculator", "hard", "[[0, 0.0], [10, 1.0]]"),
            ]
        },
    ),
    "rewards": Draft(
        {},
        {
            "env": [Part("calculator")],
            "reward": [Part("env", "", "1"), Part("length", "short", "-0.1", {"most": "20"}), Part("length")],
        },
    ),
    "no filter": Draft({}, {"env": [Part("calculator")], "filter": []}),
    "a part of the loss": Draft({}, {"advantage": [Part("", settings={"eps": "0.1"})], "loss": [Part("grpo")]}),
    "sft": Draft({"mode": "sft", "system": '"3"'}, {"data": [Part("chat.jsonl", settings={"turns": "last"})]}),
    "eval": Draft({"mode": "eval", "temperature": "0", "tasks": "0-3"}, {"env": [Part("calculator")]}),
    "tables": Draft(
        {"mode": "sft+rl", "stop_when": ["reward/mean >= 0.9", "policy/entropy < 1"], "eval_every": "5"},
        {"env": [Part("calculator")]},
        '[sft]\nsteps = 3\n[template]\nenable_thinking = false\n[[schedule]]\nstep = 5\nloss = "ppo"\n',
    ),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_the_file_has_what_the_form_says(name, tmp_path):
    found = check(DRAFTS[name], ComponentReader([tmp_path]))
    assert found.faults == []
    brief, whole = (resolve(tomllib.loads(text)) for text in (found.text, found.whole))
    assert brief.settings == whole.settings, "both texts are of the same run"
    again, notes = draft_of(tomllib.loads(found.text))
    assert (check(again, ComponentReader([tmp_path])).text, notes) == (found.text, []), (
        "a file that is opened again stays as it is"
    )


def test_only_what_differs_is_written(tmp_path):
    draft = Draft({"steps": "120", "seed": "3"}, {"loss": [Part("grpo", settings={"clip_low": "0.2"})]})
    found = check(draft, ComponentReader([tmp_path]))
    assert found.text == "seed = 3\n"
    assert "clip_low = 0.2" in found.whole and "# The seed of everything random." in found.whole


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=20),
        lambda inner: st.lists(inner.filter(lambda value: value is not None), max_size=3),
        max_leaves=5,
    )
)
def test_the_text_of_a_value_is_read_as_this_value(value):
    if isinstance(value, str) and value.lower() == "none":
        return  # in a settings file, this text is None
    assert read_flag(text_of(value)).value == value


def test_mistakes_are_at_their_fields_in_the_words_of_the_command(api, folder, capsys):
    (folder / "needs.py").write_text("def needs(trajectory, *, target: int) -> float: ...\n")
    api("/api/settings/run-file", {"name": "opened/needs.py:needs"})
    draft = {
        "values": {"steps": "4x", "lr": "-1", "lora_rnk": "3", "stop_when": ["eval/reward_mean >= 0.9"]},
        "components": {
            "env": [{"name": "calculator", "settings": {"digits": "x", "digts": "3"}}],
            "reward": [{"name": "lenkth"}, {"name": "env", "weight": "much"}, {"name": "opened/needs.py:needs"}],
        },
    }
    faults = {tuple(fault["at"]): fault["words"] for fault in api("/api/settings/check", draft)["faults"]}
    assert set(faults) == {
        ("values", "steps"),
        ("values", "lr"),
        ("values", "lora_rnk"),
        ("values", "stop_when"),
        ("components", "env", 0, "settings", "digits"),
        ("components", "env", 0, "settings", "digts"),
        ("components", "reward", 0),
        ("components", "reward", 1, "weight"),
        ("components", "reward", 2, "settings", "target"),
    }
    assert "did you mean: --lora-rank?" in faults["values", "lora_rnk"]
    assert "did you mean: --env.digits?" in faults["components", "env", 0, "settings", "digts"]
    assert "did you mean: length?" in faults["components", "reward", 0]
    assert main(["run", "--env", "calculator", "--steps", "4x", "--dry-run"]) == 2
    assert faults["values", "steps"] in capsys.readouterr().err
    assert main(["run", "--env", "calculator", "--env.digits", "x", "--dry-run"]) == 2
    assert faults["components", "env", 0, "settings", "digits"] in capsys.readouterr().err


def test_a_mistake_without_a_field_is_said(api):
    found = api("/api/settings/check", {"tables": "[sft]\nsteps = "})
    assert found["faults"][0]["at"] == ["tables"] and "not TOML" in found["faults"][0]["words"]
    for text in ("a = " + "[" * 10_000, "a = " + "1" * 5_000):
        assert "not TOML" in api("/api/settings/check", {"tables": text})["faults"][0]["words"]
    found = api("/api/settings/check", {"tables": "steps = 3"})
    assert "'steps' has no place here" in found["faults"][0]["words"] and found["text"] == ""


def test_an_environment_may_be_elsewhere(api):
    draft = {"components": {"env": [{"name": "theirs", "settings": {"a": "1"}}]}}
    assert "no environment is named 'theirs'" in api("/api/settings/check", draft)["faults"][0]["words"]
    found = api("/api/settings/check", draft | {"tables": '[worker]\nkind = "ws://127.0.0.1:9"\n'})
    assert found["faults"] == [] and "a = 1" in found["text"] and "theirs are not checked" in found["notes"][0]


def test_the_form_imports_no_component(api, monkeypatch):
    def load(ref):
        raise AssertionError(f"{ref.name} was imported")

    monkeypatch.setattr("rollouts.plugins.manager.load_component", load)
    form = api("/api/settings")
    names = {each["name"]: each for each in form["kinds"]["env"]["names"]}
    assert "calculator" in names and names["calculator"]["about"] == "Arithmetic with one tool"
    fields = {field["name"]: field for group in form["groups"] for field in group["fields"]}
    assert fields["on_invalid_reward"]["choices"] == ["drop", "zero", "raise"] and fields["steps"]["default"] == "120"
    assert form["kinds"]["reward"]["default"] == [{"name": "env", "alias": "", "weight": "1", "settings": {}}]


def test_a_file_is_run_only_if_it_is_allowed_and_below_the_folder(api, folder):
    (folder / "mine.py").write_text(SCRIPT)
    Path("other.py").write_text(SCRIPT)
    asked = "key=reward&name=opened/mine.py:brevity"
    draft = {"components": {"reward": [{"name": "opened/mine.py:brevity", "settings": {"target": "x"}}]}}
    found = api("/api/settings/component", None, asked)
    assert found["state"] == "asks" and "mine.py" in found["words"]
    assert "not checked" in api("/api/settings/check", draft)["notes"][0]
    assert not Path("ran").exists()
    for outside in ("other.py:brevity", "opened/../other.py:brevity", "/etc/x.py:brevity", "~/x.py:y"):
        found = api("/api/settings/component", None, f"key=reward&name={outside}")
        assert found["state"] == "failed" and "rollouts view --new FOLDER" in found["words"]
        assert refusal(api, "/api/settings/run-file", {"name": outside})[0] == 400
    (folder / "dir.py").mkdir()
    tricky = "opened/dir.py/../../other.py:brevity"  # a folder with the name of a file
    assert api("/api/settings/component", None, f"key=reward&name={tricky}")["state"] == "failed"
    (folder / "link.py").symlink_to(Path("other.py").resolve())
    assert refusal(api, "/api/settings/run-file", {"name": "opened/link.py:brevity"})[0] == 400
    assert "no module" in api("/api/settings/component", None, "key=reward&name=os.path:join")["words"]
    assert not Path("ran").exists(), "nothing was run"
    api("/api/settings/run-file", {"name": "opened/mine.py:brevity"})
    found = api("/api/settings/component", None, asked)
    assert found["state"] == "read" and [field["name"] for field in found["fields"]] == ["target", "most"]
    assert found["fields"][0]["doc"] == "the <img src=x> length" and Path("ran").exists()
    (fault,) = api("/api/settings/check", draft)["faults"]
    assert fault["at"] == ["components", "reward", 0, "settings", "target"]


def test_paths_are_those_of_the_file_that_is_written(api, folder):
    (folder / "short.py").write_text(SCRIPT)
    (folder / "rows.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    api("/api/settings/run-file", {"name": "opened/short.py:brevity"})
    components = {"reward": [{"name": "opened/short.py:brevity"}], "data": [{"name": "opened/rows.jsonl"}]}
    for whole in (False, True):
        written(api, f"{whole}.toml", draft={"components": components}, whole=whole)
        tree = load_as_written(folder / f"{whole}.toml")[0]
        assert tree["data"] == "rows.jsonl" or tree["data"]["name"] == "rows.jsonl"
        assert "./short.py:brevity" in str(tree["reward"]) and "opened/" not in str(tree)
        found = api("/api/settings/draft", None, f"root=opened&file={whole}.toml")["draft"]["components"]
        assert [part["name"] for part in found["reward"]] == ["opened/short.py:brevity"]
        assert [part["name"] for part in found["data"]] == ["opened/rows.jsonl"]


def test_a_slow_import_and_one_that_fails_are_each_one_message(api, folder, monkeypatch):
    monkeypatch.setattr(component_reader, "WAIT_SECONDS", 0.05)
    (folder / "slow.py").write_text(
        "import time\nfrom pathlib import Path\nwhile not Path('go').exists(): time.sleep(0.01)\n" + SCRIPT
    )
    (folder / "broken.py").write_text("import torch_that_is_missing\n")
    for name in ("slow", "broken"):
        api("/api/settings/run-file", {"name": f"opened/{name}.py:brevity"})
    components = {
        "reward": [{"name": "opened/slow.py:brevity"}, {"name": "opened/broken.py:x", "settings": {"a": "1"}}],
        **CALCULATOR,
    }
    found = api("/api/settings/check", {"values": {"steps": "5"}, "components": components})
    assert found["faults"] == [] and "digits = 3" in found["text"] and "a = 1" in found["text"]
    assert "has been importing for" in found["notes"][0]
    Path("go").write_text("")
    monkeypatch.setattr(component_reader, "WAIT_SECONDS", 60)
    assert api("/api/settings/component", None, "key=reward&name=opened/slow.py:brevity")["state"] == "read"
    failed = api("/api/settings/component", None, "key=reward&name=opened/broken.py:x")
    assert failed["state"] == "failed" and "torch_that_is_missing" in failed["words"]


def test_a_file_is_written_and_the_command_takes_it(api, folder):
    found = written(api)
    assert found["file"] == "opened/my.toml" and found["command"] == "rollouts run opened/my.toml"
    assert (folder / "my.toml").read_text() == 'steps = 40\n\n[env]\nname = "calculator"\ndigits = 3\n'
    assert "# Training steps." in (written(api, "all.toml", whole=True), (folder / "all.toml").read_text())[1]
    assert load_file("opened/all.toml")[0]["env"]["digits"] == 3
    assert [file["name"] for file in api("/api/settings")["files"]] == ["all.toml", "my.toml"]
    draft = api("/api/settings/draft", None, "root=opened&file=my.toml")["draft"]
    assert draft["values"] == {"steps": "40"} and draft["components"]["env"][0]["settings"] == {"digits": "3"}


def test_a_file_that_exists_is_replaced_only_if_it_is_the_one_that_was_seen(api, folder):
    (folder / "my.toml").write_text("# mine\n")
    asked = written(api)
    assert "exists already" in asked["asks"] and (folder / "my.toml").read_text() == "# mine\n"
    (folder / "my.toml").write_text("# another\n")
    assert "exists already" in written(api, replaced=asked["tag"])["asks"]
    assert (folder / "my.toml").read_text() == "# another\n"
    found = written(api, replaced=written(api)["tag"])
    assert "steps = 40" in (folder / "my.toml").read_text()
    assert "file" in written(api, replaced=found["tag"]), "what the form wrote itself may be written again"


@pytest.mark.parametrize(
    "name",
    [
        "../my.toml",
        "a/../../my.toml",
        "/tmp/my.toml",
        "~/my.toml",
        "my.txt",
        "my.py",
        ".hidden.toml",
        "",
        "a//b.toml",
        "a\\..\\b.toml",
        "a\0.toml",
        "missing/my.toml",
        "link/my.toml",
        "link.toml",
        "temporary.toml",
        "dir.toml",
        "run/my.toml",
        "run/config.toml",
        "pyproject.toml",
        "x" * 300 + ".toml",
        "C:my.toml",
    ],
)
def test_names_that_are_refused(api, folder, name):
    Path("outside").mkdir()
    (folder / "link").symlink_to(Path("outside").resolve())
    (folder / "link.toml").symlink_to(Path("outside").resolve() / "x.toml")
    (folder / ".temporary.toml.partial").symlink_to(Path("outside").resolve() / "x.toml")
    (folder / "dir.toml").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text("steps = 1\n")
    before = sorted(Path.cwd().rglob("*"))
    with pytest.raises(APIError) as refused:
        written(api, name)
    assert refused.value.status == 400
    assert sorted(Path.cwd().rglob("*")) == before and (folder / "run" / "config.toml").read_text() == "steps = 1\n"
    if name:
        assert refusal(api, "/api/settings/draft", None, f"root=opened&file={name}".replace("\0", "%00"))[0] == 400


def test_other_refusals(api, folder, monkeypatch):
    assert "is not opened" in refusal(api, "/api/settings/file", {"draft": {}, "root": "/etc", "name": "x.toml"})[1]
    assert refusal(api, "/api/settings/file", {"draft": {}, "root": "opened"})[0] == 400
    assert refusal(api, "/api/settings/check", [1])[0] == 400
    assert refusal(api, "/api/settings/check", {"values": {"steps": 3}})[0] == 400
    assert refusal(api, "/api/settings/component", None, "key=envs&name=calculator")[0] == 400
    wrong = {"draft": {"values": {"steps": "x"}}, "root": "opened", "name": "my.toml"}
    assert "nothing was written" in refusal(api, "/api/settings/file", wrong)[1] and not list(folder.iterdir())

    def fail(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(settings_files, "write_whole", fail)
    with pytest.raises(APIError, match="No space left") as refused:
        written(api)
    assert refused.value.status == 507


def test_the_settings_of_a_run_begin_another(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = (
        'mode = "rl"\nsteps = 7\nout = "runs/first"\nresume = "auto"\nreward = ["env:1", "length:-0.5"]\nlr = "none"\n'
        '[env]\nname = "calculator"\ndigits = 4\n[inference]\nname = "openai"\napi_key = "(a secret, left out)"\n'
        'body = { api_key = "sk-1", top_p = 0.5 }\n'
    )
    run = make.run(settings=settings)
    api = ViewAPI(Catalog([make.directory]))
    found = json.loads(api.answer("GET", "/api/settings/draft", f"run={run}"))
    assert found["draft"]["values"] == {"steps": "7"}, "the folder of that run is taken"
    assert "--inference.api-key VALUE" in found["notes"][0] and "--inference.body VALUE" in found["notes"][1]
    assert "api_key" not in found["draft"]["components"]["inference"][0]["settings"]
    assert "sk-1" not in json.dumps(found)
    draft = json.dumps(found["draft"]).encode()
    text = json.loads(api.answer("POST", "/api/settings/check", body=draft))["text"]
    assert "digits = 4" in text and "[reward.length]" in text and text.count("secret") == 1
    only_runs = ViewAPI(Catalog([run]))
    assert json.loads(only_runs.answer("GET", "/api/settings"))["roots"] == [], "a run's own folder is left alone"
