"""Call everything that the first notes name, and print a table of what is there.

    python scripts/audit_first_notes.py                # all rows, in about half a minute
    python scripts/audit_first_notes.py --note 004     # one note
    python scripts/audit_first_notes.py --faults       # only rows that are not there, with the reason

Each row has a function in `first_notes/`. It imports the name as the notes do, calls it, and checks what the notes say
of it. States: there; partly (it is there, and does less); absent (it cannot be imported); needs (a package that is not
installed, and the line to install it); exception (the notes contradict each other: docs/first-notes.md has the
decision, and the function checks it); later (it is not built yet). The exit code is 1 if a row is absent or partly.

Needs what the README's first command installs: `pip install -r requirements.txt`. Uses a CPU, and no network.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from first_notes import note_000, note_001, note_002, note_003, note_004, packages
from first_notes.rows import Result, check

NOTES = {
    "000": note_000.ROWS,
    "001": note_001.ROWS,
    "002": note_002.ROWS,
    "003": note_003.ROWS,
    "004": note_004.ROWS,
    "packages": packages.ROWS,
}
STATES = ("there", "exception", "needs", "later", "partly", "absent")


def audit(notes: list[str]) -> list[Result]:
    """The result of every row of these notes."""
    return [check(note, row) for note in notes for row in NOTES[note]]


def summary(results: list[Result]) -> str:
    """`301 rows: 270 there, 5 exception, ...`"""
    counts = Counter(result.state for result in results)
    return f"{len(results)} rows: " + ", ".join(f"{counts[state]} {state}" for state in STATES)


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the summary. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--note", choices=list(NOTES), help="only the rows of this note")
    parser.add_argument("--faults", action="store_true", help="only rows that are absent or partly there")
    given = parser.parse_args(arguments)
    results = audit([given.note] if given.note else list(NOTES))
    faults = [result for result in results if result.state in ("partly", "absent")]
    shown = faults if given.faults else results
    width = max((len(result.name) for result in shown), default=0)
    for result in shown:
        print(f"{result.note:8}  {result.name:{width}}  {result.state:9}  {result.words}".rstrip())
    print(summary(results))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
