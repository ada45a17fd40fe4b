"""Proposal of a schedule for any model and mesh: what can be split is found by trying rows.

`schedlang init` writes these schedules, and the planner uses their rows.  The file has rows for
experts, sequences, vocabularies and bags, the rows of pipeline and data parallelism, and notes on
what stays replicated and where transformers' own plan differs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import NOWHERE
from schedlang.diagnostics.tables import format_count
from schedlang.ir.model import ModelFacts
from schedlang.ir.placement import R
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.language import lift
from schedlang.language import nodes as n
from schedlang.passes.analyze.input_checks import add_forward_line, check_batch_keys
from schedlang.passes.autoshard.adapter_rows import Adapters
from schedlang.passes.complete.proposed_rows import (
    ProposedRow,
    RowTrial,
    fold_statements,
    make_call,
    make_schedule_file,
    make_step,
    names_text,
    wrap_comment,
)
from schedlang.passes.complete.tensor_rows import RowFinder, add_tensor_rows, find_flows, outputs_of
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.partition.stage_assignment import ChainUnit, balanced_stages
from schedlang.passes.propagate.propagate import propagate
from schedlang.passes.reduce_model.blocks import (
    PROJECTIONS,
    TABLES,
    Blocks,
    blocks_of,
    can_split_module,
    leaf_kind,
)
from schedlang.passes.simulate.account import account
from schedlang.passes.verify.probe import find_batch_norm

if TYPE_CHECKING:
    from torch import nn


RELAXED_WORD = "batch_stats"
BATCH_ROLES = ("data", "sliced", "stages", "experts")  # roles of axes that split the batch
CONTEXT_METHODS = ("ring", "gather")  # the first legal one is used


def expert_rows(finder: RowFinder, *beside: ProposedRow) -> None:
    """Add a row for each kind of module with experts; note the modules that stay replicated.

    `beside` are rows that must accompany it, such as the row that splits the batch.
    """
    spread = make_call("expert_parallel", over=finder.axis)
    for name in experts_of(finder.trial.blocks):
        row = ProposedRow((name,), spread, "each rank has some experts")
        made = finder.repair_rows([row, *beside])
        if isinstance(made, str):
            finder.note_replicated((name,), made)
        else:
            finder.rows.append(row)


def experts_of(blocks: Blocks) -> dict[str, int]:
    """Map common names of modules with several weights per expert to their numbers of experts."""
    found = {}
    for name, group in blocks.modules_by_name.items():
        shapes = [fact.shape for fact in blocks.facts.sites[group[0]].parameters.values()]
        deep = [shape for shape in shapes if len(shape) == 3]
        counts = {shape[:1] for shape in shapes}  # () for a scalar, such as a temperature
        if "*" in name and len(deep) > 1 and len(counts) == 1 and not counts & {(1,), ()}:
            found[name] = deep[0][0]
    return found


def context_rows(finder: RowFinder) -> None:
    """Add a row for each kind of attention, with the first legal method of exchanging keys."""
    fed, blocks = finder.trial.feeds, finder.trial.blocks
    names = [
        parent
        for flow in find_flows(fed.uses, blocks)
        if flow.mixed
        for parent in [_parent((*flow.sources, *flow.sinks))]
        if parent in blocks.modules_by_name
    ]
    for method in CONTEXT_METHODS:
        exchange = make_call("context_parallel", method, over=finder.axis)
        rows = [ProposedRow((name,), exchange, "each rank has some tokens") for name in names]
        made = finder.repair_rows(rows)
        if names and isinstance(made, list):
            refused = finder.trial.token_split_refusal(made, finder.axis, finder.ranks)
            if refused is None:
                finder.rows += made
            else:  # another method would not help: the model computes positions by itself
                told = refused.diagnostic
                finder.notes += [f"not sharded along the sequence: {told.title}", *told.notes]
            return
        if names and method == CONTEXT_METHODS[-1]:
            finder.notes.append(f"not sharded along the sequence: {made}")


def _parent(names: Sequence[str]) -> str:
    """Return the module that contains all of these."""
    return ".".join(os.path.commonprefix([name.split(".")[:-1] for name in names]))


PADDED, LARGE = 128, 4096  # pad to a multiple of 128, which kernels prefer, above 4096 rows


def vocabulary_rows(finder: RowFinder) -> None:
    """Add rows for embedding tables and output layers; note those that stay replicated."""
    tables, heads = _tables_and_heads(finder)
    if not tables:
        return
    facts = finder.trial.blocks.facts
    tied = {name for names in facts.ties for name in names}
    rows = make_call("shard", "vocab", over=finder.axis)
    columns = make_call("shard", "col", output=R, over=finder.axis)
    table = [ProposedRow((n,), rows, "split by rows") for n in tables]
    split = [ProposedRow((n,), rows, _head_remark(f"{n}.weight" in tied)) for n in heads]
    gathered = [ProposedRow((n,), columns, "logits are gathered") for n in heads]
    pads, why = padding_rows(finder, (*tables, *heads)), ""
    for tried, left in (
        ([*table, *split], ()),
        ([*table, *gathered], ()),
        (table, heads),
        (gathered, tables),
    ):
        made = finder.repair_rows([*_needed(pads, tried, finder), *tried])
        if isinstance(made, list):
            finder.rows += made
            if left:
                finder.note_replicated(left, why)
            elif tried[-1:] == gathered[-1:] and why:
                finder.notes.append(f"gathered: {', '.join(heads)}: {why}")
            return
        why = why or made
    finder.note_replicated((*tables, *heads), why)


def bag_rows(finder: RowFinder) -> None:
    """Add rows for bags of embeddings, each split by rows, else by columns; note the others."""
    sites = finder.trial.blocks.facts.sites
    bags = [fqn for fqn in finder.trial.feeds.uses if leaf_kind(sites[fqn]) == "EmbeddingBag"]
    order, known = list(sites), len(finder.rows)
    for name in sorted(bags, key=order.index):
        why = ""
        rows = make_call("shard", "vocab", over=finder.axis)
        columns = make_call("shard", "col", output=R, over=finder.axis)
        for how, said in ((rows, "split by rows"), (columns, "split by columns")):
            row = ProposedRow((name,), how, said)
            pads = padding_rows(finder, [name]) if how is rows else []
            made = finder.repair_rows([*pads, row])
            if isinstance(made, list):
                finder.rows += made
                break
            why = why or made
        else:
            finder.note_replicated([name], why)
    added = finder.rows[known:]
    finder.rows[known:] = sorted(added, key=lambda row: not row.changes_facet(Facet.SHAPE))


def _head_remark(tied: bool) -> str:
    return "the same weight; logits stay split" if tied else "logits stay split"


def _tables_and_heads(finder: RowFinder) -> tuple[list[str], list[str]]:
    """Return embeddings with the most rows outside of blocks, and layers with as many outputs."""
    blocks = finder.trial.blocks
    sites = blocks.facts.sites
    outside = [fqn for fqn in finder.trial.feeds.uses if not blocks.is_inside(fqn)]
    rows = {
        fqn: sites[fqn].parameters["weight"].shape[0]
        for fqn in outside
        if leaf_kind(sites[fqn]) == "Embedding"
    }
    most = max(rows.values(), default=0)
    heads = [
        fqn
        for fqn in outside
        if leaf_kind(sites[fqn]) in PROJECTIONS and outputs_of(sites[fqn]) == most
    ]
    return [fqn for fqn, count in rows.items() if count == most], heads


def padding_rows(finder: RowFinder, names: Sequence[str]) -> list[ProposedRow]:
    """Return a padding row for each weight whose rows do not divide; tied weights once."""
    facts, ranks = finder.trial.blocks.facts, finder.ranks
    out: list[ProposedRow] = []
    seen: set[str] = set()
    for name in names:
        site = facts.sites[name]
        weight = site.parameters["weight"]
        dim = "vocab" if "vocab" in site.dims["weight"] else "out"
        size = weight.shape[site.dims["weight"].index(dim)]
        if size % ranks and weight.name not in seen:
            seen.add(weight.name)
            multiple = PADDED if PADDED % ranks == 0 and size > LARGE else ranks
            said = f"{size} rows do not divide by {ranks}"
            out.append(ProposedRow((name,), make_call("pad", dim, multiple=multiple), said))
    return out


def _needed(
    pads: Sequence[ProposedRow], rows: Sequence[ProposedRow], finder: RowFinder
) -> list[ProposedRow]:
    """Return the padding rows of weights that some of these rows split."""
    facts = finder.trial.blocks.facts

    def weights(of: Sequence[ProposedRow]) -> set[str]:
        return {facts.sites[row.names[0]].parameters["weight"].name for row in of}

    return [pad for pad in pads if weights([pad]) <= weights(rows)]


STYLES = {"colwise": "out", "rowwise": "in", "embedding_rowwise": "vocab"}
SMALL_SHARE = 500  # a weight with less than 1/500 of all parameters gets no note


def headline(blocks: Blocks) -> str:
    """Describe the model in one line."""
    facts = blocks.facts
    outer = [name for name in facts.sites if name in blocks.lists and "*" not in name]
    counts = ((len(facts.children(name)), name) for name in outer)
    said = " and ".join(f"{count} block{'s' * (count > 1)} of {name}" for count, name in counts)
    total = f"{format_count(facts.numel(''))} parameters"
    return f"{total}, {said}." if said else f"{total}, no repeated blocks."


def notes_on_replicated(plan: Plan, finder: RowFinder) -> Iterator[str]:
    """Yield notes on large weights that no row splits or names, and that have no note yet."""
    blocks, axis = finder.trial.blocks, finder.axis
    total, known = blocks.facts.numel(""), {name for row in finder.rows for name in row.names}
    known |= finder.replicated_names
    groups: dict[str, dict[str, None]] = {}
    for name, fact in blocks.facts.unique_parameters.items():
        owner = name.rpartition(".")[0]
        split = any(s.axis == axis for s in plan.effective_layout(name).splits)
        common = blocks.common_name(owner)
        if split or common in known or len(fact.shape) < 2 or fact.numel * SMALL_SHARE < total:
            continue
        why = _why(blocks, owner, fact.shape, finder.trial.feeds.reading_lines)
        groups.setdefault(why, {})[common or name] = None
    for why, names in groups.items():
        yield f"replicated: {names_text(list(names))}: {why}"


def _why(blocks: Blocks, owner: str, shape: tuple[int, ...], read: Mapping[str, str]) -> str:
    site = blocks.facts.sites[owner]
    if leaf_kind(site) in TABLES:
        return "a small table"
    if len(shape) == 3 and shape[0] == 1 and not site.dims:
        return "one for all rows, as tables of positions are"
    if len(shape) == 3 and not site.dims:
        return "weights of several experts or heads in one"
    if "Conv" in site.class_name and not can_split_module(blocks.facts, owner):
        return "a convolution of several groups"
    if not can_split_module(blocks.facts, owner):
        return f"no style fits a `{site.class_name}`"
    elsewhere = f"is used elsewhere, at {read[owner]}" if read.get(owner) else "leaves the model"
    return f"no column/row pair found: its output {elsewhere}"


def notes_on_differences(plan: Plan, blocks: Blocks, axis: str) -> Iterator[str]:
    """Yield notes where transformers' own plan for the model splits otherwise."""
    theirs = getattr(blocks.facts.model, "tp_plan", None)
    found: dict[str, dict[str, None]] = {}
    for pattern, style in (theirs or {}).items() if isinstance(theirs, Mapping) else ():
        wanted = STYLES.get(next((s for s in STYLES if str(style).startswith(s)), ""))
        if wanted is None:
            continue
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for fqn in filter(regex.fullmatch, blocks.facts.sites):
            ours = _ours(plan, blocks, fqn, axis)
            if ours not in (wanted, None):
                words = f"`{style}` there, {f'split along {ours}' if ours else 'replicated'} here"
                found.setdefault(words, {})[blocks.common_name(fqn)] = None
    for words, names in found.items():
        yield f"transformers' own plan differs: {names_text(list(names))}: {words}"


