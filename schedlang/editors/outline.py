"""A model as `tree --each --json` tells it: what selectors ask, without importing the model."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from schedlang.diagnostics.source import NOWHERE
from schedlang.language.selector import Selector
from schedlang.language.syntax import parse_path
from schedlang.language.value import Names

# -- asking the command line in a process ----------------------------------------------------------


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


# -- the model, without importing it ---------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A parameter, as far as selectors see it."""

    dtype: str


class Outline:
    """The modules of a model by name; satisfies what `Selector` asks of a tree."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.nodes = {node["path"]: node for node in _flat(told)}

    def children(self, fqn: str) -> Sequence[str]:
        """The names of the direct children of a module."""
        return [child["path"].rpartition(".")[2] for child in self.nodes[fqn]["children"]]

    def class_names(self, fqn: str) -> tuple[str, ...]:
        """The name of a module's class; its bases are not told."""
        return (self.nodes[fqn]["class"],)

    def attribute(self, fqn: str, name: str) -> object:
        """Attributes are not told."""
        raise AttributeError(name)

    def attributes(self, fqn: str) -> Sequence[str]:
        """None are told."""
        return ()

    def numel(self, fqn: str) -> int:
        """The number of elements of a module's parameters."""
        return int(self.nodes[fqn]["parameters"])

    def below(self, fqn: str) -> Sequence[Kind]:
        """The parameters of a module and its children."""
        return [Kind(t["dtype"]) for node in _flat(self.nodes[fqn]) for t in node["tensors"]]

    def said(self, fqn: str) -> str:
        """The class of a module and the shapes of its own parameters: Linear, weight [8, 4]."""
        node = self.nodes[fqn]
        tensors = [f"{t['name']} {t['dtype']}{t['shape']}" for t in node["tensors"]]
        return ", ".join([node["class"], *tensors])

    @cached_property
    def selector(self) -> Selector:
        """Selectors over these modules."""
        return Selector(self)

    def select(self, path: str, roots: Sequence[str]) -> tuple[str, ...]:
        """The modules that a selector names; an index takes all, as it may hold knobs."""
        read = parse_path(re.sub(r"\[[^\]]*\]", ".*", path), NOWHERE)
        return self.selector.select(read, roots, Names())


def _flat(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [node, *(deep for child in node["children"] for deep in _flat(child))]
