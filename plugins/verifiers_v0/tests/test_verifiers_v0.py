"""Every kind of environment is played as upstream's own loop plays it: the same messages, rewards, metrics and end."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import forks
import pytest

pytest.importorskip("verifiers.legacy", reason="verifiers 0.3 is not installed; to run these tests: make test-adapters")

from rollouts_verifiers_v0 import VerifiersV0, catalog, environment_of
from rollouts_verifiers_v0.hooks import rollouts_find_component, rollouts_list_components

from rollouts import Message
from rollouts.env.shared import shared_values
from rollouts.errors import ConfigError
from rollouts.inference.chatting import ChatReply
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Status, ToolCall

pytestmark = pytest.mark.adapters

WRITTEN_FOR = "0.3.1"
PACKAGES = Path(__file__).parent / "packages"
OWN_ENVS = '''
import random
import verifiers as vf
from datasets import Dataset

import vf_capitals, vf_higher, vf_shop


class Counter:
    """A gym environment: add up to five."""

    def reset(self, seed):
        self.sum = seed % 3
        return f"The sum is {self.sum}."

    def step(self, action):
        self.sum += action
        return f"The sum is {self.sum}.", float(self.sum == 5), self.sum >= 5, {}


class Judge:
    """A client that answers what a judge model would."""

    class chat:
        class completions:
            @staticmethod
            async def create(model, messages, **kwargs):
                said = "yes" if "Paris" in messages[0]["content"] else "no"
                message = type("Message", (), {"content": said})
                return type("Completion", (), {"choices": [type("Choice", (), {"message": message})]})


def load_environment(kind, **kwargs):
    rows = [{"question": "2 + 2?", "answer": "4"}, {"question": "3 + 3?", "answer": "6"}]
    dataset = Dataset.from_list(rows)
    if kind == "group":
        return vf.EnvGroup([vf_capitals.load_environment(), vf_shop.load_environment()], ["one", "two"])
    if kind == "gym":
        return vf.GymEnv(Counter, action_parser=int, num_train_episodes=3, num_eval_episodes=1, max_episode_steps=4)
    if kind == "reasoning":
        from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

        return ReasoningGymEnv("chain_sum", num_train_examples=3, num_eval_examples=1, seed=3)
    if kind == "think":
        parser = vf.ThinkParser()
        def right(parser, completion, answer):
            return float(parser.parse_answer(completion) == answer)
        return vf.SingleTurnEnv(dataset=dataset, parser=parser, rubric=vf.Rubric([right], parser=parser))
    if kind == "math":
        return vf.SingleTurnEnv(dataset=dataset, rubric=vf.MathRubric())
    if kind == "judge":
        rubric = vf.JudgeRubric(judge_client=Judge())
        async def judged(judge, prompt, completion, answer, state):
            return float("yes" in await judge(prompt, completion, answer, state))
        rubric.add_reward_func(judged)
        rows = [{"question": "The capital of France?", "answer": "Paris"}]
        return vf.SingleTurnEnv(eval_dataset=Dataset.from_list(rows), rubric=rubric)
    if kind == "raises":
        def broken(completion):
            return 1 / 0
        def fine(completion):
            return 0.5
        return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric([broken, fine]))
    if kind == "hangs":
        class Hangs(vf.MultiTurnEnv):
            async def env_response(self, messages, state, **kwargs):
                import asyncio
                await asyncio.sleep(3600)
        return Hangs(dataset=dataset, rubric=vf.Rubric([lambda completion: 1.0]))
    if kind == "dies":
        class Dies(vf.MultiTurnEnv):
            async def env_response(self, messages, state, **kwargs):
                raise RuntimeError("the service is gone")
        return Dies(dataset=dataset, rubric=vf.Rubric([lambda completion: 1.0]))
    if kind == "grouped":
        def best(completions) -> list[float]:
            return [1.0 for _ in completions]
        return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric([best]))
    if kind == "completion":
        env = vf.SingleTurnEnv(dataset=dataset)
        env.message_type = "completion"
        return env
    if kind == "changes":
        rows = [{"question": f"{random.random()}", "answer": "4"}]
        return vf.SingleTurnEnv(dataset=lambda: Dataset.from_list(rows), rubric=vf.Rubric([lambda completion: 1.0]))
    if kind == "sandbox":
        class Mine(vf.SandboxEnv):
            def __init__(self, dataset):
                vf.MultiTurnEnv.__init__(self, dataset=dataset)
        return Mine(dataset)
    if kind == "mcp":
        from verifiers.envs.experimental.mcp_env import MCPEnv
        class Mine(MCPEnv):
            def __init__(self, dataset):
                vf.MultiTurnEnv.__init__(self, dataset=dataset)
        return Mine(dataset)
    if kind == "nothing":
        return {"dataset": rows}
    raise KeyError(kind)
'''


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory):
    """The packages, as pip installs them."""
    site = tmp_path_factory.mktemp("site")
    for folder in PACKAGES.iterdir():
        (site / f"{folder.name}.py").write_text((folder / f"{folder.name}.py").read_text())
        info = site / f"{folder.name}-0.1.0.dist-info"
        info.mkdir()
        name = folder.name.replace("_", "-")
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\nRequires-Dist: verifiers\n"
        )
    (site / "vf_own.py").write_text(OWN_ENVS)
    (site / "vf_broken.py").write_text("import no_such_module\n")
    (site / "vf_taskset.py").write_text("")
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    yield site
    sys.path.remove(str(site))
    catalog.forget()


def call(name: str, number: int = 0, **arguments) -> Message:
    return Message("assistant", tool_calls=[ToolCall(name, arguments, id=f"c{number}")])


def say(text: str) -> Message:
    return Message("assistant", text)


two = [ToolCall("price", {"item": "apple"}, id="a"), ToolCall("price", {"item": "gold"}, id="b")]
broken_call = Message("assistant", tool_calls=[ToolCall("price", error="not valid JSON: item=", id="x")])
thinks = Message("assistant", "4", reasoning="I add.")

SCRIPTS = {
    ("vf-capitals", "{}"): [
        [say("<think>Easy.</think>\n<answer>Lima</answer>")],
        [say("<answer>Nairobi</answer>")],
        [say("")],
    ],
    ("vf-capitals", '{"shout": true, "num_eval": 1}'): [[say("<think>x</think><answer>PARIS</answer>")]],
    ("vf-higher", "{}"): [
        [say("5"), say("1")],
        [say("1"), say("what?"), say("3")],
        [say("pass")],
        [say(str(n)) for n in (9, 9, 9, 9, 9, 9)],
    ],
    ("vf-shop", "{}"): [
        [call("price", 1, item="apple"), call("price", 2, item="bread"), call("total", 3, prices=[3, 5]), say("8")],
        [Message("assistant", "Both.", tool_calls=two), say("16")],
        [call("steal", 1, item="apple"), broken_call, call("price", 4, it="x"), say("14")],
        [call("price", n, item="apple") for n in range(9)],
    ],
    ("vf-shop", '{"stateful": true}'): [
        [call("take", 1, item="apple"), call("take", 2, item="bread"), say("8")],
        [call("take", 1, basket=["x"]), broken_call, say("16")],
    ],
    ("vf-own", '{"kind": "group"}'): [
        [say("<answer>Lima</answer>")],
        *[[say("x")]] * 3,
        [call("price", 1, item="bread"), say("8")],
    ],
    ("vf-own", '{"kind": "gym"}'): [[say("5")], [say("1"), say("1"), say("2")], [say("none")], [say("0")] * 6],
    ("vf-own", '{"kind": "reasoning"}'): [[say("<think>x</think><answer>12</answer>")], [say("<answer>-8</answer>")]],
    ("vf-own", '{"kind": "think"}'): [[say("<think>So.</think>4")], [thinks]],
    ("vf-own", '{"kind": "math"}'): [[say("It is \\boxed{4}.")], [say("\\boxed{7}")]],
    ("vf-own", '{"kind": "judge"}'): [[say("Paris")]],
}
NEEDS = {'{"kind": "reasoning"}': pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="no reasoning-gym")}
CASES = [
    pytest.param(package, json.loads(args), index, replies, id=f"{package}-{args}-{index}", marks=NEEDS.get(args, ()))
    for (package, args), scripts in SCRIPTS.items()
    for index, replies in enumerate(scripts)
]


def upstreams(package: str, args: dict, index: int, replies: list[Message]):
    """The rollout of upstream's own loop, and the messages that its client saw last."""
    from verifiers.legacy.clients import Client
    from verifiers.legacy.errors import OverlongPromptError
    from verifiers.legacy.types import Response, ResponseMessage
    from verifiers.legacy.types import ToolCall as UpstreamCall

    class Scripted(Client):
        left, seen, tools = list(replies), [], []
        setup_client = to_native_tool = to_native_prompt = get_native_response = None
        raise_from_native_response = from_native_response = close = None

        async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            if not self.left:
                raise OverlongPromptError("the script is over")
            self.seen.append(prompt)
            self.tools.append(tools)
            said = self.left.pop(0)
            calls = [
                UpstreamCall(id=c.id, name=c.name, arguments=c.error or json.dumps(c.arguments))
                for c in said.tool_calls
            ]
            message = ResponseMessage(
                content=said.text,
                reasoning_content=said.reasoning,
                tool_calls=calls or None,
                finish_reason="stop",
                is_truncated=False,
            )
            return Response(id="x", created=0, model=model, message=message)

    Scripted.__abstractmethods__ = frozenset()
    catalog.forget()
    env = catalog.load(package, args)
    dataset = env.build_eval_dataset() if env.build_dataset() is None else env.build_dataset()
    client = Scripted(None)
    output = asyncio.run(env.run_rollout(dataset[index % len(dataset)], client, "policy", {}))
    return output, client