def _ours(plan: Plan, blocks: Blocks, fqn: str, axis: str) -> str | None:
    """Return the dim of the weight that is split, "" for none; None where it has no named dims."""
    site = blocks.facts.sites[fqn]
    dims = site.dims.get("weight", ())
    if not dims or "weight" not in site.parameters:
        return None
    held = plan.effective_layout(site.parameters["weight"].name)
    return next((dims[s.dim] for s in held.splits if s.axis == axis), "")


Loss = Callable[..., Any]
ROLES = {
    "dp": "data",
    "data": "data",
    "fsdp": "sliced",
    "pp": "stages",
    "pipe": "stages",
    "tp": "parts",
    "model": "parts",
    "ep": "experts",
    "cp": "tokens",
}
NONE_FOUND = {
    "experts": "no experts were found",
    "tokens": "no attention over a sequence was found",
}
MICRO_PER_STAGE = 2  # microbatches for each stage, where the batch has enough rows


@dataclass(frozen=True)
class ProposedSchedule:
    """A schedule; `notes` say what was not split, and why."""

    file: n.File
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The schedule in canonical form."""
        return self.file.text


@dataclass(frozen=True)
class ProposalRequest:
    """A model, mesh and batch; `trial` has the model with as few blocks as show all kinds."""

    trial: RowTrial
    blocks: Blocks
    mesh: Mapping[str, int]
    batch: Mapping[str, Any]
    relax: str = ""  # word of `relax` for the last step
    adapters: Sequence[ProposedRow] = ()

    def axis(self, role: str) -> str | None:
        """Return the axis of a role, if the mesh has one."""
        return next((name for name in self.mesh if ROLES[name] == role), None)


def propose(
    model: nn.Module | ModelFacts,
    batch: Mapping[str, Any],
    mesh: Mapping[str, int],
    loss: Loss | None = None,
    weight: Loss | None = None,
    adapters: Adapters | None = None,
) -> ProposedSchedule:
    """Propose a schedule for a model (on any device), a full step's batch, and axes with sizes.

    For several meshes pass the model's facts: these cache what was found before.
    Raises Refusal S211 for an axis of an unknown name, S212 where nothing can be split over an
    axis, and whatever refuses the model or the batch.
    """
    from schedlang.runtime.batch import row_count

    check_mesh(mesh)
    facts = model if isinstance(model, ModelFacts) else ModelFacts(model)
    with add_forward_line(facts.model):
        row_count(batch)
    traced = propagate(Plan(facts), batch, loss)
    if traced.missing_loss is not None:
        raise Refusal(traced.missing_loss)
    check_batch_keys(Plan(facts), batch, traced, loss, weight)
    blocks = blocks_of(facts)
    asked = ProposalRequest(RowTrial(facts, blocks, batch, loss, weight), blocks, mesh, batch)
    notes: list[str] = []
    splits_batch = any(mesh.get(asked.axis(role) or "", 1) > 1 for role in BATCH_ROLES)
    if splits_batch and (norm := find_batch_norm(facts.model, traced)) is not None:
        notes.append(
            "relaxed: `{}`, a `{}`, takes separate statistics for each part of the batch".format(
                *norm
            )
        )
        asked = replace(asked, relax=RELAXED_WORD)
    if adapters is not None:
        asked = replace(asked, adapters=adapters.rows(blocks, notes))
    rows = rows_by_role(asked, notes)
    rest = _rest(asked)
    stages = max(1, mesh.get(asked.axis("stages") or "", 1))
    try:
        file = _tried(asked.trial, lambda blocks: _file(asked, blocks, rows, rest, notes), stages)
    except Refusal as refusal:
        if refusal.diagnostic.code != "S668":
            raise
        # trainers of such models do the same: each microbatch has its own statistics
        notes.append("relaxed: the loss takes separate statistics for each microbatch")
        relaxed = replace(asked, relax=RELAXED_WORD)
        file = _tried(asked.trial, lambda blocks: _file(relaxed, blocks, rows, rest, notes), stages)
    return ProposedSchedule(file, tuple(notes))


def _tried(trial: RowTrial, file: Callable[[Blocks], n.File], stages: int) -> n.File:
    """Return the file for the full model, planned in full; blocks that show all are accounted.

    Raises Refusal for what is refused.
    """
    made = file(trial.full_blocks)
    expand(made, trial.facts)
    short = trial.with_fewer_blocks(stages) if trial.is_shortened else trial.full_blocks
    plan = expand(file(short), short.facts).plan
    assert plan is not None
    account(plan, trial.batch, trial.loss)
    return made


def check_mesh(mesh: Mapping[str, int]) -> None:
    """Refuse (S211) axes of unknown names, and two axes of one role."""
    legal = (
        "it knows `dp`, `data` and `fsdp`, which split the batch, `ep` (experts), `cp`"
        " (sequences), `pp` and `pipe` (stages), `tp` and `model` (tensors)"
    )
    for name in mesh:
        if name not in ROLES:
            raise Refusal.of("S211", f"`init` does not know the axis `{name}`", helps=(legal,))
    for role in set(ROLES.values()):
        same = [name for name in mesh if ROLES[name] == role]
        if len(same) > 1:
            title = f"`{same[0]}` and `{same[1]}` would split the same"
            raise Refusal.of("S211", title, helps=("keep one of them", legal))
    if not mesh:
        raise Refusal.of("S211", "`init` needs a mesh", helps=("`--mesh dp=2,tp=2`", legal))


def rows_by_role(asked: ProposalRequest, notes: list[str]) -> dict[str, list[ProposedRow]]:
    """Return the rows of each role that splits tensors; refuses an axis without any."""
    found: dict[str, list[ProposedRow]] = {}
    for role in ("parts", "experts", "tokens"):
        axis = asked.axis(role)
        if axis is None:
            continue
        said: list[str] = []
        finder = RowFinder(asked.trial, axis, max(2, asked.mesh[axis]), [], said)
        if role == "parts":
            add_tensor_rows(finder)
            if asked.axis("experts") is None:
                expert_rows(finder)
            vocabulary_rows(finder)
            bag_rows(finder)
        elif role == "experts":
            expert_rows(finder, ProposedRow((), make_call("zero", stage=1, over=axis)))
        else:
            context_rows(finder)
        if not finder.rows and asked.mesh[axis] > 1:
            more = _remarks(finder) if role == "parts" else [NONE_FOUND[role]] * (not said)
            raise _unused_axis(axis, [*said, *more])
        found[role] = sorted(finder.rows, key=lambda row: not _first(asked.blocks, row))
        notes += said
        if role == "parts":
            notes += _remarks(finder)
    return found


def _first(blocks: Blocks, row: ProposedRow) -> bool:
    """Return whether a row stands before all others: it is about a table, or its padding."""
    name = row.names[0]
    table = leaf_kind(blocks.facts.sites[blocks.modules_by_name[name][0]]) in TABLES
    return row.changes_facet(Facet.SHAPE) or (table and not blocks.is_inside(name))


def _unused_axis(axis: str, said: list[str]) -> Refusal:
    title = f"nothing of this model can be split over `{axis}`"
    helps = (f"leave `{axis}` out of the mesh, or give its ranks to another axis: `{axis}=1`",)
    return Refusal.of("S212", title, notes=tuple(said[:8]), helps=helps)


def _remarks(finder: RowFinder) -> list[str]:
    """List what else stays replicated, and where transformers' own plan differs."""
    plan = finder.trial.plan_rows(finder.rows, finder.axis, finder.ranks)
    differences = notes_on_differences(plan, finder.trial.blocks, finder.axis)
    return [*notes_on_replicated(plan, finder), *differences]


