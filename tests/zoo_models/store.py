"""What is known already: verdicts by model, schedule and source, one JSON line each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.zoo_models.cell import Verdict

ROOT = Path(__file__).parent.parent.parent
SOURCES = ("schedlang", "primitives", "passes", "tests/engine", "tests/zoo_models")


@cache
def source() -> str:
    """A hash of all code that a verdict depends on."""
    seen = hashlib.blake2b(digest_size=6)
    files = {f for folder in SOURCES for f in (ROOT / folder).rglob("*.py")}
    for path in sorted(files | {ROOT / "tests/survey.py"}):
        seen.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return seen.hexdigest()


def folder() -> Path:
    """Where verdicts are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "schedlang" / "zoo_models"


@dataclass(frozen=True)
class Known:
    """A verdict and the source it was found with."""

    verdict: Verdict
    source: str


class Store:
    """A file of verdicts, the newest of a cell last; every line is whole or left out."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or folder() / "verdicts.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, verdict: Verdict) -> None:
        """Keep a verdict, at once."""
        with self.path.open("a") as file:
            file.write(json.dumps({"source": source(), **verdict.plain()}) + "\n")

    def known(self) -> dict[tuple[str, str], Known]:
        """The newest verdict of every cell: of this source where there is one."""
        found: dict[tuple[str, str], Known] = {}
        for line in self._lines():
            try:
                entry = json.loads(line)
            except ValueError:  # a run was ended while it wrote
                continue
            made = entry.pop("source")
            verdict = Verdict(**entry)
            found[verdict.kind, verdict.mesh] = Known(verdict, made)
        return found

    def _lines(self) -> Iterable[str]:
        return self.path.read_text().splitlines() if self.path.exists() else ()