def played(package: str, args: dict, index: int, replies: list[Message], **settings):
    """The episode of a run, and its requests."""
    left, requests = list(replies), []

    def reply(request):
        requests.append(request)
        return ChatReply(left.pop(0), "stop") if left else ChatReply(Message("assistant"), "context", detail="over")

    catalog.forget()
    given = {"env": {"name": f"verifiers-v0/{package}", "args": args}, "max_turns": 50, "max_tokens": 10**6, **settings}
    with shared_values(), play_plan(given) as plan:
        (env,) = plan.environments
        made = env.make_checked()
        tasks = made.tasks("train", None, catalog.load(package, args))
        return play_episode(plan, tasks[index % len(tasks)], 0, reply), requests


def flat(message) -> tuple:
    """What both forms of a message have."""
    own = isinstance(message, Message)
    content = message.text if own else (message.content or "")
    calls = (
        [(c.name, (c.error or c.arguments) if own else _read(c.arguments)) for c in message.tool_calls or []]
        if message.role == "assistant"
        else []
    )
    return (message.role, content, calls)


def _read(arguments: str):
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize(("package", "args", "index", "replies"), CASES)
def test_equals_upstream(package, args, index, replies):
    output, client = upstreams(package, args, index, replies)
    episode, requests = played(package, args, index, replies)
    assert [[flat(m) for m in r.messages] for r in requests[: len(client.seen)]] == [
        [flat(m) for m in prompt] for prompt in client.seen
    ]
    for request, tools in zip(requests, client.tools, strict=False):
        assert [each["function"] for each in request.tools] == [
            {"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools or []
        ]
    assert episode.score.value == pytest.approx(output["reward"])
    assert episode.score.parts == pytest.approx({"rubric": output["reward"], **output["metrics"]})
    assert episode.score.why == f"rubric: {output['stop_condition']}"
    assert episode.metrics["metric/cut_off"] == float(output["is_truncated"])
    assert episode.status is Status.TRUNCATED if len(requests) > len(replies) else Status.COMPLETED


# --- names and settings -----------------------------------------------------------------------------------------------


def test_names():
    names = [f"verifiers-v0/vf-{name}" for name in ("capitals", "higher", "shop")]
    assert list(rollouts_list_components("environments")) == names
    assert rollouts_list_components("rewards") is None
    assert issubclass(rollouts_find_component("environments", "verifiers-v0/vf-capitals"), VerifiersV0)
    assert environment_of("somebody/vf-capitals").package == "somebody/vf-capitals", "a name of the hub"
    assert environment_of("no-such-package") is None


@pytest.mark.parametrize(
    ("package", "args", "message"),
    [
        ("vf-capitals", {"num_evl": 1}, r"no argument --env.args.num_evl\ndid you mean: num_eval"),
        ("vf-own", {}, r"needs an argument; type --env.args.kind VALUE"),
        ("vf-own", {"kind": "none"}, r"load_environment\(kind='none'\) raised KeyError: 'none'"),
        ("vf-own", {"kind": "grouped"}, "compare the rollouts of a group"),
        ("vf-own", {"kind": "completion"}, "message_type is 'completion'"),
        ("vf-own", {"kind": "sandbox"}, "is a .*, which cannot be served: it runs what the model writes in a sandbox"),
        ("vf-own", {"kind": "mcp"}, "is a MCPEnv, which cannot be served: it starts servers"),
        ("vf-own", {"kind": "nothing"}, "returned dict, expected a verifiers Environment"),
        ("vf-broken", {}, "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("vf-taskset", {}, r"has no load_environment\nif it is a taskset .* type: --env verifiers/vf-taskset"),
    ],
)
def test_what_is_refused(package, args, message):
    with pytest.raises(ConfigError, match=message):
        environment_of(package)(args)


def test_splits_are_the_datasets():
    env = environment_of("vf-capitals")({"num_eval": 2})
    train, held_out = (env.tasks(split, None, env._upstream) for split in ("train", "eval"))
    assert [len(train), len(held_out)] == [4, 2]
    assert [message.role for message in train[0].messages] == ["system", "user"]
    assert train[0].messages[0].text.startswith("Answer in this form:")
    assert train[0].answer == "Paris" and train[0].id != held_out[0].id
    higher = environment_of("vf-higher")()
    assert higher.tasks("eval", None, higher._upstream)[1] == higher.tasks("train", None, higher._upstream)[1]


def test_one_load_serves_all_episodes_and_each_args_has_its_own():
    first, again, other = (environment_of("vf-capitals")(args) for args in ({}, {}, {"num_eval": 1}))
    assert first._upstream is again._upstream is not other._upstream


def test_a_dataset_that_is_made_anew_is_noticed():
    env = environment_of("vf-own")({"kind": "changes"})
    task = env.tasks("train", None, env._upstream)[0]
    task.prompt[0].content = "another"
    with pytest.raises(RuntimeError, match="not the same each time"):
        env.setup(task, env._upstream)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_reward_that_raises_is_no_verdict():
    """Upstream counts it as 0 and says so in its log."""
    episode, _ = played("vf-own", {"kind": "raises"}, 0, [say("4")])
    assert episode.status is Status.COMPLETED
    assert episode.score.value is None
    assert "broken raised ZeroDivisionError: division by zero" in episode.score.why
    output, _ = upstreams("vf-own", {"kind": "raises"}, 0, [say("4")])
    assert output["reward"] == 0.5


def test_an_environment_that_raises_is_no_rollout():
    episode, _ = played("vf-own", {"kind": "dies"}, 0, [say("a"), say("b")])
    assert episode.status is Status.ENVIRONMENT_ERROR
    assert "the service is gone" in episode.trajectory.error


def test_an_error_that_stops_upstream_is_no_rollout():
    episode, _ = played("vf-shop", {"stops": True}, 0, [call("price", 1, item="gold"), say("b")])
    assert episode.status is Status.ENVIRONMENT_ERROR
    assert "ended the rollout: ToolCallError (KeyError: 'gold')" in episode.trajectory.error
    assert episode.score.value is None


def test_an_environment_that_hangs_ends_at_the_deadline():
    episode, _ = played("vf-own", {"kind": "hangs"}, 0, [say("a"), say("b")], episode_seconds=1.0)
    assert episode.status is Status.TIMEOUT


def test_the_limit_of_turns_ends_upstreams_loop():
    episode, requests = played("vf-higher", {}, 0, [say("9")] * 9, max_turns=2)
    assert len(requests) == 2 and episode.status is Status.COMPLETED
    assert episode.metrics["turn_limit"] == 1.0
    assert episode.score.parts["won"] == 0.0 and episode.score.parts["num_turns"] == 2.0


def test_a_group_of_environments_does_not_take_the_signals():
    import signal

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    catalog.forget()
    environment_of("vf-own")({"kind": "group"})
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# --- upstream ---------------------------------------------------------------------------------------------------------


def test_upstream_has_the_names_that_this_package_uses():
    from verifiers.legacy.clients import Client
    from verifiers.legacy.envs.environment import Environment
    from verifiers.legacy.rubrics.rubric import Rubric

    now = f"verifiers {version('verifiers')} differs from {WRITTEN_FOR}, for which this package was written: "
    signatures = {
        Environment._run_rollout_state: ["self", "input", "client", "model", "sampling_args"],
        Environment._teardown: ["self"],
        Environment.build_dataset: ["self"],
        Environment.build_eval_dataset: ["self"],
        Client.get_response: ["self", "prompt", "model", "sampling_args", "tools", "kwargs"],
        Rubric.__init__: ["self", "funcs", "weights", "parser"],
    }
    for function, parameters in signatures.items():
        assert list(inspect.signature(function).parameters) == parameters, now + function.__qualname__
    source = inspect.getsource(importlib.import_module("verifiers.legacy.envs.environment"))
    for name in ("signal.", "atexit."):
        assert name in source, now + f"it no longer uses {name}"


def test_every_class_of_upstream_is_served_or_refused():
    """A new class of environment must be tried, or added to the refused ones."""
    root = Path(importlib.import_module("verifiers.legacy").__file__).parent / "envs"
    defined = {
        name
        for file in root.rglob("*.py")
        for name in re.findall(r"^class (\w*(?:Env|EnvGroup|Mixin))\b", file.read_text(), re.MULTILINE)
    }
    served = {"SingleTurnEnv", "MultiTurnEnv", "ToolEnv", "StatefulToolEnv", "EnvGroup", "GymEnv", "StepResetEnv"}
    served |= {"ReasoningGymEnv", "TextArenaEnv"}  # with the packages reasoning-gym and textarena
    derived = {"OpenCodeEnv", "OpenCodeQAEnv", "OpenCodeRLMEnv", "SandboxDebugEnv", "SWEDebugEnv", "HarborMCPMixin"}
    assert defined == served | derived | set(catalog.REFUSED), defined ^ (served | derived | set(catalog.REFUSED))


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", ["vf-capitals", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("vf-higher", "vf-shop"))]
)
def test_keeps_the_contract(package, packages):
    command = [sys.executable, "-m", "rollouts", "check", f"verifiers-v0/{package}", "--skip", "wheel", "--json"]
    variables = {**os.environ, "PYTHONPATH": str(packages)}
    done = forks.run(command, timeout=300, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
