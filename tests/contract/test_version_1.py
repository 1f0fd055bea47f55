"""Version 1 of the contract is frozen: packages of it install and run unchanged, and no promised name changes."""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rollouts
from rollouts import types
from rollouts.agent.model import ChatModel
from rollouts.check import check_environment_class
from rollouts.cli import main
from rollouts.env.authoring import metric, reward, tool
from rollouts.env.checks import METHODS
from rollouts.env.methods import INPUTS
from rollouts.env.shared import shared_values
from rollouts.env.toolsets import METHODS as TOOLSET_METHODS
from rollouts.env.workers.model import RemoteModel
from rollouts.gateway.endpoint import Endpoint
from rollouts.inference.chatting import ChatReply, ChatRequest
from rollouts.plugins import KINDS, hookspecs
from rollouts.plugins.loading import VERSIONS, stated_version
from rollouts.plugins.vocabulary import VOCABULARY
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Episode, Message, Status, ToolCall

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "contract.md").read_text()
PROMISED: dict[str, Any] = json.loads((HERE / "version_1.json").read_text())
WHEELS = sorted((HERE / "wheels").glob("*.whl"))


# --- the packages -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheels as pip installs them, in one folder."""
    target = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, *map(str, WHEELS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(target))
    yield target
    sys.path.remove(str(target))


def test_the_wheels_are_built_from_the_sources() -> None:
    assert [path.name for path in WHEELS] == [f"contract_{name}-1.0-py3-none-any.whl" for name in PACKAGES]
    for path in WHEELS:
        module = path.name.partition("-")[0]
        with zipfile.ZipFile(path) as wheel:
            assert wheel.read(f"{module}.py").decode() == (HERE / f"sources/{module}/{module}.py").read_text()


PACKAGES = {"parts": None, "shop": "1", "talk": "v1"}


def test_the_packages_state_what_they_are_for() -> None:
    assert {name: stated_version(f"contract-{name}") for name in PACKAGES} == PACKAGES
    assert VERSIONS[0] == "1"


def played(script: list[Message], number: int = 0, **settings: Any) -> Episode:
    """An episode in which the model gives these replies. `ANSWER` in a text is the task's answer."""
    left = list(script)

    def reply(request: ChatRequest) -> ChatReply:
        said = left.pop(0)
        return ChatReply(say(said.text.replace("ANSWER", str(task.answer)), *said.tool_calls), "stop")

    with shared_values(), play_plan({"eval_tasks": 2, "max_turns": 20, **settings}) as plan:
        task = plan.eval_tasks()[number]
        episode = play_episode(plan, task, 0, reply)
    assert episode.status is Status.COMPLETED, episode.trajectory.error
    assert not left
    return episode


def say(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, list(calls))


def test_tools_a_user_rewards_and_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    import contract_shop

    closed: list[Any] = []
    monkeypatch.setattr(contract_shop.Shop, "close", lambda self: closed.append((self.total, self.prices)))
    calls = [
        ToolCall("price", {"thing": "tea", "loud": "true"}, id="1"),
        ToolCall("price_list", id="2"),
        ToolCall("add", {"price": "2", "count": 3}, id="3"),
        ToolCall("add", {"price": 2, "count": 0}, id="4"),
        ToolCall("contract_clock", {}, id="5"),
        ToolCall("remember", {"text": "x"}, id="6"),
    ]
    more = {
        "env": {"name": "contract_shop", "largest": 4},
        "tool": ["contract_clock", "contract_notes"],
        "reward": ["env:1", "contract_brevity:0.5", "contract/short:0"],
    }
    episode = played([say("", *calls), say("7!"), say(" ANSWER ")], 1, **more)
    texts = [message.text for message in episode.trajectory.messages if message.role == "tool"]
    assert texts == ["2!", '{"tea":2,"cake":3}', "6", "Error: ValueError: count is at least 1", "12:00 UTC", "2"]
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in episode.trajectory.tools}
    assert list(schemas) == ["add", "price_list", "price", "contract_clock", "remember"]
    assert schemas["add"]["properties"]["price"]["description"] == "of one thing" and schemas["add"]["required"] == [
        "price"
    ]
    assert [message.text for message in episode.trajectory.messages if message.role == "user"][1:] == ["Are you sure?"]
    parts = {"correct": 1.0, "by_turn": 1.0, "contract_brevity": 1.0, "short": 1.0, "bill": 6.0}
    assert episode.score.parts == parts
    assert episode.score.value == 2.0
    assert episode.metrics["metric/bill"] == 6.0 and closed == [(6, {})], "the shared value was cleaned up"


