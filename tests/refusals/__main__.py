"""Rewrite the messages of error-code examples after a change: `python -m tests.refusals`.

Arguments select codes.  Review the diff before you commit it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import schedlang
from schedlang.diagnostics.codes import parse_example
from tests.engine import Threads
from tests.refusals.run_examples import with_new_message

FOLDER = Path(schedlang.__file__).parent / "diagnostics" / "code_texts" / "examples"


def main(codes: list[str]) -> None:
    """Run and rewrite the examples of the given codes, or all."""
    for path in sorted(FOLDER.glob("[SW]*.txt")):
        if codes and path.stem.partition(".")[0] not in codes:
            continue
        with tempfile.TemporaryDirectory() as folder, Threads() as threads:
            try:
                updated = with_new_message(
                    parse_example(path.read_text()), Path(folder).resolve(), threads
                )
            except Exception as error:  # report it and go on with the other examples
                print(f"{path.stem}: {type(error).__name__}: {error}")
                continue
        if updated.text() != path.read_text():
            path.write_text(updated.text())
            print(f"{path.stem}: changed")


main(sys.argv[1:])
