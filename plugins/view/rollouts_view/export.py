"""One HTML file with one run, which shows in any browser without a server: `rollouts view RUN --export FILE`.

The file has the page itself and the answers of the API that the page asks for. It has the run's curves, its settings,
and the rollouts of its last step and its last evaluation, as far as they fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from rollouts.disk import write_whole
from rollouts.encoding import encode
from rollouts.errors import OutputError, UserError, counted
from rollouts_view.api import ROWS_MAX, ViewAPI
from rollouts_view.catalog import Catalog
from rollouts_view.health import health, timeline
from rollouts_view.server import page_files

BYTES_MAX = 20_000_000
MODULES = "dom api chart conversation tokens runs run timeline health table rollout side compare main".split()
"""The modules of the page, each after those that it imports."""

NEEDS_SERVER = ("field", "component", "file", "new", "data")
"""The modules of pages that an exported file does not have, because they ask the server."""

WAIT_SECONDS = 600.0


def export(catalog: Catalog, target: Path) -> str:
    """Write the file, and return a line that says what it has. Raises UserError and OutputError."""
    runs = catalog.runs()
    if len(runs) != 1:
        raise UserError(f"--export takes one run, and there are {len(runs)}: type rollouts view RUN --export {target}")
    if target.exists():
        raise OutputError(f"{target} exists already and is not overwritten; type --export with another name")
    run = runs[0].name
    answers, rollouts, left_out = _answers(catalog, run)
    home = f"#/run/{quote(run, safe='')}"
    data = b'{"home":"' + home.encode() + b'","answers":{' + b",".join(answers) + b"}}"
    try:
        write_whole(target, _page(data))
    except OSError as error:
        why = f"{target} cannot be written: {error.strerror or error}"
        raise OutputError(f"{why}; type --export with another") from error
    more = f"; {counted(left_out, 'rollout')} did not fit" if left_out else ""
    return f"wrote {target} with {counted(rollouts, 'rollout')}{more}"


def _answers(catalog: Catalog, run: str) -> tuple[list[bytes], int, int]:
    """The answers of the API by their address, as JSON; how many rollouts they have, and how many did not fit."""
    name = quote(run, safe="!'()*~")
    api, home, found = ViewAPI(catalog), f"/api/runs/{name}", list[bytes]()

    def add(address: str, answer: bytes) -> int:
        found.append(b'"' + address.encode() + b'":' + answer)
        return len(answer)

    files = [each["name"] for each in catalog.files(run)]
    steps, evaluations = ([file for file in files if file.startswith(start)] for start in ("step_", "eval"))
    kept = [*steps[-1:], *evaluations[-1:]]
    for address in (home, f"{home}/causes"):
        add(address, api.answer("GET", address))
    own = health(catalog, run)
    own["times"] = [each for each in own["times"] if each in kept]
    add(f"{home}/health", encode(own))
    for file in own["times"]:
        add(f"{home}/{file}/times", encode(timeline(catalog, run, file)))
    add("/api/metrics", encode({"curves": {run: catalog.metrics(run)}}))  # the page takes those that it shows
    total = rollouts = left_out = 0
    for file in kept:
        catalog.table(run, file).wait(WAIT_SECONDS)
        add(f"{home}/{file}", api.answer("GET", f"{home}/{file}", f"count={ROWS_MAX}"))
        lines = catalog.lines(run, file).total
        for line in range(lines):
            if line >= ROWS_MAX or total > BYTES_MAX:
                left_out += lines - line
                break
            address = f"{home}/{file}/lines/{line}"
            total += add(address, api.answer("GET", address))
            rollouts += 1
    return found, rollouts, left_out


def _page(data: bytes) -> bytes:
    """The page in one piece. `<` in the data is escaped, so that no text in it can end the element."""
    files = page_files()
    style, script = files["style.css"], "\n".join(_modules(files)).encode()
    inline = b'<script type="application/json" id="data">' + data.replace(b"<", b"\\u003c") + b"</script>"
    policy = b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    page = files["index.html"]
    page = page.replace(b'<link rel="stylesheet" href="style.css">', b"<style>" + style + b"</style>")
    page = page.replace(b'<script type="module" src="main.js"></script>', b"")
    head = b'<meta http-equiv="content-security-policy" content="' + policy + b'">\n<meta name="color-scheme"'
    page = page.replace(b'<meta name="color-scheme"', head)
    return page.replace(b"</body>", inline + b'\n<script type="module">\n' + script + b"</script>\n</body>")


def _modules(files: dict[str, bytes]) -> Iterator[str]:
    """The modules as one script: each in a block of its own, whose exports are variables of the script."""
    for name in MODULES:
        source = files[f"{name}.js"].decode()
        source = re.sub(r"^import .*;\n", "", source, flags=re.MULTILINE)
        exported = re.findall(r"^export (?:async )?(?:function|const) (\w+)", source, re.MULTILINE)
        body = re.sub(r"^export ", "", source, flags=re.MULTILINE)
        names = ", ".join(exported)
        yield f"const {{ {names} }} = (() => {{\n{body}\nreturn {{ {names} }};\n}})();" if exported else body
