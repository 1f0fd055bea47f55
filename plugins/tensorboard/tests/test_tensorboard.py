"""Against the real tensorboardX, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rollouts_tensorboard import TensorBoardLogger

from rollouts.errors import UserError
from rollouts.loggers import MetricsLogger, SampleLogger, SampleSettings


def read_events(folder):
    """Every (step, tag, value) in the folder's event files; TensorBoard's reader needs protobuf only."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found = []
    for path in sorted(Path(folder).rglob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            found += [(event.step, value.tag, make_ndarray(value.tensor).item()) for value in event.summary.value]
    return found


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_scalars_and_settings_come_back(tmp_path):
    logger = TensorBoardLogger(tmp_path, {"env": "calculator"}, 0)
    assert isinstance(logger, MetricsLogger)
    logger.log({"reward/mean": 0.5, "policy/loss": float("nan")}, step=3)
    logger.log({"reward/mean": 0.75}, step=4)
    logger.add({"eval/reward_mean": 0.25}, step=3)  # of an evaluation that ended later
    logger.close()
    events = read_events(tmp_path / "tensorboard")
    assert [(step, value) for step, tag, value in events if tag == "reward/mean"] == [(3, 0.5), (4, 0.75)]
    assert [(step, value) for step, tag, value in events if tag == "eval/reward_mean"] == [(3, 0.25)]
    assert [math.isnan(value) for _, tag, value in events if tag == "policy/loss"] == [True]
    assert any(b"calculator" in value for _, tag, value in events if tag.startswith("settings"))


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_a_resumed_run_hides_the_steps_that_it_takes_again(tmp_path):
    """As TensorBoard itself reads the folder: one value a step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, steps in ((0, range(4)), (2, range(2, 5))):
        logger = TensorBoardLogger(tmp_path, {}, first_step)
        for step in steps:
            logger.log({"reward/mean": step / 8 + first_step}, step=step)
        logger.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [
        *((step, step / 8) for step in range(2)),
        *((step, step / 8 + 2) for step in range(2, 5)),
    ]


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_rollouts_are_texts_that_nothing_interprets(tmp_path):
    logger = TensorBoardLogger(tmp_path, {}, 0)
    assert isinstance(logger, SampleLogger) and logger.sample_settings == SampleSettings()
    rows = [{"group": 0, "conversation": "user: <script>\n\n# 2 + 2?", "reward": None, "why": "", "part/a": 0.5}] * 2
    logger.log_samples("samples", rows, step=10)
    logger.close()
    events = read_events(tmp_path / "tensorboard")
    texts = {tag: value.decode() for step, tag, value in events if step == 10}
    assert set(texts) == {"samples/0/text_summary", "samples/1/text_summary"}
    lines = texts["samples/0/text_summary"].splitlines()
    assert [line.strip() for line in lines] == ["group: 0", "part/a: 0.5", "", "user: <script>", "", "# 2 + 2?"]
    assert all(line.startswith("    ") for line in lines), "a block of code in Markdown, as it is"


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match=r"`pip install tensorboardX`"):
        TensorBoardLogger(tmp_path, {}, 0)


def test_importing_the_plugin_imports_no_library():
    code = "import sys, rollouts_tensorboard; assert not {'tensorboardX', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_the_entry_point_names_the_class():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["rollouts.loggers"] == {"tensorboard": "rollouts_tensorboard:TensorBoardLogger"}
