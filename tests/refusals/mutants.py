"""Random mutants of valid schedules, and a check that each ends in a plan or a refusal."""

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
ODD_TOKENS = [
    *("0", "-1", "1", "3", "99999999999", "9" * 40, "1e309", "0.5", "2GiB", "_", "true", '""'),
    *("*", "**", "[0]", "[::0]", "[-9]", "{a,b}", "(", ")", "{", "}", "[", "]", ",", ":", ".", "="),
    *("\n", "\t", "\x00", "\ufeff", "é", "漢", "'", "`", "#", "..", "?", "S(out)", "R", "P(sum)"),
    *("over=tp", "model.config.n_head", "use", "mesh", "step", "def", "where index > 1", "not"),
]
NUMBERS = ["0", "1", "2", "3", "7", "16", "1000", "1000000", "999999999999999999"]


@dataclass(frozen=True)
class Outcome:
    """Result of one text: codes of its refusal, empty if planned, and seconds of this thread."""

    codes: tuple[str, ...]
    seconds: float


def valid_schedules() -> list[tuple[str, str]]:
    """Return paths and texts of all schedules of examples, tests and pages of codes."""
    files = [path for folder in ("examples", "tests") for path in (ROOT / folder).rglob("*.sched")]
    schedules = [(str(path), path.read_text()) for path in sorted(files)]
    for code in codes_with_examples():
        code_example = example(code)
        assert code_example is not None
        schedules += [
            (name, text) for name, text in code_example.files.items() if name.endswith(".sched")
        ]
    return schedules


def mutants(rng: random.Random, texts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield an endless series of mutated schedules, each with the path of its original."""
    vocabulary = sorted(
        {token for _, text in texts for token in TOKEN.findall(text) if token.strip()}
    )
    while True:
        path, text = rng.choice(texts)
        changes = (
            CHANGES if rng.random() < 0.4 else [SAME_KIND_CHANGE]
        )  # unparsable texts are refused early
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            text = rng.choice(changes)(rng, text, vocabulary)
        if rng.random() < 0.02:
            text = _append(text, rng.choice(texts)[1])
        yield path, text


def noise(rng: random.Random) -> bytes:
    """Return random bytes; in half of the calls only characters that schedules use."""
    count = rng.choice((0, 1, 3, 10, 40, 200, 1000))
    if rng.random() < 0.5:
        return rng.randbytes(count)
    return b"schedule 1\n" + bytes(
        rng.choice(b"abh*.()[]{},:=+-\n \"'#_0129\\`?") for _ in range(count)
    )


def _on_tokens(change: Callable[[random.Random, list[str], Sequence[str]], None]) -> Any:
    def changed(rng: random.Random, text: str, vocabulary: Sequence[str]) -> str:
        tokens = TOKEN.findall(text)
        if tokens:
            change(rng, tokens, vocabulary)
        return "".join(tokens)

    return changed


def _on_lines(change: Callable[[random.Random, list[str], Sequence[str]], None]) -> Any:
    def changed(rng: random.Random, text: str, vocabulary: Sequence[str]) -> str:
        lines = text.split("\n")
        change(rng, lines, vocabulary)
        return "\n".join(lines)

    return changed


def _delete(rng: random.Random, parts: list[str], vocabulary: Sequence[str]) -> None:
    del parts[rng.randrange(len(parts))]


def _double(rng: random.Random, parts: list[str], vocabulary: Sequence[str]) -> None:
    parts.insert(rng.randrange(len(parts)), rng.choice(parts))


def _swap(rng: random.Random, parts: list[str], vocabulary: Sequence[str]) -> None:
    i, j = rng.randrange(len(parts)), rng.randrange(len(parts))
    parts[i], parts[j] = parts[j], parts[i]


def _replace(rng: random.Random, parts: list[str], vocabulary: Sequence[str]) -> None:
    indices = [k for k, part in enumerate(parts) if part.strip()]
    if indices:
        parts[rng.choice(indices)] = rng.choice(ODD_TOKENS if rng.random() < 0.4 else vocabulary)


def _replace_same_kind(rng: random.Random, parts: list[str], vocabulary: Sequence[str]) -> None:
    """Replace a name by a name or a number by a number: most results can be parsed."""
    indices = [k for k, part in enumerate(parts) if part[0].isalnum()]
    if indices:
        k = rng.choice(indices)
        numbers = [*NUMBERS, *(word for word in vocabulary if word[0].isdigit())]
        name_words = [word for word in vocabulary if word[0].isalpha()]
        parts[k] = rng.choice(numbers if parts[k][0].isdigit() else name_words)


def _truncate(rng: random.Random, text: str, vocabulary: Sequence[str]) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _append(text: str, other: str) -> str:
    return text + "\n" + other.partition("\n")[2]


SAME_KIND_CHANGE = _on_tokens(_replace_same_kind)
CHANGES: list[Callable[[random.Random, str, Sequence[str]], str]] = [
    *map(_on_tokens, (_delete, _double, _swap, _replace, _replace, _replace)),
    SAME_KIND_CHANGE,
    *map(_on_lines, (_delete, _double, _swap)),
    _truncate,
]


# -- checking and planning -----------------------------------------------------------------------


@cache
def _small_models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Return small models and batches, by the class name in a schedule's header."""
    namespace: dict[str, Any] = {}
    exec(model(), namespace)
    tokens = models.tokens(4)
    return {
        "Net": (namespace["model"](), namespace["batch"](0)),
        "GPT2LMHeadModel": (models.gpt2(2), tokens),
        "LlamaForCausalLM": (models.llama(2), tokens),
    }


def check_and_plan(path: str, text: str, costs: bool) -> Outcome:
    """Check and plan a text; with `costs` also account the plan.  Returns an Outcome.

    Only refusals are caught.
    """
    start = time.thread_time()
    codes: tuple[str, ...] = ()
    try:
        tree = parse(Source(path, text))
        lint(tree)
        expand(tree, None, Settings())
        module, batch = _small_models().get(tree.header.model or "Net", _small_models()["Net"])
        plan = Schedule(module, tree, Settings()).plan()
        if costs:
            account(plan, batch)
    except Refusal as refusal:
        codes = tuple(d.code for d in refusal.diagnostics)
        assert refusal.render()
    return Outcome(codes, time.thread_time() - start)


def read_bytes(path: Path, raw: bytes) -> Outcome:
    """Write a file of these bytes, then read, check and plan it; returns an Outcome."""
    path.write_bytes(raw)
    try:
        source = read(path)
    except Refusal as refusal:
        return Outcome(tuple(d.code for d in refusal.diagnostics), 0.0)
    return check_and_plan(source.name, source.text, costs=False)
