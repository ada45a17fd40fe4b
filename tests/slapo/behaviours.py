"""What Slapo's own tests assert (Chen et al. 2024), and what shows it here, or why ours differs."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Behaviour:
    """One of Slapo's tests: its name, the test of ours that shows it, and how ours differs."""

    theirs: str
    ours: str
    differs: str = ""


@dataclass(frozen=True)
class Call:
    """A call of Slapo's, and the rows or the Python that say it here; no test: it is not there."""

    theirs: str
    why: str
    rows: tuple[str, ...] = ()
    python: str = ""
    test: str = ""


def calls() -> list[Call]:
    """All of them, in the order in which a schedule is written."""
    told = tomllib.loads((Path(__file__).parent / "calls.toml").read_text())
    return [Call(**{**one, "rows": tuple(one.get("rows", ()))}) for one in told["call"]]


def behaviours() -> list[Behaviour]:
    """All of them, in the order of Slapo's files."""
    told = tomllib.loads((Path(__file__).parent / "behaviours.toml").read_text())
    return [Behaviour(**one) for one in told["behaviour"]]
