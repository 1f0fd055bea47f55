"""Every kind of taskset is played as upstream plays it with an OpenAI server: the same requests, rewards and end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import forks
import pytest

pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed; to run these tests: make test-adapters")

import verifiers

if hasattr(verifiers, "LegacyAliasFinder"):
    pytest.skip("verifiers 0.3 is installed; to run these tests: make test-adapters", allow_module_level=True)

from rollouts_verifiers import Verifiers, catalog, environment_of
from rollouts_verifiers.hooks import rollouts_find_component, rollouts_list_components
from rollouts_verifiers.programs import prepare_chat_program
from verifiers.v1.utils.loaders import builtin_harness_ids

from rollouts import Message
from rollouts.env.shared import shared_values
from rollouts.errors import ConfigError
from rollouts.inference.chatting import ChatReply
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Status, ToolCall

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of httpx, for how upstream's program uses it
]

WRITTEN_FOR = "0.4.0"
PACKAGES = Path(__file__).parent / "packages"
BROKEN = {
    "two_v1": """
import verifiers.v1 as vf

__all__ = ["One", "Other"]
One, Other = (type(name, (vf.Taskset,), {}) for name in __all__)
""",
    "none_v1": "__all__ = []\n",
    "raises_v1": "1 / 0\n",
    "image_v1": """
import verifiers.v1 as vf

__all__ = ["Set"]


class Task(vf.Task[vf.TaskData]):
    pass


class Set(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(vf.TaskData(prompt="x", image="ubuntu"), self.config.task)]
""",
    "failing_v1": """
import asyncio
from typing import Literal

import verifiers.v1 as vf

__all__ = ["Set"]


class Task(vf.Task[vf.TaskData]):
    async def setup(self, trace):
        if self.data.name == "dies":
            raise RuntimeError("the service is gone")
        if self.data.name == "hangs":
            await asyncio.sleep(3600)


class Config(vf.TasksetConfig):
    kind: Literal["dies", "hangs", "fine"] = "fine"


class Set(vf.Taskset[Task, Config]):
    def load(self):
        return [Task(vf.TaskData(prompt="x", name=self.config.kind), self.config.task)]
""",
    "pair_v1": """
import verifiers.v1 as vf

__all__ = ["PairEnv", "Set"]


class Task(vf.Task[vf.TaskData]):
    pass


class Set(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(vf.TaskData(prompt="x"), self.config.task)]


class PairConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        pass
""",
}


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory):
    """The packages, as pip installs them. Tool servers are processes that import them too."""
    site = tmp_path_factory.mktemp("site")
    for folder in PACKAGES.iterdir():
        (site / f"{folder.name}.py").write_text((folder / f"{folder.name}.py").read_text())
        info = site / f"{folder.name}-0.1.0.dist-info"
        info.mkdir()
        name = folder.name.replace("_", "-")
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\nRequires-Dist: verifiers\n"
        )
    for name, code in BROKEN.items():
        (site / f"{name}.py").write_text(code)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        yield site
    sys.path.remove(str(site))


def call(name: str, number: int = 0, **arguments) -> Message:
    return Message("assistant", tool_calls=[ToolCall(name, arguments, id=f"c{number}")])


def say(text: str) -> Message:
    return Message("assistant", text)


both = [ToolCall("adder_add", {"first": 1, "second": 40}, id="a"), ToolCall("basket_keep", {"number": 41}, id="b")]
unread = Message("assistant", tool_calls=[ToolCall("adder_add", error="not valid JSON: first=", id="x")])
thinks = Message("assistant", "0", reasoning="I add.")
basket = {"task": {"basket": True}}

CASES = [
    ("sums-v1", {}, 0, [say("0")]),
    ("sums-v1", {}, 0, [thinks]),
    ("sums-v1", {}, 3, [say("six, please")]),
    ("sums-v1", {"num_tasks": 1, "system": None}, 0, [say("")]),
    ("adder-v1", {}, 0, [call("adder_add", 1, first=0, second=40), say("40")]),
    ("adder-v1", {}, 1, [call("adder_fail", 1), call("steal", 2), unread, call("adder_add", 3, first="x"), say("41")]),
    ("adder-v1", {}, 1, [call("adder_add", 1, first=1, second=1), Message("assistant", "I give up", tool_calls=both)]),
    ("adder-v1", {}, 0, [call("adder_add", n, first=0, second=n) for n in range(3)]),
    ("adder-v1", basket, 1, [Message("assistant", "Both.", tool_calls=both), say("41")]),
    ("guess-v1", {}, 3, [say("1"), say("9"), say("3")]),
    ("guess-v1", {"largest": 2}, 3, [say("5"), say("a")]),
]

shell = [call("bash", 1, command="echo 4 > sum.txt; cat sum.txt"), say("4")]
PROGRAMS = [  # with the harness, its config, and how many conversations the model has
    ("sums-v1", {}, 2, [say("2"), say("so it is"), say("4")], "loop-v1", {}, 2),
    ("sums-v1", {}, 1, [say("2"), say("so it is")], "loop-v1", {"tries": 0}, 2),
    ("sums-v1", {}, 2, shell, "bash", {"edit": False}, 1),
    ("sums-v1", {"system": None}, 2, [say("4")], "null", {}, 1),
    ("adder-v1", {}, 1, [call("adder_add", 1, first=1, second=40), shell[0], say("41")], "bash", {}, 1),
]


class Script:
    """An OpenAI server that streams these replies, and then says that the context is full."""

    def __init__(self, replies: list[Message]) -> None:
        self.left, self.seen = list(replies), list[dict]()

    @contextlib.contextmanager
    def served(self) -> Iterator[str]:
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                script.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, kind, body = script.answer(script.seen[-1].get("stream", False))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.send_error(404)

            def log_message(self, *_: object) -> None:
                """Nothing is printed."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}/v1"
            server.shutdown()
            thread.join()

    def answer(self, is_stream: bool = True) -> tuple[int, str, bytes]:
        if not self.left:
            return 400, "application/json", b'{"error": {"message": "maximum context length", "code": 400}}'
        said = self.left.pop(0)
        delta = {"role": "assistant", "content": said.text}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.tool_calls:
            delta["tool_calls"] = [
                {
                    "index": place,
                    "id": each.id,
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.error or json.dumps(each.arguments)},
                }
                for place, each in enumerate(said.tool_calls)
            ]
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
        end = "tool_calls" if said.tool_calls else "stop"
        if not is_stream:
            choice = {"index": 0, "message": delta, "finish_reason": end}
            whole = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
            return 200, "application/json", json.dumps(whole).encode()
        chunks = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": end}]},
        ]
        lines = [f"data: {json.dumps(each)}\n\n" for each in chunks]
        return 200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode()


