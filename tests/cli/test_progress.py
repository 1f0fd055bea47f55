"""Progress: plain lines where there is no terminal, a line that moves where there is one, a table at the end."""

from __future__ import annotations

import functools
import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from rollouts.plugins.manager import PluginFault
from rollouts.runs.panel import TerminalScreen
from rollouts.runs.plan import title
from rollouts.runs.progress import CHARACTERS_MAX, Progress, _comparison_table, conversation_lines
from rollouts.training.rollout_gen.groups import Group
from rollouts.types import Episode, Message, Score, Status, Task, ToolCall, Trajectory

METRICS = {"reward/mean": 0.5, "policy/loss": -0.25, "policy/entropy": 1.0, "perf/gen_tok_s": 1234.0}
EVALUATION = {"reward_mean": 0.25, "greedy_mean": None, "parts": {"right": 0.25, "new": 1.0}, "tasks": 16, "judged": 16}


def plan(**changed):
    values = {"steps": 4, "prompts_per_step": 8, "samples_per_prompt": 8, "mode": "rl", "lora_rank": 0,
              "lora_per_role": False, "model": "tiny", "seed": 7, "from_run": ()}  # fmt: skip
    names = {"loss": SimpleNamespace(name="grpo")}
    settings = SimpleNamespace(**values | changed)
    settings.samples = settings.mode == "rl"
    return SimpleNamespace(settings=settings, one=names.__getitem__, env_name="calculator", lr=3e-4)


def groups():
    task = Task("2 * 2? [bold]")
    call = ToolCall("calculator", {"expression": "2 * 2"})
    messages = [*task.messages, Message("assistant", "", tool_calls=[call]), Message("tool", "4")]
    trajectory = Trajectory(task, messages, status=Status.COMPLETED)
    return [Group(0, task, (Episode((0, 0), task, [trajectory], Score(1.0), {}),))]


def watch(*, terminal=False, status="done", steps=4, first=0, checkpoint=None, more=None, **changed):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, height=40, highlight=False, soft_wrap=True)
    progress = Progress(console, functools.partial(TerminalScreen, console) if terminal else None)
    progress.begin(title(plan(steps=steps, **changed)), steps, Path("runs/x"), ["the template drops thinking"])
    progress.phase("generating", 0, 64)
    if not first:
        progress.evaluation("before", EVALUATION)
    for step in range(first, steps):
        progress.step(step, METRICS, groups())
    progress.evaluation("after", EVALUATION | {"reward_mean": 0.75})
    summary = {
        "status": status,
        "steps": steps,
        "wall_seconds": 12.0,
        "cpu_seconds": 9.0,
        "evaluation": {"before": EVALUATION, "after": EVALUATION | {"reward_mean": 0.75, "parts": {"right": 0.75}}},
    }
    summary |= {"checkpoint": checkpoint} if checkpoint else {}
    summary |= {} if more is None else more
    progress.end(summary | ({"resumed_from": first} if first else {}))
    return stream.getvalue()


def test_a_resumed_run_counts_what_this_process_does():
    text = watch(first=2, steps=100)
    assert "step 3/100" in text and "step 2/100" not in text
    assert "98 more steps in 12 s" in text and "│ reward, sampled │  0.250 │ 0.750 │" in text


def test_plain_lines():
    text = watch()
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert lines[:4] == [
        "calculator · grpo · tiny · 4 steps of 8 prompts × 8 rollouts · lr 0.0003 · seed 7"
        " · tiny is the package's toy model: give another with --model",
        "writing to runs/x",
        "note: the template drops thinking",
        "held-out, before: sampled 0.250, greedy – (16 tasks)",
    ]
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert "reward 0.500  loss -0.2500  entropy 1.000  gen tok/s 1234" in steps[0]
    assert steps[-1].endswith("0:00 left")
    assert lines[-1] == "4 steps in 12 s (9 s of CPU) · runs/x"


@pytest.mark.parametrize("mode", ["rl", "sft"])
def test_the_last_line_says_what_to_type_next(mode):
    line = "next: rollouts chat runs/x, rollouts eval runs/x, rollouts export runs/x models/x"
    assert watch(mode=mode, checkpoint="checkpoints/step_000004").splitlines()[-1] == line
    assert "rollouts chat" not in watch(mode=mode)


def test_the_last_line_of_a_phase_names_the_whole_run():
    line = "next: rollouts chat runs/both, rollouts eval runs/both, rollouts export runs/both models/both"
    assert watch(checkpoint="checkpoints/step_000004", more={"whole": "runs/both"}).splitlines()[-1] == line
    stopped = watch(more={"whole": "runs/both", "stopped": {"by": "max_hours", "why": "its hours are over"}})
    assert "to continue, type: rollouts resume runs/both\n" in stopped


