"""Record a command in a real terminal and draw it as an animated SVG: docs/terminal.svg of the README.

    python scripts/terminal_picture.py                                # the main job: about a minute
    python scripts/terminal_picture.py --save main.cast               # also keep the recording, for asciinema
    python scripts/terminal_picture.py --load main.cast --seconds 20  # draw a recording again; nothing is run

The command runs in a pseudo-terminal, so it shows what it shows to a person. Its output is recorded with times, in
asciinema's format. A terminal emulator (pyte) turns the recording into screens, and the SVG shows them one after the
other: without a script, by a CSS animation, also on GitHub. Who prefers less motion sees the last screen.

Needs pyte (requirements-test.txt), and a system with pseudo-terminals.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import pyte

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "rollouts run --env calculator --loss grpo --out runs/first"
COLUMNS, ROWS = 100, 30
WIDTH, HEIGHT, PAD, TOP = 8.0, 18, 14, 36  # pixels: a character, a line, the border, the title bar
FRAMES_MAX = 70
TYPING_SECONDS, LAST_SECONDS = 1.6, 6.0
INK, PAPER, FRAME = "#d7dce2", "#14171b", "#2a3038"
COLORS = {
    "black": "#5d6670", "red": "#ff8a80", "green": "#5bd699", "brown": "#e6c25a", "yellow": "#e6c25a",
    "blue": "#6cb0ff", "magenta": "#d59bff", "cyan": "#4fd1e5", "white": "#e6e9ed",
}  # fmt: skip


class Output(NamedTuple):
    """What a command wrote at a time, in seconds from its beginning."""

    seconds: float
    text: str


class Piece(NamedTuple):
    """Characters of one style in a line of the screen, from a column on."""

    column: int
    text: str
    style: str


Screen = tuple[tuple[Piece, ...], ...]


class Frame(NamedTuple):
    """A screen, and how long it is shown."""

    screen: Screen
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=COMMAND)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "terminal.svg")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the command is shown")
    parser.add_argument("--save", type=Path, help="write the recording into this file")
    parser.add_argument("--load", type=Path, help="draw this recording; run nothing")
    given = parser.parse_args()
    if given.load is None:
        with tempfile.TemporaryDirectory() as folder:
            recording = list(record(given.command, folder))
    else:
        given.command, recording = load(given.load.read_text(encoding="utf-8"))
    if given.save is not None:
        given.save.write_text(dump(given.command, recording), encoding="utf-8")
    picture = draw(frames_of(given.command, recording, given.seconds), given.command)
    given.out.write_text(picture, encoding="utf-8")
    print(f"wrote {given.out}: {len(picture.encode()) / 1000:.0f} kB of {recording[-1].seconds:.0f} s")


def record(command: str, folder: str) -> Iterator[Output]:
    """Run a command in a pseudo-terminal, in this folder. Raises SystemExit if it fails."""
    began, (terminal, inside) = time.monotonic(), pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "PATH": path}
    child = subprocess.Popen(
        shlex.split(command), stdin=inside, stdout=inside, stderr=inside, cwd=folder, env=own, start_new_session=True
    )
    os.close(inside)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        if not data:
            break
        yield Output(time.monotonic() - began, decoder.decode(data))
    os.close(terminal)
    code = child.wait()
    if code:
        raise SystemExit(f"{command} ended with exit code {code}")


def dump(command: str, recording: Sequence[Output]) -> str:
    """A recording in asciinema's format, version 2."""
    lines: list[object] = [{"version": 2, "width": COLUMNS, "height": ROWS, "command": command}]
    lines += [[round(each.seconds, 3), "o", each.text] for each in recording]
    return "".join(json.dumps(line) + "\n" for line in lines)


def load(text: str) -> tuple[str, list[Output]]:
    """The command and the output of a recording."""
    head, *lines = [json.loads(line) for line in text.splitlines()]
    return head.get("command", ""), [Output(seconds, output) for seconds, kind, output in lines if kind == "o"]