def test_a_restored_episode_is_the_same() -> None:
    report = check_environment_class("contract_shop", only=["restore"], tasks=2, largest=3)
    assert [(each.name, each.status) for each in report.results][-1] == ("restore", "passed")


def test_two_roles() -> None:
    script = [say("", ToolCall("stock", {}, id="1")), say("5 euros"), say("fine")]
    episode = played(script, env={"name": "contract_market"})
    assert [result.role for result in episode.roles] == ["seller", "buyer"]
    assert [result.score.parts for result in episode.roles] == [{"offered": 1.0}, {"answered": 1.0}]
    seller, buyer = episode.trajectories
    assert seller.info == {"offer": {"text": "5 euros", "turns": 2}} and buyer.info == {}
    assert [each["function"]["name"] for each in seller.tools] == ["stock"] and buyer.tools == []


def test_a_user_under_asyncio() -> None:
    script = [say("", ToolCall("price", {}, id="1")), say("tea"), say("3")]
    episode = played(script, env={"name": "contract_guest"})
    assert [message.text for message in episode.trajectory.messages][1:] == ["", "3", "tea", "How much is that?", "3"]
    assert episode.score.value == 1.0


def test_a_program_behind_an_address() -> None:
    episode = played([say("0"), say("Sure."), say("Done.")], env={"name": "contract_program"})
    (trajectory,) = episode.trajectories
    assert [message.text for message in trajectory.messages][1:] == ["0", "Sure?", "Sure.", "Done?", "Done."]
    assert trajectory.info == {"first": "0"} and episode.score.value == 1.0


def test_the_parts_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import contract_parts

    monkeypatch.chdir(tmp_path)
    flags = """
        --env shop=contract_shop --env.shop.weight contract_curriculum --env guest=contract_guest
        --env market=contract_market --env program=contract_program
        --reward env:1 --reward contract_brevity:0.1 --reward contract/short:0.1
        --loss contract_loss --advantage contract_advantage --filter contract_filter --shaping contract_shaping
        --mix contract_mixer --logger jsonl --logger contract_logger --tool contract_clock --tool contract_notes
        --model tiny --steps 1 --prompts-per-step 4 --samples-per-prompt 2 --max-tokens 40 --eval-tasks 0 --out run
    """
    assert main(["run", *flags.split()]) == 0, capsys.readouterr().err
    (metrics,) = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert metrics["contract/tokens"] > 0 and metrics["contract/step"] == 0
    names = [f"env/{name}/kept_frac" for name in ("shop", "guest", "program")]
    names += [f"env/market/role/{name}/reward" for name in ("seller", "buyer")]
    assert [metrics[name] for name in names[:3]] == [1.0] * 3 and set(names) <= set(metrics)
    assert Path("run/contract.txt").read_text() == "begins at 0, 2 samples\nstep 0: True\n"
    assert contract_parts.EVENTS == ["start", "samples 0 True", "step 0 True", "end 1"]


# --- the names --------------------------------------------------------------------------------------------------------


def fields_of(struct: type[msgspec.Struct]) -> list[list[Any]]:
    """The fields in their order, each with its default; `[]` after a field that has none."""
    found = []
    for each in msgspec.structs.fields(struct):
        made = each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory()
        found.append([each.name, *([] if made is msgspec.NODEFAULT else [getattr(made, "value", made)])])
    return found


def settings_of(mark: Any) -> dict[str, Any]:
    return {
        name: each.default
        for name, each in inspect.signature(mark).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }


