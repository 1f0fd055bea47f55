from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rollouts.env.checks import check_environment, reward_term
from rollouts.env.mixing import env_term
from rollouts.env.prompts import Prompts, split_tasks
from rollouts.errors import ConfigError, EnvironmentDefinitionError
from rollouts.types import Message, Task, ToolCall


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return str(path)


def both(environment: Prompts) -> tuple[list[Task], list[Task]]:
    return environment.tasks("train", random.Random(0)), environment.tasks("eval", random.Random(0))


def test_rows_become_tasks(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "b\u2028?"}]
    data = write(tmp_path / "rows.jsonl", {"prompt": "a?", "answer": 1, "id": 7, "level": "x"}, {"prompt": messages})
    tasks = sorted(Prompts(data, eval_fraction=0.0).tasks("train", random.Random(0)), key=lambda t: t.id or "")
    assert tasks == [
        Task([Message("system", "be brief"), Message("user", "b\u2028?")]),
        Task("a?", answer=1, info={"level": "x"}, id="7"),
    ]


def test_a_prompt_is_read_in_the_words_of_any_api(tmp_path: Path) -> None:
    """Thinking and calls are kept. A picture stays, for engines that take messages."""
    picture = [{"type": "text", "text": "b?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    prompt = [
        {"role": "document 1", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "a?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "content": "c", "tool_call_id": "c1"},
        {"role": "user", "content": picture},
    ]
    reply = [{"role": "assistant", "content": [{"type": "output_text", "text": "d"}]}]
    rows = Prompts(write(tmp_path / "rows.jsonl", {"prompt": prompt, "response": reply}), eval_fraction=0.0)
    (demonstration,) = rows.demonstrations("train", random.Random(0))
    assert demonstration == [
        Message("document 1", "a"),
        Message("user", "a?"),
        Message("assistant", "", [ToolCall("look", {}, "c1")], reasoning="so"),
        Message("tool", "c", tool_call_id="c1"),
        Message("user", picture),
        Message("assistant", "d"),
    ]


def test_the_split_is_the_same_in_every_run_and_leaves_nothing_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n % 180}"} for n in range(200)]  # some prompts twice
    data = write(tmp_path / "rows.jsonl", *rows)
    train, held_out = both(Prompts(data))
    assert len(train) + len(held_out) == 200 and 5 < len(held_out) < 40
    assert not {t.key for t in train} & {t.key for t in held_out}
    shuffled = Prompts(data).tasks("eval", random.Random(9))
    assert shuffled != held_out and {t.key for t in shuffled} == {t.key for t in held_out}
    _, more_held_out = both(Prompts(write(tmp_path / "more.jsonl", *rows, {"prompt": "new"})))
    assert {t.key for t in held_out} <= {t.key for t in more_held_out}, "a new row moves no other"


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_a_small_file_leaves_a_task_on_both_sides(count: int, fraction: float) -> None:
    held_out, rest = split_tasks([Task(f"q{n}") for n in range(count)], fraction)
    assert held_out and rest and len(held_out) + len(rest) == count


def test_rows_of_their_own_for_evaluation_and_a_json_list(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", {"prompt": "train"})
    other = tmp_path / "eval.json"
    other.write_text(json.dumps([{"prompt": "eval"}]), encoding="utf-8")
    train, held_out = both(Prompts(data, eval_data=str(other)))
    assert [t.prompt for t in train] == ["train"] and [t.prompt for t in held_out] == ["eval"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rows.jsonl", '{"prompt": "a"}\n{"prompt": \n', "rows.jsonl, line 2: not JSON"),
        ("rows.jsonl", '{"prompt": "a"}\n\n[1]\n', "line 3: a row is .* got list"),
        ("rows.jsonl", '{"question": "a"}', "line 1: a row is .* got the keys question"),
        ("rows.jsonl", '{"prompt": {"a": 3}}', 'line 1: "prompt" is text or a list'),
        ("rows.jsonl", '{"prompt": [{"content": "a"}]}', "line 1: .*missing required field `role`"),
        ("rows.jsonl", '{"prompt": ""}', 'line 1: "prompt" is empty'),
        ("rows.jsonl", '{"prompt": [{"role": "user"}]}', 'line 1: "prompt" is .*: it has no content'),
        ("rows.jsonl", "\n", "holds no rows"),
        ("rows.json", "{}", "expected a list of rows, got dict"),
        ("rows.json", '[{"prompt": "a"},\n oops]', "rows.json, line 2: not JSON"),
        ("rows.json", '[{"prompt": "a"}, {}]', "row 2: a row is"),
        ("rows.jsonl", '{"problem": "a", "solution": 1}', "type: --data.prompt problem --data.answer solution"),
        ("rows.jsonl", '{"messages": [{"content": "a"}]}', "line 1: message 1: it has no role"),
        ("rows.txt", "prompt", r"no loader reads it.*\n.*\.csv, \.json, \.jsonl"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        Prompts(str(tmp_path / name)).tasks("train", random.Random(0))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Prompts(str(tmp_path / "gone.jsonl")).tasks("train", random.Random(0))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        Prompts(str(tmp_path / "latin.jsonl")).tasks("train", random.Random(0))
    with pytest.raises(ConfigError, match=r"type --data rows\.jsonl"):
        Prompts().tasks("train", random.Random(0))
    with pytest.raises(ConfigError, match=r"eval-fraction 1\.5"):
        Prompts("x.jsonl", eval_fraction=1.5).tasks("train", random.Random(0))


def test_it_needs_a_reward_from_elsewhere() -> None:
    check_environment(Prompts, [reward_term("f", lambda task, trajectory: 1.0)])
    with pytest.raises(EnvironmentDefinitionError, match="--reward pkg/name"):
        check_environment(Prompts, [env_term()])


def test_rows_with_a_reply_are_demonstrations(tmp_path: Path) -> None:
    """A conversation, a prompt with a response or a completion; rows without a reply are only tasks."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [
        {"messages": [*turns, {"role": "assistant", "content": "d"}]},
        {"prompt": "e", "response": "f"},
        {"prompt": 1, "response": 2.5},  # CSV
        {"prompt": "g", "completion": [{"role": "assistant", "content": "h"}]},
        {"prompt": "i", "answer": 1},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = Prompts(str(file), eval_fraction=0.0)
    found = env.demonstrations("train", random.Random(0))
    assert sorted("".join(message.text for message in messages) for messages in found) == ["12.5", "abcd", "ef", "gh"]
    tasks = env.tasks("train", random.Random(0))
    assert sorted("".join(message.text for message in task.messages) for task in tasks) == ["1", "abc", "e", "g", "i"]


def test_rows_without_any_reply_are_no_demonstrations(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for row, words in (
        ({"prompt": "a", "answer": 1}, "has no demonstrations; a row to learn from is"),
        ({"prompt": "a", "response": [3]}, "the row of prompt:a: a response is text or messages"),
    ):
        file.write_text(json.dumps(row) + "\n")
        with pytest.raises(ConfigError, match=words):
            Prompts(str(file), eval_fraction=0.0).demonstrations("train", random.Random(0))
