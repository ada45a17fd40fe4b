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
    """What a saved plan says, and the model file: that of `--model`, or the one beside the plan.

    The file that the plan names is told, never run: whoever sends a plan would choose what runs.
    """
    import shlex

    from schedlang.diagnostic import Diagnostic, Refusal
    from schedlang.modelfile import load_model_file
    from schedlang.passes.reading.restore import read_record

    record = read_record(file)
    named = record.get("model_file")
    if model is None and named and not (file.parent / "model.py").is_file():
        title = f"`{file}` has the rows; `--model` gives the model"
        notes = (f"the plan was made for {ascii(named)}; there is no `model.py` next to it",)
        model = shlex.quote(named) if named.isprintable() else "FILE"
        helps = (f"if you trust that file: `--model {model}`",)
        raise Refusal(Diagnostic("S904", title, notes=notes, helps=helps))
    return record, load_model_file(model, file)


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
