"""What only the model can tell of a saved schedule, asked of the command line in a process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


async def ask(verb: str, file: Path, *options: str) -> Mapping[str, Any] | None:
    """The JSON that a verb prints of a file; None if it prints none.

    The model file is imported by that process: it may take long, fail or end it, and none of this
    touches who asks.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schedlang", verb, str(file), *options, "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    try:
        told = json.loads(out)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def rows(told: Mapping[str, Any] | None) -> dict[int, list[Mapping[str, Any]]]:
    """The rows of a plan by the line of the file that asked for them."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for step in (told or {}).get("steps", ()):
        for row in step["lines"]:
            if row.get("from"):
                found.setdefault(row["from"][1], []).append(row)
    return found
