"""Stored verdicts by model, schedule and source hash, one JSON line each."""

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
    """Return a hash of all code that verdicts depend on."""
    digest = hashlib.blake2b(digest_size=6)
    files = {f for folder in SOURCES for f in (ROOT / folder).rglob("*.py")}
    for path in sorted(files | {ROOT / "tests/survey.py"}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the folder where verdicts are stored between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "schedlang" / "zoo_models"


@dataclass(frozen=True)
class StoredVerdict:
    """A verdict and the hash of the source that produced it."""

    verdict: Verdict
    source: str


class Store:
    """A file of verdicts; later lines replace earlier ones, incomplete lines are ignored."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "verdicts.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, verdict: Verdict) -> None:
        """Append a verdict to the file at once."""
        with self.path.open("a") as file:
            file.write(json.dumps({"source": source(), **verdict.plain()}) + "\n")

    def known(self) -> dict[tuple[str, str], StoredVerdict]:
        """Return the newest verdict of every cell."""
        verdicts: dict[tuple[str, str], StoredVerdict] = {}
        for line in self._lines():
            try:
                entry = json.loads(line)
            except ValueError:  # a run was killed while it wrote
                continue
            source_ = entry.pop("source")
            verdict = Verdict(**entry)
            verdicts[verdict.kind, verdict.mesh] = StoredVerdict(verdict, source_)
        return verdicts

    def _lines(self) -> Iterable[str]:
        return self.path.read_text().splitlines() if self.path.exists() else ()
