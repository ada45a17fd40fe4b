"""The table of verdicts: `docs/models.md` for readers, and the same as JSON beside it."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping

from tests.zoo_models.meshes import MESHES
from tests.zoo_models.store import ROOT, Known, source
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
Cells = Mapping[tuple[str, str], Known]


def write(cells: Cells, families: Mapping[str, str]) -> None:
    """Both files, from what is known."""
    PAGE.write_text(page(cells, families))
    told = [{"source": known.source, **known.verdict.plain()} for _, known in sorted(cells.items())]
    lines = ",\n".join(json.dumps(one) for one in told)
    DATA.write_text(f"[\n{lines}\n]\n")


def page(cells: Cells, families: Mapping[str, str]) -> str:
    """The whole page."""
    parts = [HEAD, _versions(cells)]
    left = sorted({k for (k, _), c in cells.items() if c.verdict.status == NOT_TINY})
    for family in dict.fromkeys(families.values()):
        kinds = [k for k, f in families.items() if f == family and k not in left]
        parts += [f"## {family[0].upper()}{family[1:]} models\n", _counts(cells, kinds)]
        parts.append(_rows(cells, kinds))
    parts.append(_reasons(cells, left))
    return "\n".join(parts)


def _versions(cells: Cells) -> str:
    import torch
    import transformers

    older = sum(known.source != source() for known in cells.values())
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    said = f"{day}, torch {torch.__version__}, transformers {transformers.__version__}; timm is"
    said += f" {'not ' * (not _has('timm'))}installed and none of its models is in the table."
    if older:
        said += f" {older} of {len(cells)} cells were run with an earlier version of this code."
    return f"{said}\n"


def _has(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _counts(cells: Cells, kinds: list[str]) -> str:
    lines = ["| | verified | refused | failed | not run |", "|---|---|---|---|---|"]
    for mesh in MESHES:
        found = Counter(
            cells[kind, mesh].verdict.status if (kind, mesh) in cells else "not run"
            for kind in kinds
        )
        share = f"{found['verified']} of {len(kinds)}"
        lines.append(
            f"| {COLUMNS[mesh]} | {share} | {found['refused']} | {found['failed']} |"
            f" {found['not run']} |"
        )
    return "\n".join(lines) + "\n"


def _rows(cells: Cells, kinds: list[str]) -> str:
    lines = [f"| model | {' | '.join(MESHES)} |", f"|---|{'---|' * len(MESHES)}"]
    for kind in kinds:
        said = [_short(cells.get((kind, mesh))) for mesh in MESHES]
        lines.append(f"| {kind} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def _short(known: Known | None) -> str:
    if known is None:
        return "not run"
    verdict = known.verdict
    if verdict.status == "verified":
        return f"verified, {verdict.rows}{' `*`' * ('relax' in verdict.why)}"
    if verdict.status == "refused":
        return f"refused {verdict.why.split()[0]}"
    return f"**{verdict.status}**"


def _reasons(cells: Cells, left: list[str]) -> str:
    lines = ["## What is not verified, and why\n"]
    for (kind, mesh), known in sorted(cells.items()):
        if known.verdict.status in ("refused", "failed"):
            lines.append(f"* {kind}, {mesh}: {known.verdict.status}: {_plain(known.verdict.why)}")
    lines += ["", "## Left out\n", "They cannot be made tiny from their configuration, or do not"]
    lines += ["run alone:\n"]
    lines += [f"* {k}: {_plain(cells[k, _mesh(cells, k)].verdict.why[:120])}" for k in left]
    return "\n".join(lines) + "\n"


def _mesh(cells: Cells, kind: str) -> str:
    return next(mesh for mesh in MESHES if (kind, mesh) in cells)


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")
