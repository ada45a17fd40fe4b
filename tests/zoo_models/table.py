"""The table of verdicts: written as `docs/models.md` for readers, and as JSON."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping

from tests.zoo_models.meshes import MESHES
from tests.zoo_models.store import ROOT, StoredVerdict, source
from tests.zoo_models.worker import NOT_TINY

PAGE, DATA = ROOT / "docs" / "models.md", ROOT / "docs" / "models.json"
HEAD = """# Models

Look up whether schedules are verified for your model of transformers. Each row is a tiny model with
the architecture of its configuration. Each column is a schedule, compared with the unmodified model
in float64, on ranks that are threads of one process.

The comparison covers outputs, loss, every gradient and its norm, and the parameters after two steps
with SGD, momentum, weight decay and clipping. In one of two batches some rows end early.
`python -m tests.zoo_models` writes this page, and runs only cells without a known result.

* *verified*: all equal, to 1e-9; the number counts the rows of the schedule. `*`: with
  `relax(batch_stats)`, compared with the original trained on one shard of the batch at a time
* *refused*: the code of the message; the text is below
* *failed*: not equal
* *not run*: not yet, with this version
"""
COLUMNS = {
    "tp": "tensor parallel, 2 ranks",
    "zero": "ZeRO 3, 2 ranks",
    "pp": "pipeline, 2 ranks",
    "3d": "data x pipeline x tensor, 8 ranks",
}
Cells = Mapping[tuple[str, str], StoredVerdict]


def write_page(cells: Cells, families: Mapping[str, str]) -> None:
    """Write both files from the stored verdicts."""
    PAGE.write_text(page(cells, families))
    records = [
        {"source": entry.source, **entry.verdict.plain()} for _, entry in sorted(cells.items())
    ]
    lines = ",\n".join(json.dumps(record) for record in records)
    DATA.write_text(f"[\n{lines}\n]\n")


def page(cells: Cells, families: Mapping[str, str]) -> str:
    """Return the text of the page."""
    parts = [HEAD, _versions(cells)]
    left_out = sorted({k for (k, _), c in cells.items() if c.verdict.status == NOT_TINY})
    for family in dict.fromkeys(families.values()):
        kinds = [k for k, f in families.items() if f == family and k not in left_out]
        parts += [f"## {family[0].upper()}{family[1:]} models\n", _status_table(cells, kinds)]
        parts.append(_model_table(cells, kinds))
    parts.append(_reason_list(cells, left_out))
    return "\n".join(parts)


def _versions(cells: Cells) -> str:
    import torch
    import transformers

    older = sum(entry.source != source() for entry in cells.values())
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = f"{day}, torch {torch.__version__}, transformers {transformers.__version__}; timm is"
    text += (
        f" {'not ' * (not _is_installed('timm'))}installed and none of its models is in the table."
    )
    if older:
        text += f" {older} of {len(cells)} cells were run with earlier versions of this code and"
        text += " of transformers."
    return f"{text}\n"


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _status_table(cells: Cells, kinds: list[str]) -> str:
    lines = ["| | verified | refused | failed | not run |", "|---|---|---|---|---|"]
    for mesh in MESHES:
        counts = Counter(
            cells[kind, mesh].verdict.status if (kind, mesh) in cells else "not run"
            for kind in kinds
        )
        share = f"{counts['verified']} of {len(kinds)}"
        lines.append(
            f"| {COLUMNS[mesh]} | {share} | {counts['refused']} | {counts['failed']} |"
            f" {counts['not run']} |"
        )
    return "\n".join(lines) + "\n"


def _model_table(cells: Cells, kinds: list[str]) -> str:
    lines = [f"| model | {' | '.join(MESHES)} |", f"|---|{'---|' * len(MESHES)}"]
    for kind in kinds:
        texts = [_cell_text(cells.get((kind, mesh))) for mesh in MESHES]
        lines.append(f"| {kind} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _cell_text(entry: StoredVerdict | None) -> str:
    if entry is None:
        return "not run"
    verdict = entry.verdict
    if verdict.status == "verified":
        return f"verified, {verdict.rows}{' `*`' * ('relax' in verdict.why)}"
    if verdict.status == "refused":
        return f"refused {verdict.why.split()[0]}"
    return f"**{verdict.status}**"


def _reason_list(cells: Cells, left_out: list[str]) -> str:
    lines = ["## What is not verified, and why\n"]
    for (kind, mesh), entry in sorted(cells.items()):
        if entry.verdict.status in ("refused", "failed"):
            lines.append(f"* {kind}, {mesh}: {entry.verdict.status}: {_escape(entry.verdict.why)}")
    lines += ["", "## Left out\n", "They cannot be made tiny from their configuration, or do not"]
    lines += ["run alone:\n"]
    lines += [
        f"* {k}: {_escape(cells[k, _first_mesh(cells, k)].verdict.why[:120])}" for k in left_out
    ]
    return "\n".join(lines) + "\n"


def _first_mesh(cells: Cells, kind: str) -> str:
    return next(mesh for mesh in MESHES if (kind, mesh) in cells)


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")
