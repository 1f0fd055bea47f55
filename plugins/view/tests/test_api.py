"""What the API of the viewer answers, and that it equals the files of the run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from array import array

import pytest
from rollouts_view import table as tables
from rollouts_view.api import APIError
from rollouts_view.listing import read_labels
from rollouts_view.rollout import Tokenizers

from rollouts.cli import main
from rollouts.encoding import encode
from rollouts.runs.jobs import saving, train
from rollouts.runs.records import read_record
from rollouts.runs.times import StepTimes
from rollouts.runs.token_files import TokenTable, read_table
from rollouts.types import Status


def refusal(asked, *request, **more):
    with pytest.raises(APIError) as refused:
        asked(*request, **more)
    return refused.value.status, str(refused.value)


def test_runs_with_their_states(make, asked):
    make.run("first", steps=3)
    make.run("second", ended=False)
    (make.run("third") / "config.toml").write_text("mode = ")
    states = {run["name"].rpartition("/")[2]: run["state"] for run in asked("/api/runs")["runs"]}
    assert states == {"first": "done", "second": "killed", "third": "damaged"}
    found = asked("/api/runs/RUN")
    assert [each["name"] for each in found["files"]] == ["step_000000", "step_000001", "step_000002", "eval_000003"]
    assert found["settings"]["model"] == "tiny" and found["metrics"]["reward/mean"] == 0.2
    damaged = asked("/api/runs/RUN".replace("RUN", str(make.directory / "third").replace("/", "%2F")))
    assert damaged["settings"] is None and "config.toml" in damaged["run"]["problem"]


def test_a_run_that_goes_on_is_shown_as_it_is(make, asked):
    run = make.run("first", steps=1, ended=False)
    assert asked("/api/runs")["runs"][0]["steps"] == 1
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "reward/mean": 0.75}\n{"step": 2, "rew')
    curve = asked("/api/metrics", f"run={run}&metric=reward/mean")["curves"][str(run)]["reward/mean"]
    assert curve == [[0, 0.0], [1, 0.75]]
    make.run("later")
    assert len(asked("/api/runs")["runs"]) == 2


def test_no_file_of_a_run_is_waited_for(make, asked):
    """A named pipe has no content until somebody writes to it."""
    run = make.run()
    make.tokens(run, "step_000000", TokenTable([], {}))
    (run / "trajectories" / ".step_000000.times").write_bytes(encode(StepTimes(0.0, [], [])))
    asked("/api/runs/RUN/step_000000/lines/0")  # writes the index
    names = [file.relative_to(run) for file in run.rglob("*") if file.is_file()]
    assert {each.suffix for each in names} >= {".toml", ".json", ".jsonl", ".index", ".tokens"}
    answered = []

    def ask_all():
        for path in ("", "/step_000000", "/step_000000/lines/0", "/step_000000/times", "/causes", "/health"):
            with contextlib.suppress(APIError):
                asked(f"/api/runs/RUN{path}")
        asked("/api/runs")
        asked("/api/metrics", f"run={run}&metric=reward/mean")
        answered.append(name)

    for name in names:
        (run / name).rename(run / "aside")
        os.mkfifo(run / name)
        thread = threading.Thread(target=ask_all, daemon=True)
        thread.start()
        thread.join(60)
        assert answered[-1:] == [name]
        (run / "aside").rename(run / name)


def test_a_long_curve_keeps_its_ends_and_its_mean(make, asked):
    run = make.run()
    lines = [json.dumps({"step": step, "x": float(step)}) for step in range(5000)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    curve = asked("/api/metrics", f"run={run}&metric=x")["curves"][str(run)]["x"]
    assert len(curve) == 1000 and curve[-1][0] == 4999
    assert sum(value for _, value in curve) / 1000 == 2499.5


def test_a_table_has_a_row_for_each_line(make, asked):
    make.run()
    found = asked("/api/runs/RUN/step_000000")
    assert found["done"] and found["lines"] == found["matched"] == 8
    assert found["rows"][5] == {
        "line": 5, "group": 1, "rollout": 1, "reward": 0.25, "advantage": 0.5, "turns": 2, "tokens": 5, "sampled": 3,
        "tool_calls": 1, "tool_failures": 0, "oldest_version": 3, "newest_version": 4, "part.correct": 0.25,
        "task": "What is 2 + 1?", "status": "completed",
    }  # fmt: skip
    assert found["summary"] == {"reward": 0.375, "judged": 8, "status": {"completed": 8}}


def test_filter_sort_and_pages(make, asked):
    make.run()

    def lines(query):
        return [row["line"] for row in asked("/api/runs/RUN/step_000000", query)["rows"]]

    assert lines("where=reward+>=+0.5") == [2, 3, 6, 7]
    assert lines("where=reward+>=+0.5&sort=reward&desc=1") == [3, 7, 2, 6]
    assert lines("sort=task&desc=1&count=3") == [4, 5, 6]
    assert lines("from=6") == [6, 7] and lines("from=60") == []
    assert refusal(asked, "/api/runs/RUN/step_000000", "where=rewrd>1")[0] == 400
    assert "did you mean: tokens?" in refusal(asked, "/api/runs/RUN/step_000000", "sort=tokes")[1]
    assert "is no number" in refusal(asked, "/api/runs/RUN/step_000000", "from=-1")[1]
    assert "there is no parameter 'wheres'" in refusal(asked, "/api/runs/RUN/step_000000", "wheres=1")[1]


def test_missing_values_come_last_in_both_orders(make, asked, make_episode):
    make.run(episodes=[make_episode(0), make_episode(1, reward=float("nan")), make_episode(2)])
    for order in ("", "&desc=1"):
        rows = asked("/api/runs/RUN/step_000000", f"sort=reward{order}")["rows"]
        assert "reward" not in rows[-1] and all("reward" in row for row in rows[:-1])


def test_damaged_lines_are_counted_and_the_others_shown(make, asked):
    run = make.run()
    file = run / "trajectories" / "step_000000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b"{}\n", lines[1], b"\xff\xfe\n", lines[2][:50]]))
    found = asked("/api/runs/RUN/step_000000")
    assert [row["line"] for row in found["rows"]] == [0, 2] and found["damaged"] == 3
    assert [each["line"] for each in found["problems"]] == [1, 3, 4]
    assert asked("/api/runs/RUN/step_000000/lines/2")["rollout"] == 1
    status, words = refusal(asked, "/api/runs/RUN/step_000000/lines/1")
    assert status == 400 and "line 2 is damaged" in words


def test_a_file_that_is_written_again_is_read_again(make, asked):
    run = make.run()
    file = run / "trajectories" / "step_000000.jsonl"
    assert asked("/api/runs/RUN/step_000000")["lines"] == 8
    file.write_bytes(file.read_bytes() * 2)
    assert asked("/api/runs/RUN/step_000000")["matched"] == 16
    os.remove(file)
    assert refusal(asked, "/api/runs/RUN/step_000000")[0] == 404


def test_rows_are_shown_while_the_rest_is_read(make, asked, monkeypatch):
    go_on, decode = threading.Event(), tables._DECODER.decode

    class Slow:
        def decode(self, raw):
            line = decode(raw)
            if (line.group, line.rollout) == (1, 0):
                go_on.wait(20)
            return line

    monkeypatch.setattr(tables, "_DECODER", Slow())
    make.run()
    found = asked("/api/runs/RUN/step_000000", "where=reward+>+0")
    assert not found["done"] and found["scanned"] == 4 and [row["line"] for row in found["rows"]] == [1, 2, 3]
    go_on.set()
    while not (found := asked("/api/runs/RUN/step_000000", "where=reward+>+0"))["done"]:
        pass
    assert [row["line"] for row in found["rows"]] == [1, 2, 3, 5, 6, 7]


def test_a_rollout_equals_its_record(recorded, asked):
    found, record = asked("/api/runs/RUN/step_000000/lines/1"), read_record(recorded, 0, 1)
    (segment,), (own,) = found["segments"], record.line.segments
    assert (segment["tokens"], segment["mask"], segment["logprobs"]) == (own.tokens, own.loss_mask, own.logprobs)
    assert segment["versions"] == own.versions and segment["turns"] == [[0, 2]]
    assert segment["at"] == [2, 3, 4] and segment["recorded"]["entropy"] == [0.5, 0.25, 0.125]
    assert segment["recorded"] == {name: list(each) for name, each in record.tokens[0].items() if name != "position"}
    assert len(segment["texts"]) == 5 and segment["texts"][0] == "<|im_start|>"
    assert [each["line"] for each in found["siblings"]] == [0, 1, 2, 3]
    assert asked("/api/runs/RUN/step_000000/lines/2")["segments"][0]["at"] == []


def test_values_are_those_that_a_run_trained_on(make, asked, monkeypatch):
    reports, real = [], saving.write_step
    monkeypatch.setattr(train, "write_step", lambda *given, **more: (reports.append(given[1]), real(*given, **more)))
    command = "run --env calculator --loss grpo --steps 1 --prompts-per-step 2 --samples-per-prompt 2 --eval-tasks 0"
    more = ["--record", "tokens", "--kl", "k3_loss", "--out", str(make.directory / "first")]
    assert main([*command.split(), *more]) == 0
    table = read_table(make.directory / "first" / "trajectories" / "step_000000.tokens")
    assert table.spans
    for span in table.spans:
        segment = asked(f"/api/runs/RUN/step_000000/lines/{span.line}")["segments"][span.segment]
        end = span.start + span.length
        assert segment["at"] == table.channels["position"][span.start : end].tolist()
        for name in ("logprob", "entropy", "advantage", "clipped", "ref_logprob"):
            assert segment["recorded"][name] == table.channels[name][span.start : end].tolist()
        assert all(segment["mask"][place] == 1 for place in segment["at"])
    (batch,) = reports[0].batches
    trained = {name: iter(array("f", data)) for name, data in batch.recorded.items()}
    lines = [asked(f"/api/runs/RUN/step_000000/lines/{line}") for line in range(4)]
    by_tokens = {tuple(line["segments"][0]["tokens"]): line for line in lines}
    for row in batch.rows:  # the page's data and the batch itself
        shown = by_tokens[tuple(row.tokens)]["segments"][0]
        live = [place for place, weight in enumerate(row.loss_mask) if weight > 0]
        assert shown["at"] == live and [shown["mask"][place] for place in live] == [1] * len(live)
        assert shown["recorded"]["ref_logprob"] == list(array("f", [row.ref_logprobs[place] for place in live]))
        assert shown["recorded"]["advantage"] == list(array("f", [row.advantages[place] for place in live]))
        for name in ("logprob", "entropy", "clipped"):
            assert shown["recorded"][name] == [next(trained[name]) for _ in live]
        assert shown["logprobs"] == [round(each, 6) for each in shown["logprobs"]]
    assert all(not list(left) for left in trained.values())


def test_the_light_tokenizer_shows_the_same_texts():
    from rollouts.chat.token_texts import token_texts
    from rollouts.models.loading import load_tokenizer

    ids = [
        *range(0, 500, 7),
        *load_tokenizer("tiny")("naïve 👩\u200d🔬 <tool_call> שלום", add_special_tokens=False)["input_ids"],
    ]
    assert Tokenizers().texts("tiny", ids) == (token_texts(ids, load_tokenizer("tiny")), "")


def test_tokens_of_a_model_that_is_not_here_are_numbers(make, asked):
    make.run(settings='mode = "rl"\nmodel = "acme/nothing"\n')
    found = asked("/api/runs/RUN/step_000000/lines/0")
    assert found["segments"][0]["texts"] == [] and "tokens are shown as numbers" in found["notes"][0]


def test_damaged_values_are_a_note(recorded, asked):
    file = recorded / "trajectories" / "step_000000.tokens"
    file.write_bytes(file.read_bytes()[:-3])
    found = asked("/api/runs/RUN/step_000000/lines/1")
    assert "damaged" in found["notes"][0] and found["segments"][0]["at"] == []


def test_a_group(make, asked, make_episode):
    make.run(episodes=[make_episode(number, status=Status.TRUNCATED) for number in range(8)])
    found = asked("/api/runs/RUN/step_000000/groups/6")
    assert [each["line"] for each in found["rollouts"]] == [4, 5, 6, 7] and found["total"] == 4
    assert found["rollouts"][0]["messages"][0]["content"] == "What is 2 + 1?"


def test_causes_with_an_example(make, asked, make_episode):
    failed = make_episode(5, status=Status.ENVIRONMENT_ERROR)
    failed.trajectory.error = "RuntimeError: out of order\n(shop.py, line 3)"
    cut = [make_episode(number, status=Status.TRUNCATED) for number in (1, 2)]
    for number, each in enumerate(cut):
        each.trajectory.error = f"cut off after {number} tokens"
    unjudged = make_episode(6, reward=float("nan"))
    make.run(episodes=[make_episode(0), *cut, make_episode(3), failed, unjudged])
    found = asked("/api/runs/RUN/causes")
    assert (found["files"], found["of"], found["rollouts"]) == (2, 2, 12)
    assert found["causes"] == [
        {"what": "truncated", "why": "cut off after … tokens", "count": 4, "file": "eval_000001", "line": 1},
        {
            "what": "environment_error",
            "why": "RuntimeError: out of order",
            "count": 2,
            "file": "eval_000001",
            "line": 4,
        },
        {"what": "not judged", "why": "", "count": 2, "file": "eval_000001", "line": 5},
    ]
    file = make.directory / "first" / "trajectories" / "step_000000.jsonl"
    file.write_text(file.read_text().replace('"dropped":null', '"dropped":"zero_std"'))
    causes = asked("/api/runs/RUN/causes")["causes"]
    assert {"what": "not trained", "why": "zero_std", "count": 6, "file": "step_000000", "line": 0} in causes


def test_health_of_a_run(make, asked):
    run = make.run(steps=2, settings='mode = "rl"\n[inference]\nname = "vllm"\n')
    lines = [{"step": step, "sync/probe": step * 0.5, "policy/loss": 1.0} for step in range(3000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "manifest.json").write_text('{"hardware": {"cpus": 2}}')
    found = asked("/api/runs/RUN/health")
    assert found["engine"] == {"name": "vllm"} and found["hardware"] == {"cpus": 2} and found["times"] == []
    assert found["metrics"] == {
        "sync/probe": {"steps": 3000, "mean": 749.75, "least": 0.0, "most": 1499.5, "last": 1499.5}
    }
    status, words = refusal(asked, "/api/runs/RUN/step_000000/times")
    assert status == 404 and "made by an earlier version" in words


def test_two_runs_on_the_same_tasks(make, asked, make_episode):
    first = make.run("first", settings='mode = "rl"\nseed = 0\n')
    better = [make_episode(number, reward=1.0 if number < 4 else 0.0) for number in range(12)]
    second = make.run("second", episodes=better, settings='mode = "rl"\nseed = 1\n')
    found = asked("/api/compare", f"run={first}&run={second}")
    assert found["settings"] == {"seed": [0, 1]}
    (other,) = found["others"]
    assert other["paired"]["verdict"] is None, "two tasks are too few"
    assert other["file"] == "eval_000001" and other["paired"]["tasks"] == 2 and other["paired"]["left_out"] == 1
    assert [(each["task"], each["first"], each["second"]) for each in other["tasks"]] == [
        ("What is 2 + 1?", {"reward": 0.375, "line": 4}, {"reward": 0.0, "line": 4}),
        ("What is 2 + 0?", {"reward": 0.375, "line": 0}, {"reward": 1.0, "line": 0}),
    ]
    assert refusal(asked, "/api/compare", f"run={first}")[0] == 400


def test_without_numpy_the_tasks_are_shown_all_the_same(make, asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    found = asked("/api/compare", f"run={make.run('first')}&run={make.run('second')}")
    assert found["notes"] == ["a paired comparison needs numpy; type: pip install numpy"]
    assert found["others"][0]["paired"] is None and len(found["others"][0]["tasks"]) == 2


def test_a_read_only_disk(asked, make, monkeypatch):
    run = make.run()
    for index in (run / "trajectories").glob(".*.index"):
        index.unlink()

    def refuse(*given, **more):
        raise OSError(30, "Read-only file system")

    for module in ("rollouts.runs.times", "rollouts_view.listing"):
        monkeypatch.setattr(f"{module}.write_whole", refuse)
    assert asked("/api/runs/RUN/step_000000")["lines"] == 8
    assert asked("/api/runs/RUN/step_000000/lines/5")["group"] == 1
    assert not list((run / "trajectories").glob(".*.index"))
    status, words = refusal(asked, "/api/runs/RUN/labels", body=b'{"note": "look"}', method="POST")
    assert status == 507 and "Read-only file system" in words


def test_labels_are_written_and_checked(make, asked):
    run = make.run()
    assert asked("/api/runs/RUN/labels", body=b'{"tags": ["best", "best"]}', method="POST")["tags"] == ["best"]
    assert asked("/api/runs/RUN/labels", body=b'{"note": "look"}', method="POST") == {"tags": ["best"], "note": "look"}
    assert read_labels(run).note == "look"
    for body in (b"", b"[]", b'{"tags": "x"}', b'{"tags": ["a b"]}', b'{"color": "red"}', b'{"note": 3}'):
        assert refusal(asked, "/api/runs/RUN/labels", body=body, method="POST")[0] == 400
    assert read_labels(run).tags == ["best"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/nothing", "docs/viewer.md"),
        ("/api/runs/%2Fetc", "there is no run /etc"),
        ("/api/runs/..%2F..", "there is no run ../.."),
        ("/api/runs/RUN/step_000009", "did you mean"),
        ("/api/runs/RUN/..%2F..%2Fconfig", "has no trajectories"),
        ("/api/runs/RUN/step_000000/lines/99", "has no line 99: it has 8 lines"),
    ],
)
def test_what_is_not_there_says_what_is(path, words, make, asked):
    make.run()
    status, said = refusal(asked, path)
    assert status in (400, 404) and words in said


def test_empty_and_odd_runs(make, asked):
    run = make.run()
    for file in (run / "trajectories").iterdir():
        file.unlink()
    (run / "metrics.jsonl").unlink()
    found = asked("/api/runs/RUN")
    assert found["files"] == [] and found["metrics"] == {}
    (run / "trajectories" / "step_000000.jsonl").write_bytes(b"")
    assert asked("/api/runs/RUN/step_000000")["rows"] == []
    assert asked("/api/compare", f"run={run}&run={make.run('second')}")["others"][0]["tasks"] == []
