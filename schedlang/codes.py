"""Every code of a message: what it is about, and what usually helps."""

from __future__ import annotations

from collections.abc import Mapping

from schedlang.code_example import example
from schedlang.code_texts import models, proofs, reading, rows, running, warnings

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
