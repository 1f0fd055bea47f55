"""Tasks of Inspect score a reply as `inspect_ai.eval` does, and what cannot be served says why."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path

import forks
import pytest

pytest.importorskip("inspect_ai", reason="inspect-ai is not installed; to run these tests: make test-adapters")

from inspect_ai import eval as inspect_eval
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import value_to_float
from rollouts_inspect import Inspect, environment_of, loading
from rollouts_inspect.hooks import rollouts_find_component, rollouts_list_components

from rollouts.env.shared import shared_values
from rollouts.errors import ConfigError
from rollouts.inference.chatting import ChatReply
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Message, Status

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of streams in upstream
]

WRITTEN_FOR = "0.3.285"
FILE = str(Path(__file__).parent / "inspect_tasks.py")
REPLIES = [
    "1",
    "2",
    " The answer is 2.",
    "ANSWER: 1",
    "I add.\nANSWER: 2\n",
    "ANSWER: B",
    "ANSWER: A, B",
    "B",
    "",
    "2 is not 1, but 3",
    "zwölf \\boxed{2}",
]
SERVED = "plain anywhere equal overlap by_pattern reasoned templated chosen several partly tabled edited".split()


def played(name: str, index: int, reply: Message, **settings):
    """The episode of a sample with this reply, and the request of the model."""
    requests = []

    def answer(request):
        requests.append(request)
        return ChatReply(reply, "stop")

    env = {"name": f"inspect/{FILE}@{name}", **settings}
    with shared_values(), play_plan({"env": env, "eval_tasks": 1}) as plan:
        task = environment_of(f"{FILE}@{name}")(**settings).tasks("train", None)[index]
        return play_episode(plan, task, 0, answer), requests


def upstreams(name: str, replies: list[str], folder: Path):
    """For each reply, the samples of `inspect_ai.eval` with a model that says it."""
    logs = []
    for reply in replies:
        count = len(loading.load(f"{FILE}@{name}", "{}").samples)
        outputs = [ModelOutput.from_content("mockllm/model", reply) for _ in range(count)]
        for output in outputs:
            output.usage = ModelUsage()  # else it is counted with words that are downloaded
        model = get_model("mockllm/model", custom_outputs=outputs, memoize=False)
        (log,) = inspect_eval(f"{FILE}@{name}", model=model, log_dir=str(folder), display="none", log_level="error")
        assert log.status == "success", log.error
        logs.append(sorted(log.samples, key=lambda sample: str(sample.id)))
    return logs


def floats(scores) -> dict[str, float]:
    """Upstream's scores as numbers, by the names that ours have."""
    found = {}
    for name, score in scores.items():
        value = score.value
        flat = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: value_to_float()(each) for key, each in flat.items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}


@pytest.mark.equals_upstream("inspect")
@pytest.mark.parametrize("name", SERVED)
def test_equals_upstream(name, tmp_path):
    """Every sample with every reply: the prompt, and all scores."""
    environment = environment_of(f"{FILE}@{name}")()
    tasks = sorted(environment.tasks("train", None), key=lambda task: task.id)
    for reply, samples in zip(REPLIES, upstreams(name, REPLIES, tmp_path), strict=True):
        for task, sample in zip(tasks, samples, strict=True):
            theirs = [(message.role, message.text) for message in sample.messages]
            prompt = [(message.role, message.text) for message in task.messages]
            assert theirs[: len(prompt)] == prompt and theirs[len(prompt)][0] == "assistant"
            trajectory = _trajectory(task, reply)
            score, scores = environment.upstream(task, trajectory), floats(sample.scores)
            assert score.value == pytest.approx(scores.pop(next(iter(scores)))), (reply, score.why)
            assert (score.parts or {}) == pytest.approx(scores), reply


def _trajectory(task, reply: str):
    from rollouts.types import Trajectory

    return Trajectory(task, [*task.messages, Message("assistant", reply)], status=Status.COMPLETED)


def test_an_episode_of_a_run():
    episode, (request,) = played("reasoned", 1, Message("assistant", "So.\n\nANSWER: 2", reasoning="1 + 1"))
    (system, user) = request.messages
    assert (system.role, system.text) == ("system", "Be brief.")
    assert user.text.startswith("\nWhat is 1 + 1?\n\nBefore answering, reason")
    assert episode.score.value == 1.0 and episode.trajectory.status is Status.COMPLETED
    assert episode.task.answer == "2" and episode.task.id == "sum-1"
    wrong, _ = played("reasoned", 1, Message("assistant", "So.\n\nANSWER: 3"))
    assert wrong.score.value == 0.0, "the control"


def test_one_of_several_scores_is_the_reward():
    reply = Message("assistant", "It is 1, I think.")
    episode, _ = played("several", 0, reply)
    assert episode.score.value == 1.0
    assert episode.score.parts == {"upstream": 1.0, "table.length": 17.0, "table.right": 1.0, "match": 0.0}
    chosen, _ = played("several", 0, reply, score="table.length")
    assert chosen.score.value == 17.0
    unknown, _ = played("several", 0, reply, score="length")
    assert unknown.score.value is None and "there is no score length; type: --env.score includes" in unknown.score.why


