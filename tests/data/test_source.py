"""What `--data` names: which loader reads it, and the rows of files that other libraries wrote."""

from __future__ import annotations

import gzip
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from rollouts.config.render import to_toml
from rollouts.config.resolving import resolve
from rollouts.data.source import open_rows, split_value
from rollouts.env.prompts import Prompts
from rollouts.errors import ConfigError, SignatureError, UserError
from rollouts.runs.plan import make_plan

LOADERS = ("arrow", "csv", "hub", "json", "jsonl", "parquet", "rollouts-rl/csv")
ROWS = [{"question": f"{n} + 1?", "answer": n + 1, "meta": {"level": n % 3}} for n in range(6)]


def read(data: Any) -> list[Any]:
    return [row.value for row in open_rows(data)]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("rows.jsonl", ("jsonl", "rows.jsonl")),
        ("rows.ndjson", ("jsonl", "rows.ndjson")),
        ("rows.jsonl.gz", ("jsonl", "rows.jsonl.gz")),
        ("/a/b.PARQUET", ("parquet", "/a/b.PARQUET")),
        ("csv:rows.tsv", ("csv", "rows.tsv")),
        ("acme/rows", ("hub", "acme/rows")),
        ("hub:gsm8k", ("hub", "gsm8k")),
        ("./mine.py:load", ("./mine.py:load", "")),
        ("./mine.py:load:some:thing", ("./mine.py:load", "some:thing")),
        ("my_pack.rows:load", ("my_pack.rows:load", "")),
        ("openai/rows", ("hub", "openai/rows")),
        ("rollouts-rl/csv:rows.txt", ("rollouts-rl/csv", "rows.txt")),
    ],
)
def test_the_value_chooses_the_loader(value: str, expected: tuple[str, str]) -> None:
    assert split_value(value, LOADERS) == expected


