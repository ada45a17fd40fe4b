"""Every code of a message: what it is about, and what usually helps.

* The example of a code: files, a command, and what schedlang says; pages and tests share it.
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
MODEL = "model.py"  # the file that most examples have in common, and do not show
SAYS = "says"


@dataclass(frozen=True)
class Example:
    """Files by name, the command that is given beside them, and the message it ends in."""

    command: str
    files: Mapping[str, str]
    says: str

    @property
    def words(self) -> list[str]:
        """The command without its program."""
        return self.command.split()[1:]

    @property
    def ranks(self) -> int:
        """The number of ranks that `torchrun` starts; 0 where the command is no `torchrun`."""
        return int(self.words[1]) if self.command.startswith("torchrun ") else 0

    def text(self) -> str:
        """The example as it is kept in a file."""
        parts = [f"$ {self.command}\n"]
        parts += [f"-- {name} --\n{text}" for name, text in self.files.items()]
        return "".join([*parts, f"-- {SAYS} --\n{self.says}"])

    def page(self) -> str:
        """The example as a reader sees it: the files, then the command and its answer."""
        shown = [f"{name}\n\n{_indented(text)}" for name, text in self.files.items()]
        return "\n".join([*shown, _indented(f"$ {self.command}\n{self.says}")])


def read(text: str) -> Example:
    """An example from the text of its file: `$ command`, then `-- name --` before each part."""
    head, *rest = SECTION.split(text)
    files = dict(zip(rest[::2], rest[1::2], strict=True))
    return Example(head.strip().removeprefix("$ "), files, files.pop(SAYS, ""))


@cache
def example(code: str) -> Example | None:
    """The example of a code; None where a code has none."""
    place = _folder() / f"{code}.txt"
    return read(place.read_text(encoding="utf-8")) if place.is_file() else None


def exemplified() -> Iterator[str]:
    """The codes that have an example, in order."""
    names = (entry.name.partition(".")[0] for entry in _folder().iterdir())
    yield from sorted(name for name in names if re.fullmatch(r"[SW]\d{3}", name))


@cache
def model() -> str:
    """The model file of the examples that show none."""
    return (_folder() / "model.txt").read_text(encoding="utf-8")


def _folder() -> Traversable:
    return resources.files("schedlang.diagnostics.code_texts") / "examples"


def _indented(text: str) -> str:
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
    """The page of a code, with an example that produces it; KeyError if there is none."""
    title, text = CODES[code] if code in CODES else WARNINGS[code]
    family = f"Codes {code[:2]}.. are about {FAMILIES[code[1]]}."
    said = family if code in CODES else "A warning refuses nothing."
    shown = example(code)
    parts = [f"{code}: {title}\n", f"{text}\n", f"{said}\n"]
    return "\n".join([*parts, shown.page()] if shown else parts)


def to_json(code: str) -> dict[str, object]:
    """The same page for machines; KeyError if there is none."""
    title, text = CODES[code] if code in CODES else WARNINGS[code]
    shown = example(code)
    made = (
        {"command": shown.command, "files": dict(shown.files), "says": shown.says}
        if shown
        else None
    )
    return {"code": code, "title": title, "text": text, "example": made}