@pytest.mark.parametrize("name", ["partly", "tabled"])
def test_a_reply_that_upstream_does_not_score_has_no_reward(name):
    episode, _ = played(name, 0, Message("assistant", "skip"))
    assert episode.score.value is None and episode.trajectory.status is Status.COMPLETED
    assert "gave no score" in episode.score.why or "left the score" in episode.score.why


def test_arguments_of_a_task():
    episode, _ = played("by_pattern", 0, Message("assistant", "RESULT: 1"), args={"word": "RESULT"})
    assert episode.score.value == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("itself", "its solver failed: "),
        ("twice", "its solver asks the model more than once"),
        ("never", "its solver does not ask the model with `generate`"),
        ("tools", "its solver gives the model tools"),
        ("graded", "its scorer model_graded_qa asks a model\nto judge with a model, see docs/judge.md"),
        ("boxed", "it has a sandbox"),
        ("filed", "its samples have files or a setup"),
        ("unscored", "it has no scorer"),
        ("empty", "has no samples"),
        ("raises", "is no task that can be loaded: ValueError: no data here"),
        ("absent", "is no task that can be loaded|names 0 tasks"),
    ],
)
def test_what_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        environment_of(f"{FILE}@{name}")()


def test_a_solver_that_asks_another_model_has_no_verdict():
    episode, _ = played("critic", 0, Message("assistant", "1"))
    assert episode.score.value is None and "model" in episode.score.why


def test_names():
    assert issubclass(rollouts_find_component("environments", f"inspect/{FILE}@plain"), Inspect)
    assert rollouts_find_component("rewards", "inspect/a/b") is None
    assert rollouts_find_component("environments", "inspect/a") is None
    assert all(each.startswith("inspect/") for each in rollouts_list_components("environments"))
    with pytest.raises(ConfigError, match=r"there is no file absent\.py"):
        environment_of("absent.py@a")()
    with pytest.raises(ConfigError, match=r"no argument --env\.args\.wodr\ndid you mean: word\?\nit takes: word"):
        environment_of(f"{FILE}@by_pattern")(args={"wodr": 1})


def test_tasks_of_a_package_are_found_by_its_entry_point(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"  # Inspect looks for this name
    site.mkdir()
    (site / "tiny_evals.py").write_text(
        "from inspect_ai import Task, task\nfrom inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import match\n\n"
        "@task\ndef hello():\n    return Task(dataset=[Sample(input='Say hi.', target='hi')], scorer=match())\n"
    )
    info = site / "tiny_evals-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny_evals\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[inspect_ai]\ntiny_evals = tiny_evals\n")
    monkeypatch.syspath_prepend(str(site))
    assert "inspect/tiny_evals/hello" in rollouts_list_components("environments")
    (task,) = environment_of("tiny_evals/hello")().tasks("train", None)
    assert [message.text for message in task.messages] == ["Say hi."] and task.answer == "hi"


USED = {
    "inspect_ai._util.registry:registry_find": "predicate",
    "inspect_ai._util.registry:registry_info": "o",
    "inspect_ai._util.registry:registry_lookup": "type name",
    "inspect_ai._util.registry:is_registry_object": "o",
    "inspect_ai._eval.loader:load_tasks": "task_specs task_args",
    "inspect_ai.scorer._scorer:unique_scorer_name": "scorer already_used_names",
    "inspect_ai.scorer:value_to_float": "",
    "inspect_ai.scorer:Target": "target",
    "inspect_ai.solver:TaskState": "model sample_id epoch input messages target choices metadata",
    "inspect_ai.model._model_output:ChatCompletionChoice": "message stop_reason",
    "inspect_ai.model:ModelOutput": "model choices",
    "inspect_ai.model:ModelName": "model",
    "inspect_ai.model:ChatMessageUser": "content source",
    "inspect_ai:Task": "dataset setup solver scorer sandbox approval sentinel",
    "inspect_ai.dataset:Sample": "input target id choices metadata sandbox files setup",
}
"""What this package uses of Inspect, some of it private, with the parameters that it passes or reads."""


def test_upstream_has_what_this_package_was_written_for():
    now = f"inspect-ai {version('inspect-ai')} differs from {WRITTEN_FOR}, for which this package was written: "
    for place, parameters in USED.items():
        module, _, name = place.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            pytest.fail(f"{now}there is no {place}")
        missing = [each for each in parameters.split() if each not in inspect.signature(found).parameters]
        assert not missing, f"{now}{place} takes no {', '.join(missing)}"


@pytest.mark.slow
def test_keeps_the_contract():
    command = [sys.executable, "-m", "rollouts", "check", f"inspect/{FILE}@plain", "--skip", "wheel", "--json"]
    done = forks.run(command, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)
