"""A schedule for any model and a mesh: what can be split is found by asking what is legal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.blocks import Blocks, blocks_of
from schedlang.passes.proposal_notes import differences, headline, left_whole
from schedlang.passes.proposal_text import Row, canonical, mesh_text, rows_text, wrapped
from schedlang.passes.proposal_trial import Trial
from schedlang.passes.tensor_rows import Finder, tensor_rows
from schedlang.passes.vocabulary_rows import vocabulary_rows

if TYPE_CHECKING:
    from torch import nn

Loss = Callable[..., Any]
ROLES = {
    "dp": "data", "data": "data", "fsdp": "sliced", "pp": "stages", "pipe": "stages",
    "tp": "parts", "model": "parts",
}  # fmt: skip
MORE = 2  # microbatches for each stage, where the batch has the rows


@dataclass(frozen=True)
class Proposed:
    """A schedule in canonical form; `notes` say what was not split, and why."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """What a schedule is proposed for, and the same with as few blocks as show all."""

    trial: Trial
    blocks: Blocks
    mesh: Mapping[str, int]
    batch: Mapping[str, Any]

    def axis(self, role: str) -> str | None:
        """The axis of a role, if the mesh has one."""
        return next((name for name in self.mesh if ROLES[name] == role), None)


def propose(
    model: nn.Module, batch: Mapping[str, Any], mesh: Mapping[str, int], loss: Loss | None = None
) -> Proposed:
    """A schedule for a model (on any device), a batch of a whole step and axes with their sizes.

    Raises Refusal S211 for an axis of an unknown name, S212 where nothing can be split over one,
    and whatever refuses the model or the batch itself.
    """
    from schedlang.model import ModelFacts

    check_mesh(mesh)
    facts = ModelFacts(model)
    blocks = blocks_of(facts)
    asked = Asked(Trial(facts, blocks, batch, loss), blocks, mesh, batch)
    notes: list[str] = []
    tensor = _tensor(asked, notes)
    rest = _rest(asked, tensor, notes)
    text = asked.trial.whole(
        lambda blocks: _text(asked, blocks, tensor, rest, notes),
        max(1, mesh.get(asked.axis("stages") or "", 1)),
    )
    return Proposed(text, tuple(notes))


def check_mesh(mesh: Mapping[str, int]) -> None:
    """Refuse axes whose names say nothing, and two of one role (S211)."""
    legal = "`dp`, `data`, `fsdp` split the batch, `pp`, `pipe` the blocks, `tp`, `model` tensors"
    for name in mesh:
        if name not in ROLES:
            title = f"`init` does not know what to do over an axis `{name}`"
            raise Refusal(Diagnostic("S211", title, helps=(legal,)))
    for role in set(ROLES.values()):
        same = [name for name in mesh if ROLES[name] == role]
        if len(same) > 1:
            title = f"`{same[0]}` and `{same[1]}` would do the same"
            raise Refusal(Diagnostic("S211", title, helps=("name one of them", legal)))
    if not mesh:
        title = "`init` writes a schedule for a mesh, and there is none"
        raise Refusal(Diagnostic("S211", title, helps=("`--mesh dp=2,tp=2`", legal)))


def _tensor(asked: Asked, notes: list[str]) -> list[Row]:
    axis = asked.axis("parts")
    if axis is None:
        return []
    finder = Finder(asked.trial, axis, max(2, asked.mesh[axis]), [], notes)
    tensor_rows(finder)
    vocabulary_rows(finder)
    rows = finder.rows
    if not rows and asked.mesh[axis] > 1:
        title = f"nothing of this model could be split over `{axis}`"
        helps = (f"leave it out of the mesh, or give its ranks to another axis: `{axis}=1`",)
        raise Refusal(Diagnostic("S212", title, notes=tuple(notes[:8]), helps=helps))
    plan = asked.trial.plan(rows, axis, finder.ranks)
    notes += [*left_whole(plan, asked.trial.blocks, axis, notes)]
    notes += differences(plan, asked.trial.blocks, axis)
    return rows


# -- stages and the batch -------------------------------------------------------------------------


def _rest(asked: Asked, tensor: list[Row], notes: list[str]) -> list[Row]:
    """The rows of the pipeline and of data parallelism."""
    rows: list[Row] = []
    stages, data = asked.axis("stages"), asked.axis("data")
    sliced = asked.axis("sliced")
    count = asked.mesh.get(stages or "", 1)
    if stages is not None:
        rows.append(_cut(asked, stages, count))
    if sliced is not None:
        rows.append(Row((), f"zero(stage=3, over={sliced})"))
    if data is not None:
        rows.append(Row((), f"zero(stage={0 if sliced else 1}, over={data})"))
    if stages is not None:
        rows.append(Row((), f'pipeline(order="1F1B", micro={_micro(asked, count)})'))
    return rows


def _micro(asked: Asked, stages: int) -> int:
    """Microbatches for the rows that a rank has."""
    from schedlang.runtime.parts import rows_of

    parts = 1
    for name, size in asked.mesh.items():
        parts *= size if ROLES[name] in ("data", "sliced") else 1
    return max(1, min(MORE * stages, rows_of(asked.batch) // parts))


def _cut(asked: Asked, axis: str, stages: int) -> Row:
    """The row that cuts the lists of blocks: all outermost ones, else the largest alone."""
    facts, lists = asked.blocks.facts, asked.blocks.lists
    outer = [name for name in lists if "*" not in name.split(".")]
    outer.sort(key=lambda name: list(facts.sites).index(name))
    largest = sorted(outer, key=lambda name: -facts.numel(name))
    tried = [tuple(outer), *((name,) for name in largest)]
    first: Refusal | None = None
    for names in dict.fromkeys(names for names in tried if names):
        row = Row(names, f"pipeline_split(over={axis})")
        refusal = asked.trial.cut(row, axis, stages)
        if refusal is None:
            return row
        first = first or refusal
    if first is not None:
        raise first
    title = f"this model has no list of blocks to be cut over `{axis}`"
    helps = (f"leave the axis out: `{axis}=1`",)
    raise Refusal(Diagnostic("S212", title, helps=helps))


# -- the text -------------------------------------------------------------------------------------


def _text(
    asked: Asked, blocks: Blocks, tensor: list[Row], rest: list[Row], notes: list[str]
) -> str:
    head = f"schedule 1 for {blocks.facts.class_name}\n\n# {headline(blocks)}\n"
    head += f"{mesh_text(asked.mesh)}\n"
    steps = [head]
    if tensor:
        body = rows_text(tensor, blocks)
        steps.append(f'step "tensor parallel" {{\n{body}\nverify(forward, backward)\n}}\n')
    if rest:
        cut = [row for row in rest if row.names]
        lines = [f"{', '.join(row.names)}  {row.call}" for row in cut]
        lines += [row.call for row in rest if not row.names]
        name = "pipeline" if cut else "data"
        steps.append(f'step "{name}" {{\n' + "\n".join(lines) + "\nverify(train, steps=3)\n}\n")
    steps.append("".join(map(wrapped, notes)))
    return canonical("\n".join(steps))
