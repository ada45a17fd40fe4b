"""--knob and --mesh of a command line to settings of a schedule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedlang.diagnostic import Diagnostic, Refusal

if TYPE_CHECKING:
    from schedlang.passes.reading.state import Settings


def settings(knobs: Sequence[str] | None, mesh: str | None) -> Settings:
    """Settings as given, in torchrun's world where there is one (S109)."""
    from schedlang.passes.reading.state import Settings

    sizes = {}
    for name, text in (_pair("--mesh", part) for part in (mesh or "").split(",") if part.strip()):
        if not text.isdigit() or int(text) < 1:
            _bad("--mesh", f"{name}={text}", "the size of an axis must be an integer above 0")
        sizes[name] = int(text)
    world = os.environ.get("WORLD_SIZE", "")
    given = dict(_pair("--knob", part) for part in knobs or ())
    return Settings(given, sizes, int(world) if world.isdigit() else None)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not name or not equals or not value:
        _bad(option, text, "write name=value")
    return name, value


def _bad(option: str, text: str, help_: str) -> None:
    title = f"cannot read `{option} {text}`"
    raise Refusal(Diagnostic("S109", title, helps=(help_,)))
