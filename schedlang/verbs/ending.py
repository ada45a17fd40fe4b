"""The end of a verb: text or JSON, and the exit code that its result stands for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from schedlang.diagnostics.diagnostic import Facts, Refusal
from schedlang.diagnostics.tables import for_messages

HOLDS, FAILS, REFUSED, UNCHECKED = 0, 1, 2, 3


def ended(run: Callable[[], int], as_json: bool, through: tuple[type[Exception], ...] = ()) -> int:
    """The exit code of what is run: refusals are 2, errors of our own 3; a message is always
    shown.  What is in `through` is raised on."""
    try:
        return run()
    except Refusal as refusal:
        show_refusal(refusal, as_json)
        return REFUSED
    except through:
        raise
    except BrokenPipeError:  # who read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNCHECKED
    except Exception as error:
        import traceback

        traceback.print_exc()
        if as_json:
            show_json({"exit": UNCHECKED, "error": f"{type(error).__name__}: {error}"})
        return UNCHECKED


def show_refusal(refusal: Refusal, as_json: bool = False) -> None:
    """All messages of a refusal."""
    if as_json:
        messages = [d.to_json() for d in refusal.diagnostics]
        show_json({"exit": REFUSED, "diagnostics": messages})
    else:
        print(refusal.render(for_messages(sys.stderr)), file=sys.stderr)


def show_json(value: object) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def bad_option(title: str, help_: str, facts: Facts = ()) -> NoReturn:
    """Refuse an option, or options beside each other (S109), with what would be legal."""
    raise Refusal.of("S109", title, helps=(help_,), facts=facts)


def check_positive(name: str, value: float | None) -> None:
    """Refuse a number that is given, and is not finite and above 0 (S109)."""
    if value is not None and not 0 < value < float("inf"):
        title = f"`--{name}` must be finite and above 0, not {value:g}"
        bad_option(title, f"for example `--{name} 100`")
