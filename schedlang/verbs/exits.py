"""Exit codes of verbs, and the output of their results and refusals as text or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from schedlang.diagnostics.diagnostic import Facts, Refusal
from schedlang.diagnostics.tables import message_columns

HOLDS, FAILS, REFUSED, UNCHECKED = 0, 1, 2, 3


def exit_code_of(
    run: Callable[[], int], as_json: bool, reraise: tuple[type[Exception], ...] = ()
) -> int:
    """Run a verb and return its exit code; a message is always printed.

    A refusal is 2, an error of schedlang 3. Exceptions in `reraise` are raised on.
    """
    try:
        return run()
    except Refusal as refusal:
        show_refusal(refusal, as_json)
        return REFUSED
    except reraise:
        raise
    except Exception as error:
        if isinstance(error, OSError) and is_output_lost():
            return UNCHECKED
        import traceback

        traceback.print_exc()
        if as_json:
            show_json({"exit": UNCHECKED, "error": f"{type(error).__name__}: {error}"})
        return UNCHECKED


def is_output_lost() -> bool:
    """Return whether standard output fails, found by an empty line; if so say why, and discard the
    rest.

    Nothing is said if its reader has exited, as `head` does.
    """
    try:
        print(flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return True
    return False


def show_refusal(refusal: Refusal, as_json: bool = False) -> None:
    """Print all messages of a refusal."""
    if as_json:
        messages = [d.to_json() for d in refusal.diagnostics]
        show_json({"exit": REFUSED, "diagnostics": messages})
    else:
        print(refusal.render(message_columns(sys.stderr)), file=sys.stderr)


def show_json(value: object) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def bad_option(title: str, help_: str, facts: Facts = ()) -> NoReturn:
    """Refuse (S109) an option, or a combination of options, and say what would be legal."""
    raise Refusal.of("S109", title, helps=(help_,), facts=facts)


def check_positive(name: str, value: float | None) -> None:
    """Refuse (S109) a given number that is not finite and above 0."""
    if value is not None and not 0 < value < float("inf"):
        title = f"`--{name}` must be finite and above 0, not {value:g}"
        bad_option(title, f"for example `--{name} 100`")