def test_step_lines_have_the_metrics_of_the_environment_if_there_is_room(monkeypatch):
    own = {"metric/used": 0.25, f"metric/{'long' * 20}": 1.0}
    monkeypatch.setattr(f"{__name__}.METRICS", METRICS | own)
    first, *_, last = [line for line in watch().splitlines() if line.startswith("step ")]
    assert "  gen tok/s 1234  used 0.250  0:0" in first
    assert f"  used 0.250  {'long' * 20} 1.000  0:00 left" in last


def test_a_conversation_is_shown_as_it_was_said():
    text = watch()
    assert "--- a rollout of step 1 (reward 1.000, completed)" in text
    assert "    user: 2 * 2? [bold]\n" in text, "brackets are no markup"
    assert "    assistant: [calculator(expression='2 * 2')]\n    tool: 4\n" in text


def test_a_long_run_is_some_lines_only():
    steps = [line for line in watch(steps=1000).splitlines() if line.startswith("step ")]
    assert 20 <= len(steps) <= 30
    assert steps[0].startswith("step 1/1000") and steps[-1].startswith("step 1000/1000")


def test_the_closing_table():
    table = watch()[watch().index("held-out tasks (16)") :]
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in table.splitlines() if line.startswith("│")}
    assert [cell.strip() for cell in rows["reward, sampled"]] == ["0.250", "0.750"]
    assert [cell.strip() for cell in rows["reward, greedy"]] == ["–", "–"]
    assert [cell.strip() for cell in rows["right"]] == ["0.250", "0.750"]


def test_the_closing_table_has_weights_greedy_parts_and_metrics():
    own = {
        "parts": {"right": 0.5, "quick": 1.5},
        "greedy_parts": {"quick": 1.25},
        "weights": {"quick": -0.1, "right": 1.0},
    }
    stream = io.StringIO()
    after = EVALUATION | own | {"metrics": {"calls": 2.0}}
    Console(file=stream, width=80).print(_comparison_table(EVALUATION, after))
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in stream.getvalue().splitlines() if "│" in line]
    assert rows == [
        ["reward, sampled", "0.250", "0.250"],
        ["right", "0.250", "0.500"],
        ["quick × -0.1", "–", "1.500"],
        ["reward, greedy", "–", "–"],
        ["quick × -0.1", "–", "1.250"],
        ["calls, sampled", "–", "2.000"],
    ]


@pytest.mark.parametrize(
    ("errors", "mean", "more"),
    [((0.1, 0.1), 0.5, 512), ((0.1, 0.1), 0.6, 0), ((0.0, 0.0), 0.25, 0), ((0.2, None), 0.3, 0)],
)
def test_means_have_errors_and_a_change_within_the_noise_gets_a_line(errors, mean, more):
    """The noise is two standard errors of the difference: here 0.283."""
    stream = io.StringIO()
    progress = Progress(Console(file=stream, width=200))
    progress.begin("title", 4, Path("runs/x"), [])
    before = EVALUATION | {"reward_stderr": errors[0], "greedy_mean": 0.5, "greedy_stderr": 0.125}
    after = before | {"reward_mean": mean, "reward_stderr": errors[1]}
    numbers = {"status": "done", "steps": 4, "wall_seconds": 1.0, "cpu_seconds": 1.0}
    progress.end(numbers | {"evaluation": {"before": before, "after": after}})
    shown = f"{mean:.3f} ± {errors[1]:.3f}" if errors[1] is not None else f"{mean:.3f}"
    assert re.search(rf"reward, sampled +│ 0.250 ± {errors[0]:.3f} │ +{shown} │", stream.getvalue())
    assert re.search(r"reward, greedy +│ 0.500 ± 0.125 │ 0.500 ± 0.125 │", stream.getvalue())
    noise = "the change of the sampled reward is smaller than the noise of 16 tasks; "
    assert (noise in stream.getvalue()) is bool(more) and (f"--eval-tasks {more}" in stream.getvalue()) is bool(more)


def test_an_environment_with_few_tasks_cannot_hold_out_more():
    stream = io.StringIO()
    progress = Progress(Console(file=stream, width=200))
    before = EVALUATION | {"reward_stderr": 0.1}
    numbers = {"status": "done", "steps": 4, "wall_seconds": 1.0, "cpu_seconds": 1.0, "eval_tasks": 17}
    progress.end(numbers | {"evaluation": {"before": before, "after": before}})
    assert (
        "the noise of 16 tasks; this environment holds out no more; give each split its own tasks, and more\n"
        in stream.getvalue()
    )
    assert "--eval-tasks" not in stream.getvalue()


