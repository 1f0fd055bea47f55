"""The console logger: which steps have a line, which numbers it has, and an output that is gone."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from rollouts.config.flags import take_dotted_flags
from rollouts.config.merging import merge
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError
from rollouts.loggers import ConsoleLogger, MetricsLogger
from rollouts.plugins import read_signature
from rollouts.plugins.signature import convert_settings

METRICS = {"reward/mean": 0.5, "reward/std": 0.25, "policy/loss": -0.25, "perf/gen_tok_s": 51012.4}


def printed(capsys, logger, steps=8):
    for step in range(steps):
        logger.log(METRICS, step)
    logger.log({"eval/reward_mean": 0.75, "eval/greedy_mean": 1.0}, steps - 1)
    logger.close()
    logger.close()
    return capsys.readouterr().out.splitlines()


def test_a_line_for_each_step_with_the_numbers_of_the_runs_own_lines(capsys):
    logger = ConsoleLogger({"steps": 8})
    assert isinstance(logger, MetricsLogger)
    lines = printed(capsys, logger)
    assert lines[:2] == [f"step {step}/8  reward 0.500  loss -0.2500  gen tok/s 51012" for step in (1, 2)]
    assert lines[8:] == ["step 8/8  held-out 0.750  held-out, greedy 1.000"] and len(lines) == 9


def test_metrics_are_chosen_by_patterns_in_their_order(capsys):
    lines = printed(capsys, ConsoleLogger({"steps": 8}, metrics="perf/*, reward/*,eval/reward_mean"))
    assert lines[0] == "step 1/8  perf/gen_tok_s 51012  reward/mean 0.5  reward/std 0.25"
    assert lines[-1] == "step 8/8  eval/reward_mean 0.75"


def test_fewer_lines_still_have_the_first_and_the_last_step(capsys):
    lines = printed(capsys, ConsoleLogger({"steps": 8}, every=3))
    assert [line.split()[1] for line in lines] == ["1/8", "3/8", "6/8", "8/8", "8/8"]


def test_lines_begin_with_the_time_if_they_should(capsys):
    (line, *_) = printed(capsys, ConsoleLogger({"steps": 8}, time=True))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d  step 1/8  reward 0.500  .*", line)


def test_a_pattern_that_fits_nothing_is_named_at_the_end(capsys):
    *_, last = printed(capsys, ConsoleLogger({"steps": 8}, metrics="reward/mean,policy/los"))
    assert last == "--logger.console.metrics: no metric fits policy/los; did you mean: policy/loss?"


def test_names_of_metrics_are_no_commands_to_a_terminal(capsys):
    ConsoleLogger({}, metrics="*").log({"reward_part/\x1b[2J\u202e": 1.0}, 0)
    assert capsys.readouterr().out == "step 1  reward_part/\\x1b[2J\\u202e 1\n"


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [Full(), io.StringIO()])
def test_an_output_that_is_gone_ends_no_run(stream):
    logger = ConsoleLogger({"steps": 2})
    if not isinstance(stream, Full):
        stream.close()
    with contextlib.redirect_stdout(stream):
        logger.log(METRICS, 0)
        logger.log(METRICS, 1)
        logger.close()


def test_flags_are_settings():
    flags = [
        "--logger.console.metrics",
        "reward/*,eval/*",
        "--logger.console.every",
        "10",
        "--logger.console.time",
        "true",
    ]
    _, given = take_dotted_flags(flags)
    (_, chosen) = resolve(merge({"logger": ["console"]}, given)).components["logger"]
    settings = convert_settings(read_signature(ConsoleLogger, "loggers"), chosen.settings, "logger console")
    assert settings == {"metrics": "reward/*,eval/*", "every": 10, "time": True}


def test_never_is_refused():
    with pytest.raises(ConfigError, match="every 0: expected 1 or more"):
        ConsoleLogger({}, every=0)


def test_an_evaluation_that_ended_later_has_a_line_of_its_step(capsys):
    logger = ConsoleLogger({"steps": 9})
    logger.log({"reward/mean": 0.5}, step=3)
    logger.add({"eval/reward_mean": 0.25}, step=1)
    assert capsys.readouterr().out.splitlines()[-1] == "step 2/9  held-out 0.250"
