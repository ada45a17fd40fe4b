"""Write anew what the examples say, after a message was changed: `python -m tests.refusals`.

Names of codes choose among them.  Read the difference before it is committed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import schedlang
from schedlang.diagnostics.codes import parse_example
from tests.engine import Threads
from tests.refusals.playing import rewritten

FOLDER = Path(schedlang.__file__).parent / "diagnostics" / "code_texts" / "examples"


def main(chosen: list[str]) -> None:
    """Play and rewrite each file whose name is chosen, or all."""
    for path in sorted(FOLDER.glob("[SW]*.txt")):
        if chosen and path.stem.partition(".")[0] not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder, Threads() as threads:
            try:
                made = rewritten(parse_example(path.read_text()), Path(folder).resolve(), threads)
            except Exception as error:  # of one example; the others are still to be written
                print(f"{path.stem}: {type(error).__name__}: {error}")
                continue
        if made.text() != path.read_text():
            path.write_text(made.text())
            print(f"{path.stem}: changed")


main(sys.argv[1:])