def frames_of(command: str, recording: Sequence[Output], seconds: float) -> list[Frame]:
    """The screens of a recording, as many as fit in these seconds, equal neighbors joined."""
    terminal = pyte.Screen(COLUMNS, ROWS)
    terminal.set_mode(pyte.modes.LNM)  # "\n" also returns to the first column
    stream = pyte.Stream(terminal)
    frames = []
    for end in range(0, len(command) + 1, 4):
        terminal.reset()
        terminal.set_mode(pyte.modes.LNM)
        stream.feed(f"\x1b[1;32m$\x1b[0m {command[: end + 3]}")
        frames.append(Frame(screen_of(terminal), TYPING_SECONDS * 4 / len(command)))
    stream.feed("\n")
    count = FRAMES_MAX - len(frames)
    whole, waiting = recording[-1].seconds, list(recording)
    for number in range(1, count + 1):
        while waiting and waiting[0].seconds <= whole * number / count:
            stream.feed(waiting.pop(0).text)
        frames.append(Frame(screen_of(terminal), seconds / count))
    joined: list[Frame] = []
    for frame in frames:
        if joined and joined[-1].screen == frame.screen:
            joined[-1] = Frame(frame.screen, joined[-1].seconds + frame.seconds)
        else:
            joined.append(frame)
    return [*joined[:-1], Frame(joined[-1].screen, LAST_SECONDS)]


def screen_of(terminal: pyte.Screen) -> Screen:
    """What a terminal shows."""
    return tuple(tuple(_pieces(terminal, row)) for row in range(ROWS))


def _pieces(terminal: pyte.Screen, row: int) -> Iterator[Piece]:
    line, column = terminal.buffer[row], 0
    while column < COLUMNS:
        style, begin, text = _style(line[column]), column, ""
        while column < COLUMNS and _style(line[column]) == style:
            text += line[column].data
            column += 1
        shown = text.rstrip()
        if shown:
            blank = len(shown) - len(shown.lstrip())
            yield Piece(begin + blank, shown.lstrip(), style)


def _style(char: pyte.screens.Char) -> str:
    """The attributes of an SVG text; spaces have those of plain text, so that words stay together."""
    if char.data == " " and not char.reverse:
        char = char._replace(fg="default", bold=False, italics=False)
    name = (char.bg if char.reverse else char.fg).removeprefix("bright")
    color = INK if name == "default" else COLORS.get(name, f"#{name}")
    style = "" if color == INK else f' fill="{color}"'
    return style + (' font-weight="bold"' if char.bold else "") + (' font-style="italic"' if char.italics else "")


def draw(frames: Sequence[Frame], command: str) -> str:
    """The SVG. Each line that some screen shows is there once; the screens lie side by side and are moved past."""
    names: dict[tuple[Piece, ...], str] = {}
    whole, at, shown, steps = sum(each.seconds for each in frames), 0.0, [], []
    wide, high = round(COLUMNS * WIDTH + 2 * PAD), ROWS * HEIGHT + TOP + PAD
    for number, (screen, seconds) in enumerate(frames):
        uses = [
            f'<use href="#{names.setdefault(line, f"l{len(names)}")}" y="{row * HEIGHT}"/>'
            for row, line in enumerate(screen)
            if line
        ]
        shown.append(f'<g transform="translate({number * wide})">{"".join(uses)}</g>')
        steps.append(f"{100 * at / whole:.2f}%{{transform:translateX({-number * wide}px)}}")
        at += seconds
    last = f"translateX({-(len(frames) - 1) * wide}px)"
    font = "14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    style = (
        f"text{{font:{font};white-space:pre}}.film{{fill:{INK};animation:film {whole:.1f}s step-end infinite}}"
        f"@keyframes film{{{''.join(steps)}}}"
        f"@media(prefers-reduced-motion:reduce){{.film{{animation:none;transform:{last}}}}}"
    )
    lines = "".join(f'<g id="{name}">{"".join(map(_text, line))}</g>' for line, name in names.items())
    dots = "".join(
        f'<circle cx="{20 + 18 * index}" cy="16" r="5.5" fill="{color}"/>'
        for index, color in enumerate(("#ff8a80", "#e6c25a", "#5bd699"))
    )
    size = f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        f"<title>{escape(command)}, in a terminal</title><style>{style}</style><defs>{lines}</defs>"
        f'<rect width="{wide}" height="{high}" rx="10" fill="{PAPER}" stroke="{FRAME}"/>{dots}'
        f'<svg x="{PAD}" y="{TOP}" width="{wide - 2 * PAD}" height="{ROWS * HEIGHT}" viewBox="0 0 {wide - 2 * PAD} '
        f'{ROWS * HEIGHT}"><g class="film">{"".join(shown)}</g></svg></svg>\n'
    )


def _text(piece: Piece) -> str:
    """A piece of a line. Its length is given, so that columns stay columns in any font."""
    length = f' textLength="{len(piece.text) * WIDTH:g}" lengthAdjust="spacingAndGlyphs"' if len(piece.text) > 1 else ""
    return f'<text x="{piece.column * WIDTH:g}" y="{HEIGHT - 5}"{length}{piece.style}>{escape(piece.text)}</text>'


if __name__ == "__main__":
    main()
