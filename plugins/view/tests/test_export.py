"""An exported file has everything in it and nothing that could run or leave it."""

from __future__ import annotations

import json
import re

from rollouts_view import export
from rollouts_view.server import page_files

from rollouts.cli import main


def test_one_file_with_a_run(make, make_episode, tmp_path, capsys):
    hostile = "</script><script>alert(1)</script>"
    run = make.run(steps=2, episodes=[make_episode(number, reply=hostile) for number in range(4)])
    target = tmp_path / "run.html"
    assert main(["view", str(run), "--export", str(target)]) == 0
    assert capsys.readouterr().out == f"wrote {target} with 8 rollouts\n"
    page = target.read_text()
    assert hostile not in page and not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    quoted = str(run).replace("/", "%2F")
    line = data["answers"][f"/api/runs/{quoted}/step_000001/lines/3"]
    assert line["messages"][-1]["content"] == hostile and f"/api/runs/{quoted}/step_000000" not in data["answers"]
    assert main(["view", str(run), "--export", str(target)]) == 2
    assert "is not overwritten" in capsys.readouterr().err


def test_mistakes(make, tmp_path, capsys):
    make.run("first"), make.run("second")
    assert main(["view", str(make.directory), "--export", str(tmp_path / "x.html")]) == 2
    assert "takes one run, and there are 2" in capsys.readouterr().err
    assert main(["view", str(make.directory / "first"), "--export", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_does_not_fit_is_said(make, make_episode, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export, "BYTES_MAX", 3000)
    run = make.run()
    assert main(["view", str(run), "--export", str(tmp_path / "x.html")]) == 0
    assert "did not fit" in capsys.readouterr().out


def test_the_modules_of_the_page_are_whole():
    """Each module imports only from those before it, and all of them are small enough for the wheel."""
    files = {name: content.decode() for name, content in page_files().items()}
    known = {f"{name}.js" for name in (*export.MODULES, *export.NEEDS_SERVER)}
    assert known == {name for name in files if name.endswith(".js")}
    for number, name in enumerate(export.MODULES):
        more = export.NEEDS_SERVER if name == "main" else ()
        imported = re.findall(r'^import .* from "\./(\w+)\.js";$', files[f"{name}.js"], re.MULTILINE)
        assert len(imported) == files[f"{name}.js"].count("import ") and set(imported) <= {
            *export.MODULES[:number],
            *more,
        }
    assert sum(map(len, files.values())) < 150_000
    assert not any(
        re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text) for text in files.values()
    )