def public(cls: type) -> list[str]:
    return sorted(name for name in dir(cls) if not name.startswith("_"))


def names_now() -> dict[str, Any]:
    """What the code has at this moment, in the form of `version_1.json`."""
    structs = ("Message", "Role", "Score", "Task", "ToolCall", "Trajectory")
    own = {name: fields_of(getattr(types, name)) for name in structs} | {"Tool": fields_of(rollouts.Tool)}
    hooks = {name: fn for name, fn in vars(hookspecs).items() if name.startswith("rollouts_")}
    return {
        "exports": sorted(rollouts.__all__),
        "methods": {name: list(arguments) for name, arguments in METHODS.items()},
        "inputs": {name: list(names) for name, names in INPUTS.items()},
        "tool_classes": list(TOOLSET_METHODS),
        "kinds": list(KINDS),
        "vocabulary": {kind: list(names) for kind, names in VOCABULARY.items()},
        "hooks": {name: list(inspect.signature(fn).parameters) for name, fn in hooks.items()},
        "marks": {mark.__name__: settings_of(mark) for mark in (tool, reward, metric)},
        "fields": own,
        "status": [each.value for each in Status],
        "trajectory": public(types.Trajectory),
        "model": sorted({*public(ChatModel)} & {*public(RemoteModel)}),
        "endpoint": sorted({*Endpoint.__dataclass_fields__, *public(Endpoint)}),
    }


def test_no_promised_name_is_gone() -> None:
    now = names_now()
    assert set(PROMISED) == set(now)
    for group, promised in PROMISED.items():
        if isinstance(promised, list):
            assert set(promised) <= set(now[group]), group
    for group in ("vocabulary", "inputs", "hooks"):
        for name, promised in PROMISED[group].items():
            assert set(promised) <= set(now[group][name]), f"{group} {name}"


def test_no_promised_order_or_default_has_changed() -> None:
    now = names_now()
    assert PROMISED["methods"].items() <= now["methods"].items()
    for name, fields in PROMISED["fields"].items():
        known, added = now["fields"][name][: len(fields)], now["fields"][name][len(fields) :]
        assert known == fields and all(len(field) == 2 for field in added), (
            f"{name}: a new field is last, with a default"
        )
    for name, settings in PROMISED["marks"].items():
        assert settings.items() <= now["marks"][name].items(), name


@pytest.mark.parametrize(
    "break_it",
    [
        lambda now: now["vocabulary"]["losses"].remove("mask"),
        lambda now: now["fields"]["Task"].insert(1, ["weight", 1.0]),
        lambda now: now["fields"]["Task"].append(["weight"]),
        lambda now: now["marks"]["tool"].update(timeout_seconds=10.0),
        lambda now: now["methods"].update(setup=["task", "run"]),
        lambda now: now["model"].remove("serve"),
    ],
    ids=[
        "an input",
        "a field between",
        "a field without a default",
        "a default",
        "an argument",
        "a method of the model",
    ],
)
def test_a_broken_promise_is_found(break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = names_now()
    break_it(now)
    monkeypatch.setitem(globals(), "names_now", functools.partial(dict, now))
    with pytest.raises(AssertionError):
        test_no_promised_name_is_gone()
        test_no_promised_order_or_default_has_changed()


def test_the_page_has_the_promised_names() -> None:
    for name, fields in PROMISED["fields"].items():
        if name != "Trajectory":
            written = ", ".join(f"{n}={json.dumps(d[0])}" if d else n for n, *d in fields)
            written = written.replace("null", "None").replace("{}", "{}")
            assert f"`{name}({written})`" in PAGE, f"{name}({written})"
    for name, settings in PROMISED["marks"].items():
        written = ", ".join(f"{key}={value}" for key, value in settings.items())
        assert f"`@{name}({written})`" in PAGE, f"@{name}({written})"
    for name in (*PROMISED["model"], *PROMISED["endpoint"], *PROMISED["hooks"], *PROMISED["status"]):
        assert f"`{name}" in PAGE or f".{name}" in PAGE, name