def upstreams(taskset: str, config: dict, index: int, replies: list[Message], *harness):
    """The episode of upstream's environment with its own client, and what its server saw."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    script = Script(replies)

    async def run(url: str):
        env = catalog.make(taskset, config, *harness)
        task = next(each for each in env.taskset if each.data.idx == index)
        async with env.serving():
            return await env.run_episode(task, ModelContext(model="policy", client=EvalClientConfig(base_url=url)))

    with script.served() as url:
        return asyncio.run(run(url)), script.seen


def played(taskset: str, config: dict, index: int, replies: list[Message], **settings):
    """The episode of a run, and its requests."""
    left, requests = list(replies), []

    def reply(request):
        requests.append(request)
        return ChatReply(left.pop(0), "stop") if left else ChatReply(Message("assistant"), "context", detail="over")

    given = {"env": {"name": f"verifiers/{taskset}", "config": config}, "max_turns": 50, "eval_tasks": 1, **settings}
    with shared_values(), play_plan({**given, "max_tokens": 10**6}) as plan:
        (env,) = plan.environments
        stream = env.draw("train", None) if index else iter(plan.eval_tasks())
        task = next(each for each in stream if each.info["idx"] == index)
        return play_episode(plan, task, 0, reply), requests


def flat(message) -> tuple:
    """What both forms of a message have."""
    if isinstance(message, Message):
        calls = [(each.name, each.error or each.arguments) for each in message.tool_calls]
        return message.role, message.text, calls
    calls = [
        (each["function"]["name"], _read(each["function"]["arguments"])) for each in message.get("tool_calls") or []
    ]
    return message["role"], message.get("content") or "", calls


def _read(arguments: str):
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize(("taskset", "config", "index", "replies"), CASES)
def test_equals_upstream(taskset, config, index, replies):
    theirs, seen = upstreams(taskset, config, index, replies)
    (trace,) = theirs.traces
    episode, requests = played(taskset, config, index, replies)
    assert [list(map(flat, each.messages)) for each in requests] == [list(map(flat, each["messages"])) for each in seen]
    assert [each.tools for each in requests] == [each.get("tools", []) for each in seen]
    assert episode.score.value == pytest.approx(trace.reward)
    rewards = {name: each.score for name, each in trace.rewards.items()}
    assert episode.score.parts == pytest.approx({"score": trace.reward, **rewards, **trace.metrics})
    assert episode.score.why == f"score: {trace.stop_condition}"
    assert episode.metrics["metric/cut_off"] == float(trace.is_truncated)
    assert episode.metrics["turns"] == trace.num_turns


@pytest.mark.parametrize(
    ("taskset", "config", "index", "replies", "harness", "of_harness", "count"),
    PROGRAMS,
    ids=[f"{case[4]}-{case[0]}-{case[2]}" for case in PROGRAMS],
)
def test_a_harness_equals_upstream(taskset, config, index, replies, harness, of_harness, count):
    prepare_chat_program()
    theirs, seen = upstreams(taskset, config, index, replies, harness, of_harness)
    (trace,) = theirs.traces
    assert trace.ok, trace.errors
    own = {"name": f"verifiers/{taskset}", "config": config, "harness": harness, "harness_config": of_harness}
    episode, requests = played(taskset, config, index, replies, env=own)
    assert [list(map(flat, each.messages)) for each in requests] == [list(map(flat, each["messages"])) for each in seen]
    assert [each.tools for each in requests] == [each.get("tools", []) for each in seen]
    assert len(episode.trajectories) == count, "a continued conversation is one"
    rewards = {name: each.score for name, each in trace.rewards.items()}
    assert episode.score.parts == pytest.approx({"score": trace.reward, **rewards, **trace.metrics})
    assert episode.metrics["turns"] == trace.num_turns == len(replies)
    assert episode.trajectory.last_text == replies[-1].text, "the conversation with the last reply is judged"


# --- names and settings -----------------------------------------------------------------------------------------------


def test_names():
    own = [f"verifiers/{name}-v1" for name in ("adder", "boxes", "guess", "sums")]
    shipped = [f"verifiers/{name}" for name in ("harbor", "nemo-gym", "openenv", "textarena")]
    assert list(rollouts_list_components("environments")) == sorted([*own, *shipped])
    assert rollouts_list_components("rewards") is None
    assert issubclass(rollouts_find_component("environments", "verifiers/sums-v1"), Verifiers)
    assert environment_of("somebody/sums-v1@1.0").taskset == "somebody/sums-v1@1.0", "a name of the hub"
    assert environment_of("no-such-taskset") is None


@pytest.mark.parametrize(
    ("taskset", "config", "message"),
    [
        ("sums-v1", {"num_task": 1}, r"no field --env.config.num_task\ndid you mean: num_tasks"),
        ("sums-v1", {"num_tasks": "two"}, "refuses its config .*: num_tasks: Input should be a valid integer"),
        ("boxes-v1", {}, r"need a container \(NEEDS_CONTAINER\)"),
        ("harbor", {}, r"need a container \(NEEDS_CONTAINER\)"),
        ("textarena", {}, "textarena requires nltk and textarena"),
        ("openenv", {}, "refuses its config {}: .*pass `env` or `base_url`"),
        ("nemo-gym", {}, "refuses its config {}: .*dataset: Field required"),
        ("two-v1", {}, "exports 2 Taskset subclasses"),
        ("none-v1", {}, "exports no Taskset subclass"),
        ("raises-v1", {}, "ZeroDivisionError: division by zero"),
        ("pair-v1", {}, r"it has several agents \(one, other\)"),
    ],
)
def test_what_is_refused(taskset, config, message):
    with pytest.raises(ConfigError, match=message):
        environment_of(taskset)(config)


@pytest.mark.parametrize(
    ("taskset", "harness", "config", "message"),
    [
        *(
            ("sums-v1", name, {}, r"it needs a container \(NEEDS_CONTAINER\)(.|\n)*--env agent --env.command")
            for name in sorted(set(builtin_harness_ids()) - {"bash", "null", "node", "utils"})
        ),
        ("sums-v1", "bahs", {}, "no harness that can be imported: ModuleNotFoundError: .*built-in harnesses are: bash"),
        ("sums-v1", "sums-v1", {}, "exports no Harness subclass"),
        ("sums-v1", "bash", {"edti": 1}, "no field --env.harness-config.edti\ndid you mean: edit"),
        ("sums-v1", "loop-v1", {"tries": "x"}, "or that of its harness .*tries: Input should be a valid integer"),
        ("adder-v1", "loop-v1", {}, r"the taskset has tools, and this harness takes none \(SUPPORTS_MCP\)"),
        ("sums-v1", "", {"tries": 1}, "type --env.harness NAME too"),
    ],
)
def test_which_harnesses_are_refused(taskset, harness, config, message):
    with pytest.raises(ConfigError, match=message):
        environment_of(taskset)({}, harness, config)


def test_a_task_that_needs_an_image_is_refused():
    with pytest.raises(Exception, match="task 0 needs a container of the image ubuntu"):
        played("image-v1", {}, 0, [say("a")])


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_score_that_raises_is_no_verdict():
    episode, _ = played("sums-v1", {}, 0, [say("crash")])
    assert episode.status is Status.COMPLETED
    assert episode.score.value is None
    assert "ValueError: no characters" in episode.score.why


def test_a_task_without_rewards_is_not_judged():
    episode, _ = played("failing-v1", {}, 0, [say("x")])
    assert (episode.status, episode.score.value) == (Status.COMPLETED, None)
    assert "the task has no reward" in episode.score.why


def test_a_hook_that_raises_is_no_rollout():
    episode, _ = played("failing-v1", {"kind": "dies"}, 0, [say("x")])
    assert episode.status is Status.ENVIRONMENT_ERROR
    assert "TaskError: task setup: RuntimeError: the service is gone" in episode.trajectory.error


def test_a_hook_that_hangs_ends_at_the_deadline():
    episode, _ = played("failing-v1", {"kind": "hangs"}, 0, [say("x")], episode_seconds=1.0)
    assert episode.status is Status.TIMEOUT


def test_the_limit_of_turns_ends_upstreams_rollout():
    episode, requests = played("guess-v1", {}, 0, [say("9")] * 9, max_turns=2)
    assert len(requests) == 2 and episode.status is Status.COMPLETED, episode.trajectory.error
    assert (episode.score.value, episode.metrics["turn_limit"]) == (0.0, 1.0)


LOOP = {"name": "verifiers/sums-v1", "harness": "loop-v1", "harness_config": {"tries": 5}}


def test_a_limit_of_the_run_ends_a_harness_and_what_there_is_is_scored():
    episode, requests = played("sums-v1", {}, 0, [say("0")] * 9, env=LOOP, max_turns=3)
    assert len(requests) == 3 and episode.status is Status.COMPLETED, episode.trajectory.error
    assert episode.score.parts["exact"] == 1.0 and episode.score.why == "score: max_turns"
    assert (episode.metrics["metric/cut_off"], episode.metrics["turn_limit"]) == (1.0, 1.0)


def test_a_harness_that_fails_is_no_rollout():
    broken = {**LOOP, "harness_config": {"tries": 5, "env": {"PYTHONHOME": "/nowhere"}}}
    episode, requests = played("sums-v1", {}, 0, [], env=broken)
    assert not requests and episode.status is Status.ENVIRONMENT_ERROR
    assert "HarnessError: harness 'loop-v1' exited 1" in episode.trajectory.error


def test_a_harness_may_speak_to_the_model_as_to_anthropic():
    spoken = {**LOOP, "harness_config": {"tries": 1, "api": "messages"}}
    episode, _ = played("sums-v1", {}, 2, [say("2"), say("so it is"), say("4")], env=spoken)
    assert episode.status is Status.COMPLETED and episode.score.parts["exact"] == 1.0
    assert len(episode.trajectories) == 2 and episode.trajectory.turns == 2


# --- upstream ---------------------------------------------------------------------------------------------------------


def test_upstream_has_the_names_that_this_package_uses():
    from verifiers.v1.clients import Client
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.env import Env
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils import launch
    from verifiers.v1.interception import InterceptionServer
    from verifiers.v1.runtimes import SubprocessRuntime
    from verifiers.v1.trace import Trace

    now = f"verifiers {version('verifiers')} differs from {WRITTEN_FOR}, for which this package was written: "
    signatures = {
        Env.run_episode: ["self", "task", "ctx", "on_trace", "on_discard"],
        Client.get_response: ["self", "dialect", "body", "sampling", "session_id", "turn", "headers"],
        NullHarness.launch: "self ctx trace runtime endpoint secret mcp_urls data tool_interception_url".split(),
        InterceptionServer._client: ["self", "config"],
        EvalClient.relay: ["self", "dialect", "body", "session_id", "headers"],
        Trace.stop: ["self", "condition", "override"],
    }
    for function, parameters in signatures.items():
        assert list(inspect.signature(function).parameters) == parameters, now + function.__qualname__
    source = inspect.getsource(launch.launch_chat_program)
    for name in ("runtime.write(", "runtime.prepare_uv_script(", "runtime.run_program(", "--initial-messages-file="):
        assert name in source, now + f"its launcher has no {name}"
    assert isinstance(SubprocessRuntime._interpreters, dict) and SubprocessRuntime.scripts_dir
    assert "def parse_args" in launch.CHAT_PROGRAM_SOURCE and "async def main" in launch.CHAT_PROGRAM_SOURCE, now


@pytest.mark.slow
@pytest.mark.parametrize(
    ("taskset", "skipped"),
    [("sums-v1", []), pytest.param("guess-v1", ["--skip", "seeds-differ"], marks=pytest.mark.nightly)],
)
def test_keeps_the_contract(taskset, skipped, packages):
    """An infinite taskset of upstream knows no seed: its tasks are the same in every run."""
    command = [sys.executable, "-m", "rollouts", "check", f"verifiers/{taskset}", "--skip", "wheel", *skipped, "--json"]
    variables = {**os.environ, "PYTHONPATH": str(packages)}
    done = forks.run(command, timeout=300, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