# -- stages and the batch -------------------------------------------------------------------------


def _rest(asked: ProposalRequest) -> list[ProposedRow]:
    """Return the rows of the pipeline and of data parallelism."""
    rows: list[ProposedRow] = []
    stages, sliced = asked.axis("stages"), asked.axis("sliced")
    data = [axis for axis in (asked.axis("data"), asked.axis("experts")) if axis is not None]
    count = asked.mesh.get(stages or "", 1)
    if stages is not None:
        rows.append(_cut(asked, stages, count))
    if sliced is not None:
        rows.append(ProposedRow((), make_call("zero", stage=3, over=sliced)))
    if data:
        over = data[0] if len(data) == 1 else tuple(data)
        rows.append(ProposedRow((), make_call("zero", stage=0 if sliced else 1, over=over)))
    if stages is not None:
        order = make_call("pipeline", order="1F1B", micro=_micro(asked, count))
        rows.append(ProposedRow((), order))
    return rows


def _micro(asked: ProposalRequest, stages: int) -> int:
    """Return the number of microbatches for the rows that a rank has."""
    from schedlang.runtime.batch import row_count

    parts = 1
    for name, size in asked.mesh.items():
        parts *= size if ROLES[name] in ("data", "sliced", "experts") else 1
    return max(1, min(MICRO_PER_STAGE * stages, row_count(asked.batch) // parts))


def _cut(asked: ProposalRequest, axis: str, stages: int) -> ProposedRow:
    """Return the row that splits lists of blocks: all outermost ones, else the largest alone."""
    facts, lists = asked.blocks.facts, asked.blocks.lists
    outer = [name for name in lists if "*" not in name.split(".")]
    outer.sort(key=lambda name: list(facts.sites).index(name))
    largest = sorted(outer, key=lambda name: -facts.numel(name))
    tried = [tuple(outer), *((name,) for name in largest)]
    first: Refusal | None = None
    for names in dict.fromkeys(names for names in tried if names):
        row = ProposedRow(names, make_call("pipeline_split", over=axis))
        refusal = asked.trial.cut_refusal(row, axis, stages)
        if refusal is None:
            return row
        first = first or refusal
    if first is not None:
        raise first
    return _cut_between(asked, axis, stages)


def _cut_between(asked: ProposalRequest, axis: str, stages: int) -> ProposedRow:
    """Return the row that splits a model without lists of blocks between the modules that it calls.

    Raises Refusal S212 where there are fewer modules than stages, or the split itself is refused.
    """
    from schedlang.runtime.tracing.units import default_units

    facts = asked.blocks.facts
    title = "this model has no list of blocks, and cannot be cut into stages between its modules"
    try:
        names = list(dict.fromkeys(default_units(facts.model, asked.trial.sample)))
        stage_of = balanced_stages([ChainUnit(name, facts.numel(name)) for name in names], stages)
        starts = {stage: name for name, stage in zip(reversed(names), reversed(stage_of)) if stage}
        first = tuple(starts[stage] for stage in sorted(starts))
        row = ProposedRow(first, make_call("pipeline_split", over=axis))
        refusal = asked.trial.cut_refusal(row, axis, stages)
        if refusal is None:
            return row
    except Refusal as refused:
        refusal = refused
    notes = [refusal.diagnostic.title, *refusal.diagnostic.notes]
    helps = (f"leave the axis out: `{axis}=1`",)
    raise Refusal.of("S212", title, notes=tuple(notes), helps=helps) from refusal


# -- the schedule -------------------------------------------------------------------------------


FORWARD, TRAIN = make_call("verify", "forward", "backward"), make_call("verify", "train", steps=3)
STEP_NAMES = {
    "parts": "tensor parallel",
    "experts": "expert parallel",
    "tokens": "context parallel",
}


def proof_steps(rows: Mapping[str, Sequence[ProposedRow]], blocks: Blocks) -> Iterator[n.Step]:
    """Yield a step for the rows of each role that has some, with its proof."""
    for role, name in STEP_NAMES.items():
        if rows.get(role):
            # rows of experts are legal only with the row that splits the batch, which comes later
            proof = None if role == "experts" else FORWARD
            yield make_step(name, fold_statements(rows[role], blocks), proof)


def _file(
    asked: ProposalRequest,
    blocks: Blocks,
    rows: Mapping[str, list[ProposedRow]],
    rest: list[ProposedRow],
    notes: list[str],
) -> n.File:
    """Build the schedule with its comments."""
    steps: list[n.Step] = []
    if asked.adapters:
        steps.append(make_step("adapters", fold_statements(asked.adapters, blocks), relax="model"))
    steps += proof_steps(rows, blocks)
    if rest:
        last = [row.statement for row in sorted(rest, key=lambda row: not row.names)]
        name = "pipeline" if rest[0].names else "data"
        steps.append(make_step(name, last, TRAIN, asked.relax))
    mesh = lift.mesh(asked.mesh, None, NOWHERE, f"# {headline(blocks)}")
    below = (line for note in notes for line in wrap_comment(note))
    return make_schedule_file("proposed", blocks.facts.class_name, mesh, steps, *below)
