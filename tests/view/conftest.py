"""Runs to look at, written as a run writes them."""

from __future__ import annotations

import json
from array import array

import pytest

from rollouts.runs.folder import CONFIG, RunFolder, episode_records
from rollouts.runs.token_files import Span, TokenTable
from rollouts.types import Episode, Message, Score, Segment, Status, Task, ToolCall, Trajectory
from rollouts.view.api import ViewAPI
from rollouts.view.catalog import Catalog

HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
PROMPT, REPLY = 2, 3


def episode(
    number: int, *, reward: float | None = None, reply: str = "4", status: Status = Status.COMPLETED
) -> Episode:
    """Rollout `number` of groups of four. The reward is the number of the rollout, over four."""
    reward = number % 4 / 4 if reward is None else reward
    tokens = [1, 75, 300 + number % 100, 20, 2]
    mask = [0.0] * PROMPT + [1.0] * REPLY
    segment = Segment(tokens, mask, [0.0, 0.0, -0.5, -0.25, -1.5], [-1, -1, 3, 3, 4], [(0, PROMPT)])
    task = Task(f"What is 2 + {number // 4}?", answer=2 + number // 4)
    call = ToolCall("calculator", {"expression": "2 + 2"})
    messages = [*task.messages, Message("assistant", "", [call]), Message("tool", "4"), Message("assistant", reply)]
    trajectory = Trajectory(task, messages, [segment], status)
    return Episode(
        (number // 4, number % 4), task, [trajectory], Score(reward, {"correct": reward}, "", {"correct": 1.0}), {}
    )


class Maker:
    """Makes runs in a directory."""

    def __init__(self, directory):
        self.directory = directory

    def run(
        self, name="first", *, episodes=(), steps=1, settings='mode = "rl"\nmodel = "tiny"\nseed = 0\n', ended=True
    ):
        """A run with these episodes in each of its steps and in its last evaluation."""
        folder = RunFolder(self.directory / name)
        folder.write_text(CONFIG, settings)
        episodes = list(episodes) or [episode(number) for number in range(8)]
        for step in range(steps):
            folder.write_trajectories(f"step_{step:06d}", self.records(episodes))
        folder.write_trajectories(f"eval_{steps:06d}", [each | {"temperature": 1.0} for each in self.records(episodes)])
        lines = [{"step": step, "reward/mean": step / 10, "policy/loss": -step} for step in range(steps)]
        folder.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        if ended:
            folder.write_json("summary.json", {"status": "done", "steps": steps})
        folder.close()
        return folder.path

    def records(self, episodes):
        """The lines of these episodes."""
        return [line for each in episodes for line in episode_records(each, advantage=0.5)]

    def tokens(self, run, name, table):
        """Write the values of tokens beside a file."""
        folder = RunFolder.reopen(run)
        folder.write_tokens(name, table)
        folder.close()


@pytest.fixture
def make(tmp_path):
    """A maker of runs in `tmp_path/runs`."""
    return Maker(tmp_path / "runs")


@pytest.fixture
def asked(make):
    """Asks the API of the runs that `make` made: `asked("/api/runs")`. RUN in a path is the run `first`."""
    apis = []

    def ask(path, query="", body=b"", method="GET"):
        apis.append(apis[0] if apis else ViewAPI(Catalog([make.directory])))
        quoted = str(make.directory / "first").replace("/", "%2F")
        return json.loads(apis[0].answer(method, path.replace("RUN", quoted), query, body))

    return ask


@pytest.fixture
def recorded(make):
    """A run whose first step has recorded tokens; line 1 has values at its three sampled tokens."""
    run = make.run()
    channels = {
        "position": array("I", [2, 3, 4]),
        "logprob": array("f", [-0.75, -0.25, -1.0]),
        "entropy": array("f", [0.5, 0.25, 0.125]),
        "clipped": array("B", [0, 1, 0]),
    }
    make.tokens(run, "step_000000", TokenTable([Span(1, 0, 0, 3)], channels))
    return run


@pytest.fixture
def make_episode():
    """The function that makes an episode."""
    return episode
