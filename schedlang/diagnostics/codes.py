"""The codes of messages: title, explanation and example of each.

An example is a file with schedule files, a command, and the message that the command prints;
`explain`, the pages and the tests share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from schedlang.diagnostics.code_texts import models, proofs, reading, rows, running, warnings

SECTION = re.compile(r"^-- (\S+) --\n", re.MULTILINE)
MODEL = "model.py"  # the file that most examples share and do not show
MESSAGE_SECTION = "says"


@dataclass(frozen=True)
class Example:
    """Files by name, the command that is run beside them, and the message that the command
    prints."""

    command: str
    files: Mapping[str, str]
    message: str

    @property
    def words(self) -> list[str]:
        """The words of the command, without the program."""
        return self.command.split()[1:]

    @property
    def ranks(self) -> int:
        """The number of ranks that `torchrun` starts; 0 for other commands."""
        return int(self.words[1]) if self.command.startswith("torchrun ") else 0

    def text(self) -> str:
        """Format the example as its file has it."""
        parts = [f"$ {self.command}\n"]
        parts += [f"-- {name} --\n{text}" for name, text in self.files.items()]
        return "".join([*parts, f"-- {MESSAGE_SECTION} --\n{self.message}"])

    def page(self) -> str:
        """Format the example for a reader: the files, then the command and its output."""
        sections = [f"{name}\n\n{_indent(text)}" for name, text in self.files.items()]
        return "\n".join([*sections, _indent(f"$ {self.command}\n{self.message}")])


def parse_example(text: str) -> Example:
    """Parse an example from the text of its file: `$ command`, then `-- name --` before each
    part."""
    head, *rest = SECTION.split(text)
    files = dict(zip(rest[::2], rest[1::2], strict=True))
    return Example(head.strip().removeprefix("$ "), files, files.pop(MESSAGE_SECTION, ""))


@cache
def example(code: str) -> Example | None:
    """Return the example of a code; None if the code has none."""
    path = _example_folder() / f"{code}.txt"
    return parse_example(path.read_text(encoding="utf-8")) if path.is_file() else None


def codes_with_examples() -> Iterator[str]:
    """Yield the codes that have an example, in order."""
    names = (entry.name.partition(".")[0] for entry in _example_folder().iterdir())
    yield from sorted(name for name in names if re.fullmatch(r"[SW]\d{3}", name))


@cache
def model() -> str:
    """Return the model file of the examples that show none."""
    return (_example_folder() / "model.txt").read_text(encoding="utf-8")


def _example_folder() -> Traversable:
    return resources.files("schedlang.diagnostics.code_texts") / "examples"


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.split("\n")[:-1])


FAMILIES: Mapping[str, str] = {
    "0": "reading the text",
    "1": "declarations",
    "2": "names and selectors",
    "3": "arguments",
    "4": "one row",
    "5": "two rows",
    "6": "the pipeline, the batch and the structure of the model",
    "7": "verification and expectations",
    "8": "running: precision, randomness, kernels",
    "9": "the model file, and other files",
}

CODES: Mapping[str, tuple[str, str]] = {
    **reading.CODES,
    **rows.CODES,
    **models.CODES,
    **proofs.CODES,
    **running.CODES,
}


WARNINGS: Mapping[str, tuple[str, str]] = warnings.WARNINGS


def explain(code: str) -> str:
    """Return the page of a code, with its example; raises KeyError for an unknown code."""
    title, text = CODES[code] if code in CODES else WARNINGS[code]
    family = f"Codes {code[:2]}.. are about {FAMILIES[code[1]]}."
    note = family if code in CODES else "A warning does not stop the command."
    sample = example(code)
    parts = [f"{code}: {title}\n", f"{text}\n", f"{note}\n"]
    return "\n".join([*parts, sample.page()] if sample else parts)


def to_json(code: str) -> dict[str, object]:
    """Return the page of a code as plain values; raises KeyError for an unknown code."""
    title, text = CODES[code] if code in CODES else WARNINGS[code]
    sample = example(code)
    example_json = (
        {"command": sample.command, "files": dict(sample.files), "says": sample.message}
        if sample
        else None
    )
    return {"code": code, "title": title, "text": text, "example": example_json}
