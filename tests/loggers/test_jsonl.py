from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.errors import OutputError
from rollouts.loggers import JSONLLogger, MetricsLogger


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_one_line_a_step_readable_before_close(tmp_path):
    logger = JSONLLogger(tmp_path, 0)
    assert isinstance(logger, MetricsLogger)
    logger.log({"reward/mean": 0.25, "rollout/turns": 2}, step=0)
    logger.log({"reward/mean": np.float32(0.5)}, step=1)
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "reward/mean": 0.25, "rollout/turns": 2},
        {"step": 1, "reward/mean": 0.5},
    ]
    logger.close()
    logger.close()


@given(metrics=st.dictionaries(st.text(min_size=1).filter(lambda name: name != "step"), st.floats() | st.integers()))
def test_any_numbers_come_back_and_what_json_lacks_is_null(tmp_path_factory, metrics):
    folder = tmp_path_factory.mktemp("run")
    logger = JSONLLogger(folder, 0)
    before = dict(metrics)
    logger.log(metrics, step=7)
    logger.close()
    (line,) = lines(folder / "metrics.jsonl")
    assert line.pop("step") == 7
    assert line == {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    assert list(line) == list(before) and list(metrics) == list(before)


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_an_existing_file_is_continued_and_a_cut_line_dropped(tmp_path, size):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "cut' + "x" * size)
    logger = JSONLLogger(tmp_path, 1)
    logger.log({"a": 1.0}, step=1)
    logger.close()
    assert lines(path) == [{"step": 0}, {"step": 1, "a": 1.0}]


@pytest.mark.parametrize("first_step", range(5))
def test_a_resumed_run_writes_its_steps_once(tmp_path, first_step):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "a": 0.1}}\n' for step in range(3)) + 'no json\n[1]\n{"a": 1}\n')
    logger = JSONLLogger(tmp_path, first_step)
    assert lines(path) == [{"step": step, "a": 0.1} for step in range(min(3, first_step))]
    logger.log({"a": 0.2}, step=first_step)
    logger.close()
    assert lines(path)[-1] == {"step": first_step, "a": 0.2}
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]
    kept = path.stat().st_ino
    JSONLLogger(tmp_path, first_step + 1).close()
    assert path.stat().st_ino == kept, "nothing to remove: the file is the same one"


def test_a_file_that_is_one_cut_line_starts_anew(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"st')
    logger = JSONLLogger(tmp_path, 0, file="m.jsonl")
    logger.log({}, step=0)
    logger.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 0}]


@pytest.mark.parametrize("value", ["0.5", None, [1.0]])
def test_what_is_no_number_is_named_and_leaves_no_half_line(tmp_path, value):
    logger = JSONLLogger(tmp_path, 0)
    with pytest.raises(TypeError, match=r"'reward/mean' must be a number"):
        logger.log({"a": 1.0, "reward/mean": value}, step=0)
    logger.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write metrics to .*file.*--out"):
        JSONLLogger(tmp_path / "file", 0)


def test_the_face_is_lazy_and_light():
    code = (
        "import sys, rollouts.loggers as face;"
        "heavy = {'torch', 'trio', 'httpx', 'rollouts.loggers.jsonl'} & set(sys.modules);"
        "assert not heavy, heavy; face.JSONLLogger; assert 'torch' not in sys.modules;"
        "assert face.__all__ == sorted(face.__all__) and all(getattr(face, name) for name in face.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_file_nothing_is_written(tmp_path):
    logger = JSONLLogger(tmp_path, 0, file=None)
    logger.log({"a": 1.0}, 0)
    logger.log({"b": 1.0}, 0)
    logger.add({"c": 1.0}, 0)
    logger.close()
    assert not list(tmp_path.iterdir())