@pytest.mark.parametrize("value", ["rows", "rows.txt", "gone/away/rows", "./folder"])
def test_a_value_that_no_loader_reads(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"--data {value}: no loader reads it"):
        split_value(value, LOADERS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv"])
def test_a_file_that_is_no_text_in_utf8_is_told_with_its_line_and_what_to_type(tmp_path: Path, name: str) -> None:
    rows = {".csv": b"prompt\n", ".json": b'[{"prompt": "a"},\n'}.get(Path(name).suffix, b'{"prompt": "a"}\n')
    bad = {".csv": b"caf\xe9\n", ".json": b'{"prompt": "caf\xe9"}]\n'}.get(
        Path(name).suffix, b'{"prompt": "caf\xe9"}\n'
    )
    if Path(name).suffix == ".csv":
        pytest.importorskip("datasets")
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wb") as file:
        file.write(rows + bad)
    with pytest.raises(
        ConfigError, match=rf"{name}, line 2: byte \d+ is not text in UTF-8\n.*type: iconv -f WINDOWS-1252"
    ):
        read(str(tmp_path / name))


def test_files_that_other_libraries_wrote(tmp_path: Path) -> None:
    """pandas, pyarrow and datasets write; each loader reads the same rows. Struct fields of other rows are absent."""
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    frame, table = pandas.DataFrame(ROWS), arrow.Table.from_pylist(ROWS)
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    frame.to_json(tmp_path / "a.json", orient="records")
    frame.to_parquet(tmp_path / "a.parquet")
    parquet.write_table(table, tmp_path / "b.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(tmp_path / "c")
    datasets.DatasetDict({"test": datasets.Dataset(table)}).save_to_disk(tmp_path / "d")
    (tmp_path / "hub").mkdir()
    frame.to_parquet(tmp_path / "hub" / "test-00000.parquet")
    with gzip.open(tmp_path / "e.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    for name in ("a.jsonl", "a.json", "a.parquet", "b.parquet", "c", "e.jsonl.gz"):
        assert read(str(tmp_path / name)) == ROWS, name
    in_split = {"split": "test", "streaming": True}
    for name in (str(tmp_path / "d"), f"hub:{tmp_path / 'hub'}", str(tmp_path / "hub")):
        assert read({"name": name, **in_split}) == ROWS, name
    frame.drop(columns="meta").to_csv(tmp_path / "a.csv", index=False)
    frame.drop(columns="meta").to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    flat = [{key: row[key] for key in ("question", "answer")} for row in ROWS]
    assert read(str(tmp_path / "a.csv")) == flat
    assert read({"name": f"csv:{tmp_path / 'a.tsv'}", "delimiter": "\t"}) == flat
    mixed = [{"m": [{"role": "a", "call": {"x": 1}}]}, {"m": [{"role": "b"}]}]
    parquet.write_table(arrow.Table.from_pylist(mixed), tmp_path / "m.parquet")
    assert read(str(tmp_path / "m.parquet")) == mixed
    with pytest.raises(ConfigError, match=r"has no split 'tset'; it has: test\ndid you mean: --data.split test\?"):
        read({"name": str(tmp_path / "d"), "split": "tset"})
    with pytest.raises(ConfigError, match=r"a\.csv cannot be read as parquet"):
        read(f"parquet:{tmp_path / 'a.csv'}")
    with pytest.raises(ConfigError, match=r"gone cannot be loaded|gone .split train. cannot be loaded"):
        read(f"hub:{tmp_path / 'gone'}")


def test_files_of_polars(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame([{key: row[key] for key in ("question", "answer")} for row in ROWS])
    frame.write_parquet(tmp_path / "a.parquet")
    frame.write_ndjson(tmp_path / "a.ndjson")
    frame.write_json(tmp_path / "a.json")
    frame.write_csv(tmp_path / "a.csv")
    frame.write_ipc(tmp_path / "a.arrow")
    frame.write_ipc_stream(tmp_path / "b.arrow")
    for name in ("a.parquet", "a.ndjson", "a.json", "a.csv", "a.arrow", "b.arrow"):
        assert read(str(tmp_path / name)) == frame.to_dicts(), name


def test_text_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text('{"messages": [\n')
    assert read(str(tmp_path / "cut.jsonl"))[0].why == """not JSON: Expecting value (column 15): '{"messages": ['"""
    (tmp_path / "empty.json").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.json is empty; expected a JSON list of rows"):
        read(str(tmp_path / "empty.json"))


def test_columns_limits_and_order(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    named = {"name": data, "prompt": "question", "answer": "meta.level", "limit": 2}
    first = {"answer": 0, "meta": {"level": 0}, "prompt": "0 + 1?"}
    assert read(named)[0] == first and len(read(named)) == 2
    shuffled = read({"name": data, "seed": 3})
    assert shuffled != ROWS and sorted(row["answer"] for row in shuffled) == [1, 2, 3, 4, 5, 6]
    assert shuffled == read({"name": data, "seed": 3}) == read({"name": data, "seed": 3, "streaming": True})
    assert shuffled[:2] == read({"name": data, "seed": 3, "limit": 2}) and shuffled != read({"name": data, "seed": 4})
    with pytest.raises(ConfigError, match=r"line 1 has no column 'quest'; it has: question, answer, meta\ndid you"):
        read({"name": data, "prompt": "quest"})
    with pytest.raises(ConfigError, match=r"--data.limit 0: expected 1 or more"):
        read({"name": data, "limit": 0})


def test_bad_rows_are_skipped_only_if_asked(tmp_path: Path) -> None:
    """Not JSON, a missing column, no prompt: fatal with its line, or skipped, counted and shown."""
    data = write_jsonl(tmp_path / "rows.jsonl", [{"q": "a"}, {"q": "b"}, {"x": 1}, {"q": {"a": 3}}])
    Path(data).write_text(Path(data).read_text() + "{\n")
    with pytest.raises(ConfigError, match="line 3 has no column 'q'"):
        Prompts({"name": data, "prompt": "q"}, eval_fraction=0.0).tasks("train", random.Random(0))
    env = Prompts({"name": data, "prompt": "q", "bad_rows": "skip"}, eval_fraction=0.0)
    with pytest.warns(UserWarning, match=r"3 rows skipped, such as: .*line 3 has no column 'q'"):
        assert sorted(task.prompt for task in env.tasks("train", random.Random(0))) == ["a", "b"]


def test_a_stream_holds_out_the_same_tasks(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"question {n}"} for n in range(100)])
    stream, whole = Prompts({"name": data, "streaming": True}), Prompts(data)
    for split in ("train", "eval"):
        tasks = stream.tasks(split, random.Random(0))
        assert iter(tasks) is tasks, "read while the run goes on"
        assert {task.key for task in tasks} == {task.key for task in whole.tasks(split, random.Random(0))}


def test_a_loader_of_your_own(tmp_path: Path) -> None:
    """A function in a file: its source, its settings, its mistakes."""
    (tmp_path / "mine.py").write_text(
        "def load(source, *, count: int = 2):\n    return ({'prompt': f'{source} {n}'} for n in range(count))\n"
        "def taken(source, *, limit: int = 2): ...\n"
        "def breaks(source):\n    yield {'prompt': 'a'}\n    raise KeyError('no')\n"
        "def text():\n    return 'abc'\n"
    )
    assert read(f"{tmp_path}/mine.py:load:x") == [{"prompt": "x 0"}, {"prompt": "x 1"}]
    assert len(read({"name": f"{tmp_path}/mine.py:load", "count": 5, "limit": 3})) == 3
    for name, error, words in (
        ("taken", SignatureError, "limit have the names of settings that all data has"),
        ("breaks", ConfigError, r"its loader raised KeyError: 'no' \(.*line 6"),
        ("text", ConfigError, "returned str, of which the characters would be read; expected an iterable"),
    ):
        with pytest.raises(error, match=words):
            read(f"{tmp_path}/mine.py:{name}")


def test_a_run_gives_its_data_to_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With settings as a table, and again from the run's own config.toml. An environment of two keeps its own."""
    import tomllib

    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    tree = {"data": {"name": "rows.jsonl", "prompt": "question", "limit": 4}, "reward": ["constant"]}
    for again in (False, True):
        plan = make_plan(resolve(tree))
        given = plan.chosen["env"][0].settings["data"]
        assert given.items() >= {"name": "rows.jsonl", "prompt": "question", "limit": 4}.items(), again
        assert plan.settings.data == "rows.jsonl" and plan.env_name == "prompts"
        assert [task.answer for task in plan.environments[0].draw("eval", random.Random(0))]
        tree = tomllib.loads(to_toml(plan.resolved))
    with pytest.raises(UserError, match=r"data.promptt: dataset rows.jsonl has no setting 'promptt'\ndid you mean"):
        make_plan(resolve({"data": {"name": "rows.jsonl", "promptt": "question"}, "reward": ["constant"]}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent = {"env": {"name": "agent", "command": "true"}, "data": tree["data"], "reward": ["constant"]}
        assert make_plan(resolve(agent)).chosen["env"][0].settings["data"]["prompt"] == "question"
