"""scripts/template_table.py judges the rows of real templates from outside."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "template_table.py"
TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + END }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def test_the_table_and_the_ids(tmp_path, capsys, monkeypatch) -> None:
    ids = tmp_path / "ids.jsonl"
    (tmp_path / "qwen-ends.jinja").write_text(TURNS.replace("END", "'<|im_end|>\n'") + PROMPT)
    (tmp_path / "qwen-endless.jinja").write_text(
        (TURNS + PROMPT).replace("END", "'\n'").replace("<|im_start|>", "### ")
    )
    for arguments in (["--ids", str(ids)], ["--before", str(ids)]):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["qwen-endless", "refused"] in [line[:2] for line in lines]
    assert ["qwen", "1", "0", "0", "0", "1"] in [line[:6] for line in lines]
    assert lines[-1] == ["rows", "that", "differ"]
    rows = {(row["template"], row["conversation"]): row for row in map(json.loads, ids.read_text().splitlines())}
    (tokens, mask), *_ = rows["qwen-ends", "thoughts"]["ids"]
    assert rows["qwen-ends", "plain"]["outcome"] == "right" and len(tokens) == len(mask) and set(mask) == {0.0, 1.0}