def test_the_table_of_both_phases_has_three_columns():
    stream = io.StringIO()
    progress = Progress(Console(file=stream, width=200))
    first, before, after = ({**EVALUATION, "reward_mean": mean} for mean in (0.125, 0.5, 0.75))
    numbers = {"status": "done", "steps": 4, "wall_seconds": 1.0, "cpu_seconds": 1.0, "before_sft": first}
    progress.end(numbers | {"evaluation": {"before": before, "after": after}})
    assert re.search(r"before ┃ after SFT ┃ after RL", stream.getvalue())
    assert re.search(r"reward, sampled +│ +0.125 │ +0.500 │ +0.750 │", stream.getvalue())
    noisy = before | {"reward_stderr": 0.1}
    progress.end(numbers | {"evaluation": {"before": noisy, "after": noisy}})
    assert "the change of the sampled reward in RL is smaller than the noise of 16 tasks; " in stream.getvalue()


def test_the_mean_of_the_first_episodes_is_called_so():
    stream = io.StringIO()
    progress = Progress(Console(file=stream))
    progress.begin("title", 2, Path("runs/x"), [])
    progress.episode(1, 0.9)
    progress.episode(2, 0.5)
    assert stream.getvalue().endswith("1/2  reward 0.900 so far, the quickest episodes first\n2/2  reward 0.500\n")


@pytest.mark.parametrize("status", ["failed", "interrupted"])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_that_was_not_finished_has_no_table(status, terminal):
    assert "held-out tasks" not in watch(status=status, terminal=terminal)


def test_a_live_view_in_a_terminal_has_no_lines_of_steps():
    text = watch(terminal=True)
    assert "\x1b[" in text and "step 4/4" in text and "reward 0.500 ▁▁▁▁ 0.500 to 0.500 over 4 steps" in text
    assert "\nstep 1/4" not in text
    assert "held-out tasks (16)" in text
    assert text.count("\x1b[?25l") == 1 and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown"


def test_sft_has_no_rollouts():
    assert "4 steps of 8 prompts · lr 0.0003 · seed 7" in watch(mode="sft")
    assert "tiny, LoRA rank 8" in watch(lora_rank=8)


def test_each_fault_once():
    stream = io.StringIO()
    progress = Progress(Console(file=stream))
    for _ in range(3):
        progress.faults([PluginFault("acme", "1.0", "ValueError: no")])
    assert stream.getvalue() == "plugin fault: acme 1.0: ValueError: no\n"


def test_long_messages_are_cut():
    trajectory = Trajectory(Task("x"), [Message("user", "a\nb"), Message("assistant", "y" * 1000)])
    first, second = conversation_lines(trajectory)
    assert first == "user: a⏎ b"
    assert second.endswith("… (1000 characters)") and len(second) < CHARACTERS_MAX + 50


@pytest.mark.parametrize("terminal", [False, True])
def test_an_evaluation_of_a_training_run_has_progress(terminal, monkeypatch):
    from rollouts.runs import progress

    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.0)
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    shown = progress.Progress(console, functools.partial(TerminalScreen, console) if terminal else None)
    shown.begin("title", 4, Path("runs/x"), [])
    for done in (0, 1, 2, 3):
        shown.evaluating("before", done, 3)
    shown.end({"status": "failed", "evaluation": {}})
    text = output.getvalue()
    assert ("held-out, before: 2/3\n" in text) is not terminal
    assert bool(re.search(r"3/3 \S*━━━", text)) is terminal and "held-out, before" in text


def test_the_closing_table_has_tool_calls_and_the_parts_of_a_score_under_their_rewards():
    own = {"parts": {"a_part": 0.5, "right": 0.5}, "weights": {"right": 1.0}, "tool_calls": 9, "tool_failures": 2}
    stream = io.StringIO()
    Console(file=stream, width=80).print(_comparison_table(EVALUATION, EVALUATION | own))
    rows = [line.split("│")[1].rstrip() for line in stream.getvalue().splitlines() if line.startswith("│")]
    assert rows[1:3] == ["   right", "     a_part"]
    assert re.search(r"tool calls, sampled +│ +– │ +9 │", stream.getvalue())
    assert re.search(r"tool failures, sampled +│ +– │ +2 │", stream.getvalue())


def test_a_part_that_was_always_zero_gets_a_line():
    stream = io.StringIO()
    progress = Progress(Console(file=stream, width=100))
    progress.begin("title", 4, Path("runs/x"), [])
    numbers = {"status": "done", "steps": 4, "wall_seconds": 1.0, "cpu_seconds": 1.0}
    progress.end(numbers | {"evaluation": {"before": None, "after": None}, "zero_parts": {"placed": 960}})
    assert "the reward part `placed` was 0 in all 960 rollouts\n" in stream.getvalue()


def test_a_malformed_call_is_shown_as_unreadable():
    call = ToolCall("orderuntitem", error="no JSON")
    trajectory = Trajectory(Task("?"), [Message("assistant", "<tool_call>x", [call])])
    assert conversation_lines(trajectory) == ["assistant: <tool_call>x [unreadable call]"]
