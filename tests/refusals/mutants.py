"""Mutants of valid schedules, and what becomes of them: a plan or a refusal, and nothing else."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from schedlang.diagnostics.codes import codes_with_examples, example, model
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse, read
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.lint import lint
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.simulate.account import account
from schedlang.schedule import Schedule
from tests import models

ROOT = Path(__file__).parents[2]
TOKEN = re.compile(r'"[^"\n]*"|`[^`\n]*`|[A-Za-z_]\w*|\d+(?:\.\d+)?|\s+|.', re.DOTALL)
ODD = [
    *("0", "-1", "1", "3", "99999999999", "9" * 40, "1e309", "0.5", "2GiB", "_", "true", '""'),
    *("*", "**", "[0]", "[::0]", "[-9]", "{a,b}", "(", ")", "{", "}", "[", "]", ",", ":", ".", "="),
    *("\n", "\t", "\x00", "\ufeff", "é", "漢", "'", "`", "#", "..", "?", "S(out)", "R", "P(sum)"),
    *("over=tp", "model.config.n_head", "use", "mesh", "step", "def", "where index > 1", "not"),
]
NUMBERS = ["0", "1", "2", "3", "7", "16", "1000", "1000000", "999999999999999999"]


@dataclass(frozen=True)
class Seen:
    """What one text came to: the codes of its refusal, or none; seconds of this thread."""

    codes: tuple[str, ...]
    seconds: float


def valid() -> list[tuple[str, str]]:
    """Paths and texts of all schedules of the examples and tests, and of the pages of codes."""
    files = [path for folder in ("examples", "tests") for path in (ROOT / folder).rglob("*.sched")]
    found = [(str(path), path.read_text()) for path in sorted(files)]
    for code in codes_with_examples():
        one = example(code)
        assert one is not None
        found += [(name, text) for name, text in one.files.items() if name.endswith(".sched")]
    return found


def mutants(rng: random.Random, texts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Endlessly many texts near valid ones, each under the path of the one that it comes from."""
    words = sorted({token for _, text in texts for token in TOKEN.findall(text) if token.strip()})
    while True:
        path, text = rng.choice(texts)
        changes = CHANGES if rng.random() < 0.4 else [ALIKE]  # what cannot be read ends at once
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            text = rng.choice(changes)(rng, text, words)
        if rng.random() < 0.02:
            text = _joined(text, rng.choice(texts)[1])
        yield path, text


def noise(rng: random.Random) -> bytes:
    """A random byte string; half of them of the characters that schedules are made of."""
    count = rng.choice((0, 1, 3, 10, 40, 200, 1000))
    if rng.random() < 0.5:
        return rng.randbytes(count)
    return b"schedule 1\n" + bytes(
        rng.choice(b"abh*.()[]{},:=+-\n \"'#_0129\\`?") for _ in range(count)
    )


def _tokens(change: Callable[[random.Random, list[str], Sequence[str]], None]) -> Any:
    def changed(rng: random.Random, text: str, words: Sequence[str]) -> str:
        tokens = TOKEN.findall(text)
        if tokens:
            change(rng, tokens, words)
        return "".join(tokens)

    return changed


def _lines(change: Callable[[random.Random, list[str], Sequence[str]], None]) -> Any:
    def changed(rng: random.Random, text: str, words: Sequence[str]) -> str:
        lines = text.split("\n")
        change(rng, lines, words)
        return "\n".join(lines)

    return changed


def _delete(rng: random.Random, parts: list[str], words: Sequence[str]) -> None:
    del parts[rng.randrange(len(parts))]


def _double(rng: random.Random, parts: list[str], words: Sequence[str]) -> None:
    parts.insert(rng.randrange(len(parts)), rng.choice(parts))


def _swap(rng: random.Random, parts: list[str], words: Sequence[str]) -> None:
    i, j = rng.randrange(len(parts)), rng.randrange(len(parts))
    parts[i], parts[j] = parts[j], parts[i]


def _replace(rng: random.Random, parts: list[str], words: Sequence[str]) -> None:
    places = [k for k, part in enumerate(parts) if part.strip()]
    if places:
        parts[rng.choice(places)] = rng.choice(ODD if rng.random() < 0.4 else words)


def _alike(rng: random.Random, parts: list[str], words: Sequence[str]) -> None:
    """Another name for a name, another number for a number: most of these can be read."""
    places = [k for k, part in enumerate(parts) if part[0].isalnum()]
    if places:
        k = rng.choice(places)
        numbers = [*NUMBERS, *(word for word in words if word[0].isdigit())]
        names = [word for word in words if word[0].isalpha()]
        parts[k] = rng.choice(numbers if parts[k][0].isdigit() else names)


def _truncate(rng: random.Random, text: str, words: Sequence[str]) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _joined(text: str, other: str) -> str:
    return text + "\n" + other.partition("\n")[2]


ALIKE = _tokens(_alike)
CHANGES: list[Callable[[random.Random, str, Sequence[str]], str]] = [
    *map(_tokens, (_delete, _double, _swap, _replace, _replace, _replace)),
    ALIKE,
    *map(_lines, (_delete, _double, _swap)),
    _truncate,
]


# -- what becomes of them ------------------------------------------------------------------------


@cache
def _models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Small models, by the class that a header may name."""
    names: dict[str, Any] = {}
    exec(model(), names)
    tokens = models.tokens(4)
    return {
        "Net": (names["model"](), names["batch"](0)),
        "GPT2LMHeadModel": (models.gpt2(2), tokens),
        "LlamaForCausalLM": (models.llama(2), tokens),
    }


def played(path: str, text: str, costs: bool) -> Seen:
    """Check and plan a text; with `costs` also count what the plan costs.

    Whatever but a refusal it raises is raised.
    """
    start = time.thread_time()
    codes: tuple[str, ...] = ()
    try:
        tree = parse(Source(path, text))
        lint(tree)
        expand(tree, None, Settings())
        subject, batch = _models().get(tree.header.model or "Net", _models()["Net"])
        plan = Schedule(subject, tree, Settings()).plan()
        if costs:
            account(plan, batch)
    except Refusal as refusal:
        codes = tuple(d.code for d in refusal.diagnostics)
        assert refusal.render()
    return Seen(codes, time.thread_time() - start)


def read_bytes(path: Path, raw: bytes) -> Seen:
    """Write and check a file of these bytes."""
    path.write_bytes(raw)
    try:
        source = read(path)
    except Refusal as refusal:
        return Seen(tuple(d.code for d in refusal.diagnostics), 0.0)
    return played(source.name, source.text, costs=False)
