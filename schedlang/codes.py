"""Every code of a message: what it is about, and what usually helps."""

from __future__ import annotations

from collections.abc import Mapping

from schedlang.code_texts import models, proofs, reading, rows, running

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
    "9": "the model file",
}

CODES: Mapping[str, tuple[str, str]] = {
    **reading.CODES,
    **rows.CODES,
    **models.CODES,
    **proofs.CODES,
    **running.CODES,
}


WARNINGS: Mapping[str, str] = {
    "W101": "a knob is never used",
    "W102": "a definition is never called",
    "W701": "a step is never verified",
}


def explain(code: str) -> str:
    """The page of a code; KeyError if there is none."""
    title, text = CODES[code]
    return f"{code}: {title}\n\n{text}\n\nCodes {code[:2]}.. are about {FAMILIES[code[1]]}.\n"
