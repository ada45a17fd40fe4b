"""A saved plan (a file of `plan --out`) in place of a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlang.texts import regular

if TYPE_CHECKING:
    from schedlang.modelfile import ModelFile
    from schedlang.verbs.files import Planned


def is_saved(file: Path) -> bool:
    """Whether a file begins as JSON does, and no schedule."""
    try:
        with regular(file) as opened:
            return opened.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except OSError:  # whoever reads it as a schedule says why it cannot be read
        return False


def recorded(file: Path, model: str | None) -> tuple[dict[str, Any], ModelFile]:
    """What a saved plan says, and its model file or another one."""
    from schedlang.modelfile import load_model_file
    from schedlang.passes.reading.restore import read_record

    record = read_record(file)
    return record, load_model_file(model or record.get("model_file"), file)


def saved(file: Path, model: str | None) -> Planned:
    """The plan in a file on its model, on the meta device; refuses (S907) what holds none."""
    from schedlang.model import ModelFacts
    from schedlang.passes.reading.restore import restored
    from schedlang.source import Source
    from schedlang.syntax import parse
    from schedlang.verbs.files import Planned

    record, found = recorded(file, model)
    plan = restored(record, ModelFacts(found.model(meta=True)))
    text = Source(str(record.get("schedule_file", file)), str(record.get("schedule_text", "")))
    return Planned(file, parse(text), plan, found)
