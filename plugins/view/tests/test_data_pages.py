"""The page of training data, without a browser: its rows equal what a run trains on, and what it refuses to read."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_view.api import APIError, ViewAPI
from rollouts_view.catalog import Catalog
from rollouts_view.data_rows import LineRows, SequentialRows
from rollouts_view.server import open_catalog

from rollouts.cli import main
from rollouts.config.flags import read_flag
from rollouts.data.source import open_rows
from rollouts.errors import ModelError
from rollouts.runs import inspecting
from rollouts.runs.inspecting import inspect_data

ROWS = [
    {
        "messages": [
            {"role": "user", "content": "Say 3 🙂."},
            {"role": "assistant", "content": "3 🙂"},
            {"role": "user", "content": "And 4?"},
            {"role": "assistant", "content": "4", "weight": 0.5},
        ]
    },
    {"messages": [{"role": "tool", "content": "<script>x</script>"}]},
    {"instruction": "Add.", "input": "1 + 1", "output": "2\x1b[31m"},
]


@pytest.fixture
def chat(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return "chat.jsonl"


def asker(catalog):
    """Asks the API of data, until the tokens are there or all is counted."""
    own = ViewAPI(catalog)

    def ask(path="/api/data", query="file=chat.jsonl", key="ready"):
        deadline = time.monotonic() + 60
        while True:
            found = json.loads(own.answer("GET", path, query))
            if found[key] and not found.get("growing"):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.02)

    return ask


def of_file(name, **tree):
    return asker(open_catalog([], may_be_empty=True, data={name: {"data": {"name": name}} | tree}))


def test_rows_are_those_of_data_inspect(chat):
    ask = of_file(chat)
    found, shown = ask(), inspect_data(chat, {}).shown
    sequences = [sequence for row in found["rows"] for sequence in row.get("sequences", ())]
    assert [(each["tokens"], each["texts"], each["mask"]) for each in sequences] == [
        (list(each.tokens), each.texts, list(each.weights)) for each in shown
    ]
    assert {0.0, 0.5, 1.0} == set(sequences[0]["mask"])
    assert (found["total"], found["whole"], found["note"]) == (3, True, "")
    bad = found["rows"][1]
    assert (bad["place"], bad["bad"]) == ("chat.jsonl, line 2", "message 1: a tool result without its call")
    assert bad["sample"].startswith("{'messages'") and "sequences" not in bad
    summary, whole = ask("/api/data/summary", key="done"), inspect_data(chat, {})
    assert sum(count for _, _, count in summary["bins"]) == len(whole.lengths) == 2
    assert (summary["tokens"], summary["trained"]) == (sum(whole.lengths), sum(whole.trained))
    assert summary["unusable"] == 1 and summary["bad"][0]["place"] == "chat.jsonl, line 2"


def test_settings_change_the_masks_and_are_checked(chat):
    ask = of_file(chat, data={"name": chat, "max_length": read_flag("20")})
    rows = ask()["rows"]
    assert rows[0]["cut"] == {"rows": 1, "left_out": 0, "tokens": rows[0]["cut"]["tokens"]} and rows[0]["cut"]["tokens"]
    assert ask()["given"] == {"data.max_length": "20"}
    assert ask("/api/data/summary", key="done")["cut"]["rows"] == 2
    last = ask(query='file=chat.jsonl&settings={"data.max_length":"none","data.turns":"last"}')
    assert set(last["rows"][0]["sequences"][0]["mask"]) == {0.0, 0.5}
    for settings, words in (
        ('{"data.turn":"last"}', "did you mean: --data.turns?"),
        ('{"data.turns":"lst"}', "did you mean: last?"),
        ('{"steps":"3"}', "decides no tokens"),
        ('{"trust_remote_code":"true"}', "decides no tokens"),
        ('{"data.name":"/etc/passwd"}', "decides no tokens"),
        ("x", "expected"),
    ):
        with pytest.raises(APIError) as refused:
            ask(query=f"file=chat.jsonl&settings={settings}")
        assert refused.value.status == 400 and words in str(refused.value)


def test_only_opened_files_are_read(chat):
    Path("other.jsonl").write_text("{}\n")
    ask = of_file(chat)
    for name in ("other.jsonl", "./chat.jsonl", "", "../chat.jsonl"):
        with pytest.raises(APIError) as refused:
            ask(query=f"file={name}")
        assert refused.value.status == 404 and "is not opened" in str(refused.value)


def test_without_a_tokenizer_conversations_are_shown(chat, monkeypatch):
    def load(name, **settings):
        assert settings == {"local_files_only": True}, "nothing is loaded from elsewhere"
        raise ModelError("the tokenizer of x is not on this machine")

    monkeypatch.setattr(inspecting, "load_tokenizer", load)
    ask = of_file(chat)
    found = ask()
    assert "tokens are not shown: the tokenizer of x is not on this machine" in found["note"]
    assert found["rows"][0]["messages"][0]["content"] == "Say 3 🙂." and found["rows"][0]["sequences"] == []
    summary = ask("/api/data/summary", key="done")
    assert summary["unusable"] == 1 and summary["bins"] == [] and summary["rows"] == 3


@given(
    st.lists(st.sampled_from(['{"a": 1}', '{"b": "\\u2028"}', "", "  ", "{", '"é"']), max_size=30),
    st.booleans(),
    st.booleans(),
    st.integers(0, 31),
    st.integers(1, 7),
)
def test_a_page_has_the_rows_that_are_read_from_the_begin(tmp_path_factory, lines, has_mark, has_end, start, count):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text(("\ufeff" if has_mark else "") + "\n".join(lines) + ("\n" if has_end else ""))
    rows = LineRows(file, {})
    while not rows.total().is_whole:
        time.sleep(0.001)
    everything = [(int(row.place.rpartition(" ")[2]) - 1, row) for row in open_rows(str(file))]
    assert rows.read(0, 100) == everything
    assert rows.read(start, count) == [each for each in everything if start <= each[0] < start + count]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=6))
def test_other_formats_are_read_in_any_order(pages):
    rows = SequentialRows(lambda: iter(range(10)))
    for start, count in pages:
        found = rows.read(start, count)
        assert found == [(number, number) for number in range(start, min(start + count, 10))]
        assert rows.total().is_whole == (start + count > 10)


def test_hostile_rows_are_one_row_each(chat):
    long = [{"prompt": "x" * 1000, "response": "y"}]
    lines = [
        "[" * 100_000,
        '{"prompt": ' + "1" * 5_000 + "}",
        *map(json.dumps, long),
        '{"prompt": "\\ud800", "response": "\\ud800"}',
    ]
    Path(chat).write_bytes("\n".join(lines).encode() + b"\n")
    ask = of_file(chat)
    rows = ask()["rows"]
    assert [bool(row["bad"]) for row in rows] == [True, True, False, True], rows
    assert "recursion" in rows[0]["bad"] and "Unicode" in rows[3]["bad"]
    assert ask("/api/data/summary", key="done")["rows"] == 4
    Path(chat).write_bytes(b'{"prompt": "a", "response": "b"}\n\xff\xfe\n{"prompt": "c", "response": "d"}\n')
    rows = ask()["rows"]
    assert [bool(row["bad"]) for row in rows] == [False, True, False] and "UTF-8" in rows[1]["bad"]
    assert "is not text in UTF-8" in ask("/api/data/summary", key="done")["problem"], "a run would end here"


def test_a_file_of_another_format_and_one_that_grows(chat):
    Path("rows.json").write_text(json.dumps(ROWS))
    ask = of_file("rows.json")
    assert [row["place"] for row in ask(query="file=rows.json&from=1&count=1")["rows"]] == ["rows.json, row 2"]
    ask = of_file(chat)
    assert ask()["total"] == 3
    with Path(chat).open("a") as file:
        file.write("\n" + json.dumps(ROWS[0]) + "\n")
    assert ask()["total"] == 4


def test_the_data_of_a_run(chat, make):
    sft = f'mode = "sft"\nmodel = "tiny"\ntrust_remote_code = true\n[data]\nname = "{Path(chat).resolve()}"\n'
    run = make.run(settings=sft + 'turns = "last"\nprompt = ""\nlimit = 2\nmax_length = "none"\n')
    ask = asker(Catalog([make.directory]))
    found = ask(query=f"run={run}")
    assert set(found["rows"][0]["sequences"][0]["mask"]) == {0.0, 0.5} and len(found["rows"]) == 3
    assert found["given"] == {"data.turns": "last"}, "what is at its default is not repeated"
    all_turns = ask(query=f'run={run}&settings={{"data.turns":"all"}}')
    assert set(all_turns["rows"][0]["sequences"][0]["mask"]) == {0.0, 0.5, 1.0} and all_turns["given"] == {}
    Path("evil.py").write_text("from pathlib import Path\nPath('ran').write_text('')\ndef rows(source): return []\n")
    evil = (
        ("./evil.py:rows", "does not run"),
        ("./evil.py:rows:x.jsonl", "does not run"),
        ("evil:rows", "does not run"),
        ("hub:acme/rows", "local files alone"),
        ("acme/rows", "local files alone"),
    )
    for number, (name, words) in enumerate(evil):
        run = make.run(f"evil{number}", settings=f'mode = "sft"\n[data]\nname = "{name}"\n')
        with pytest.raises(APIError, match=words):
            ask(query=f"run={run}")
    with pytest.raises(APIError, match="was not trained on rows"):
        ask(query=f"run={make.run('rl')}")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rows.xyz"], "no loader reads it"),
        (["missing.jsonl"], "there is no directory missing.jsonl"),
        (["chat.jsonl", "--data.turn", "last"], "did you mean: --data.turns?"),
        (["chat.jsonl", "--loss.clip-high", "1"], "--loss: `rollouts view` takes --model"),
        (["--model", "tiny"], "--model: `rollouts view` takes --model"),
        (["--data.turns", "last"], "--data: `rollouts view` takes --model"),
    ],
)
def test_mistakes_of_the_command(chat, capsys, arguments, words):
    Path("rows.xyz").write_text("")
    assert main(["view", *arguments]) == 2
    assert words in capsys.readouterr().err
