"""Proposal of a schedule for any model and mesh: what can be split is found by trying rows.

`schedlang init` writes these schedules, and the planner uses their rows.  The file has rows for
experts, sequences, vocabularies and bags, the rows of pipeline and data parallelism, and notes on
what stays replicated and where transformers' own plan differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import NOWHERE
from schedlang.diagnostics.tables import format_count
from schedlang.ir.model import ModelFacts, common_parent
from schedlang.ir.placement import R
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.language import lift
from schedlang.language import nodes as n
from schedlang.passes.analyze.input_checks import add_forward_line, check_batch_keys
from schedlang.passes.autoshard.adapter_rows import Adapters
from schedlang.passes.autoshard.library_plan import notes_on_differences
from schedlang.passes.autoshard.paired_rows import find_paired_rows
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
from schedlang.passes.propagate.loss_sums import with_statistics
from schedlang.passes.propagate.original_forward import weight_of
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
from schedlang.runtime.batch import row_count
from schedlang.runtime.tracing.units import default_units

if TYPE_CHECKING:
    from torch import nn

RELAXED_WORD = "batch_stats"
BATCH_ROLES = ("data", "sliced", "stages", "experts")  # roles of axes that split the batch
CONTEXT_METHODS = ("ring", "gather")  # the first legal one is used


def expert_rows(finder: RowFinder, *other_rows: ProposedRow) -> None:
    """Add a row for each kind of module with experts; note the modules that stay replicated.

    `other_rows` are rows that must accompany it, such as the row that splits the batch.
    """
    call = make_call("expert_parallel", over=finder.axis)
    for name in experts_of(finder.trial.blocks):
        row = ProposedRow((name,), call, "each rank has some experts")
        repaired = finder.repair_rows([row, *other_rows])
        if isinstance(repaired, str):
            finder.note_replicated((name,), repaired)
        else:
            finder.rows.append(row)


def experts_of(blocks: Blocks) -> dict[str, int]:
    """Map common names of modules with several weights per expert to their numbers of experts."""
    counts_by_name = {}
    for name, group in blocks.modules_by_name.items():
        shapes = [param.shape for param in blocks.facts.sites[group[0]].parameters.values()]
        stacked_shapes = [shape for shape in shapes if len(shape) == 3]
        counts = {shape[:1] for shape in shapes}  # () for a scalar, such as a temperature
        if "*" in name and len(stacked_shapes) > 1 and len(counts) == 1 and not counts & {(1,), ()}:
            counts_by_name[name] = stacked_shapes[0][0]
    return counts_by_name


def context_rows(finder: RowFinder) -> None:
    """Add a row for each kind of attention, with the first legal method of exchanging keys."""
    feeds, blocks = finder.trial.feeds, finder.trial.blocks
    names = [
        parent
        for flow in find_flows(feeds.uses, blocks)
        if flow.mixed
        for parent in [common_parent((*flow.sources, *flow.sinks))]
        if parent in blocks.modules_by_name
    ]
    for method in CONTEXT_METHODS:
        exchange = make_call("context_parallel", method, over=finder.axis)
        rows = [ProposedRow((name,), exchange, "each rank has some tokens") for name in names]
        repaired = finder.repair_rows(rows)
        if names and isinstance(repaired, list):
            refused = finder.trial.token_split_refusal(repaired, finder.axis, finder.ranks)
            if refused is None:
                finder.rows += repaired
            else:  # another method would not help: the model computes positions by itself
                refusal = refused.diagnostic
                finder.notes += [f"not sharded along the sequence: {refusal.title}", *refusal.notes]
            return
        if names and method == CONTEXT_METHODS[-1]:
            finder.notes.append(f"not sharded along the sequence: {repaired}")


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
    table_rows = [ProposedRow((n,), rows, "split by rows") for n in tables]
    head_rows = [ProposedRow((n,), rows, _head_remark(f"{n}.weight" in tied)) for n in heads]
    gathered_rows = [ProposedRow((n,), columns, "logits are gathered") for n in heads]
    pad_rows, reason = padding_rows(finder, (*tables, *heads)), ""
    for tried, unsplit_names in (
        ([*table_rows, *head_rows], ()),
        ([*table_rows, *gathered_rows], ()),
        (table_rows, heads),
        (gathered_rows, tables),
    ):
        repaired = finder.repair_rows([*_needed(pad_rows, tried, finder), *tried])
        if isinstance(repaired, list):
            finder.rows += repaired
            if unsplit_names:
                finder.note_replicated(unsplit_names, reason)
            elif tried[-1:] == gathered_rows[-1:] and reason:
                finder.notes.append(f"gathered: {', '.join(heads)}: {reason}")
            return
        reason = reason or repaired
    finder.note_replicated((*tables, *heads), reason)


def bag_rows(finder: RowFinder) -> None:
    """Add rows for bags of embeddings, each split by rows, else by columns; note the others."""
    sites = finder.trial.blocks.facts.sites
    bags = [fqn for fqn in finder.trial.feeds.uses if leaf_kind(sites[fqn]) == "EmbeddingBag"]
    order, first_new = list(sites), len(finder.rows)
    for name in sorted(bags, key=order.index):
        reason = ""
        rows = make_call("shard", "vocab", over=finder.axis)
        columns = make_call("shard", "col", output=R, over=finder.axis)
        for call, comment in ((rows, "split by rows"), (columns, "split by columns")):
            row = ProposedRow((name,), call, comment)
            pad_rows = padding_rows(finder, [name]) if call is rows else []
            repaired = finder.repair_rows([*pad_rows, row])
            if isinstance(repaired, list):
                finder.rows += repaired
                break
            reason = reason or repaired
        else:
            finder.note_replicated([name], reason)
    added = finder.rows[first_new:]
    finder.rows[first_new:] = sorted(added, key=lambda row: not row.changes_facet(Facet.SHAPE))


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
    largest = max(rows.values(), default=0)
    heads = [
        fqn
        for fqn in outside
        if leaf_kind(sites[fqn]) in PROJECTIONS and outputs_of(sites[fqn]) == largest
    ]
    return [fqn for fqn, count in rows.items() if count == largest], heads


def padding_rows(finder: RowFinder, names: Sequence[str]) -> list[ProposedRow]:
    """Return a padding row for each weight whose rows do not divide; tied weights once."""
    facts, ranks = finder.trial.blocks.facts, finder.ranks
    pad_rows: list[ProposedRow] = []
    padded: set[str] = set()
    for name in names:
        site = facts.sites[name]
        weight = site.parameters["weight"]
        dim = "vocab" if "vocab" in site.dims["weight"] else "out"
        size = weight.shape[site.dims["weight"].index(dim)]
        if size % ranks and weight.name not in padded:
            padded.add(weight.name)
            multiple = PADDED if PADDED % ranks == 0 and size > LARGE else ranks
            comment = f"{size} rows do not divide by {ranks}"
            pad_rows.append(ProposedRow((name,), make_call("pad", dim, multiple=multiple), comment))
    return pad_rows


def _needed(
    pad_rows: Sequence[ProposedRow], rows: Sequence[ProposedRow], finder: RowFinder
) -> list[ProposedRow]:
    """Return the padding rows of weights that some of these rows split."""
    facts = finder.trial.blocks.facts

    def weights(padded_rows: Sequence[ProposedRow]) -> set[str]:
        return {facts.sites[row.names[0]].parameters["weight"].name for row in padded_rows}

    return [pad_row for pad_row in pad_rows if weights([pad_row]) <= weights(rows)]


SMALL_SHARE = 500  # a weight with less than 1/500 of all parameters gets no note


def headline(blocks: Blocks) -> str:
    """Describe the model in one line."""
    facts = blocks.facts
    outer = [name for name in facts.sites if name in blocks.lists and "*" not in name]
    counts = ((len(facts.children(name)), name) for name in outer)
    lists = " and ".join(f"{count} block{'s' * (count > 1)} of {name}" for count, name in counts)
    total = f"{format_count(facts.numel(''))} parameters"
    return f"{total}, {lists}." if lists else f"{total}, no repeated blocks."


def notes_on_replicated(plan: Plan, finder: RowFinder) -> Iterator[str]:
    """Yield notes on large weights that no row splits or names, and that have no note yet."""
    blocks, axis = finder.trial.blocks, finder.axis
    total, noted = blocks.facts.numel(""), {name for row in finder.rows for name in row.names}
    noted |= finder.replicated_names
    groups: dict[str, dict[str, None]] = {}
    for name, param in blocks.facts.unique_parameters.items():
        owner = name.rpartition(".")[0]
        is_split = any(s.axis == axis for s in plan.effective_layout(name).splits)
        group = blocks.common_name(owner)
        if is_split or group in noted or len(param.shape) < 2 or param.numel * SMALL_SHARE < total:
            continue
        reason = _why(blocks, owner, param.shape, finder.trial.feeds.reading_lines)
        groups.setdefault(reason, {})[group or name] = None
    for reason, names in groups.items():
        yield f"replicated: {names_text(list(names))}: {reason}"


def _why(blocks: Blocks, owner: str, shape: tuple[int, ...], uses: Mapping[str, str]) -> str:
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
    elsewhere = f"is used elsewhere, at {uses[owner]}" if uses.get(owner) else "leaves the model"
    return f"no column/row pair found: its output {elsewhere}"


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
    gathered: Sequence[str] = ()  # modules whose rows the loss compares
    micro: int = 0  # number of microbatches; 0: as many as the batch has rows for

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
    values: Callable[[], nn.Module] | None = None,
) -> ProposedSchedule:
    """Propose a schedule for a model (on any device), a full step's batch, and axes with sizes.

    For several meshes pass the model's facts: these cache what was found before. `values` makes a
    model on the meta device with values, where these decide how a loss compares rows.
    Raises Refusal S211 for an axis of an unknown name, S212 where nothing can be split over an
    axis, and whatever refuses the model or the batch.
    """
    check_mesh(mesh)
    facts = model if isinstance(model, ModelFacts) else ModelFacts(model)
    with add_forward_line(facts.model):
        row_count(batch)
    traced = propagate(Plan(facts), batch, loss)
    if traced.missing_loss is not None:
        raise Refusal(traced.missing_loss)
    check_batch_keys(Plan(facts), batch, traced, loss, weight)
    blocks = blocks_of(facts)
    trial = RowTrial(facts, blocks, batch, loss, weight)
    request = ProposalRequest(trial, blocks, mesh, batch)
    notes: list[str] = []
    splits_batch = any(mesh.get(request.axis(role) or "", 1) > 1 for role in BATCH_ROLES)
    if splits_batch and (norm := find_batch_norm(facts.model, traced)) is not None:
        name, kind = norm
        notes.append(f"relaxed: `{name}`, a `{kind}`, takes statistics of each part of the batch")
        request = replace(request, relax=RELAXED_WORD)
    if splits_batch and weight is None and len(traced.labels) > 1:
        weight_of(with_statistics(Plan(facts), traced, batch, loss), parts=2)
    if splits_batch and not request.relax:
        gathered = find_paired_rows(trial, traced, values, notes)
        if gathered is not None:
            request = replace(request, gathered=gathered, micro=1)
    if adapters is not None:
        request = replace(request, adapters=adapters.rows(blocks, notes))
    rows = rows_by_role(request, notes)
    others = _rest(request)
    stages = max(1, mesh.get(request.axis("stages") or "", 1))
    try:
        file = _tried(trial, lambda blocks: _file(request, blocks, rows, others, notes), stages)
    except Refusal as refusal:
        if refusal.diagnostic.code != "S668":
            raise
        # trainers of such models do the same: each microbatch has its own statistics
        notes.append("relaxed: the loss takes separate statistics for each microbatch")
        relaxed = replace(request, relax=RELAXED_WORD)
        file = _tried(trial, lambda blocks: _file(relaxed, blocks, rows, others, notes), stages)
    return ProposedSchedule(file, tuple(notes))


def _tried(trial: RowTrial, file: Callable[[Blocks], n.File], stages: int) -> n.File:
    """Return the file for the full model, planned in full; blocks that show all are accounted.

    Raises Refusal for what is refused.
    """
    schedule = file(trial.full_blocks)
    expand(schedule, trial.facts)
    short_blocks = trial.with_fewer_blocks(stages) if trial.is_shortened else trial.full_blocks
    plan = expand(file(short_blocks), short_blocks.facts).plan
    assert plan is not None
    account(plan, trial.batch, trial.loss)
    return schedule


def check_mesh(mesh: Mapping[str, int]) -> None:
    """Refuse (S211) axes of unknown names, and two axes of one role."""
    axis_help = (
        "it knows `dp`, `data` and `fsdp`, which split the batch, `ep` (experts), `cp`"
        " (sequences), `pp` and `pipe` (stages), `tp` and `model` (tensors)"
    )
    for name in mesh:
        if name not in ROLES:
            raise Refusal.of("S211", f"`init` does not know the axis `{name}`", helps=(axis_help,))
    for role in set(ROLES.values()):
        alike = [name for name in mesh if ROLES[name] == role]
        if len(alike) > 1:
            title = f"`{alike[0]}` and `{alike[1]}` would split the same"
            raise Refusal.of("S211", title, helps=("keep one of them", axis_help))
    if not mesh:
        raise Refusal.of("S211", "`init` needs a mesh", helps=("`--mesh dp=2,tp=2`", axis_help))


def rows_by_role(request: ProposalRequest, notes: list[str]) -> dict[str, list[ProposedRow]]:
    """Return the rows of each role that splits tensors; refuses an axis without any."""
    roles = (role for role in ("parts", "experts", "tokens") if request.axis(role) is not None)
    return {role: rows_of_role(request, role, notes) for role in roles}


def rows_of_role(request: ProposalRequest, role: str, notes: list[str]) -> list[ProposedRow]:
    """Return the rows of one role, whose axis the mesh has; refuses an axis without any.

    They depend on the axis's size; those of "parts" also on whether there is an axis for experts.
    """
    axis, remarks = request.axis(role), list[str]()
    assert axis is not None
    finder = RowFinder(request.trial, axis, max(2, request.mesh[axis]), [], remarks)
    if role == "parts":
        add_tensor_rows(finder)
        if request.axis("experts") is None:
            expert_rows(finder)
        vocabulary_rows(finder)
        bag_rows(finder)
    elif role == "experts":
        expert_rows(finder, ProposedRow((), make_call("zero", stage=1, over=axis)))
    else:
        context_rows(finder)
    if not finder.rows and request.mesh[axis] > 1:
        extra = _remarks(finder) if role == "parts" else [NONE_FOUND[role]] * (not remarks)
        raise _unused_axis(axis, [*remarks, *extra])
    notes += remarks
    if role == "parts":
        notes += _remarks(finder)
    return sorted(finder.rows, key=lambda row: not _first(request.blocks, row))


def _first(blocks: Blocks, row: ProposedRow) -> bool:
    """Return whether a row stands before all others: it is about a table, or its padding."""
    name = row.names[0]
    table = leaf_kind(blocks.facts.sites[blocks.modules_by_name[name][0]]) in TABLES
    return row.changes_facet(Facet.SHAPE) or (table and not blocks.is_inside(name))


def _unused_axis(axis: str, remarks: list[str]) -> Refusal:
    title = f"nothing of this model can be split over `{axis}`"
    helps = (f"leave `{axis}` out of the mesh, or give its ranks to another axis: `{axis}=1`",)
    return Refusal.of("S212", title, notes=tuple(remarks[:8]), helps=helps)


def _remarks(finder: RowFinder) -> list[str]:
    """List what else stays replicated, and where transformers' own plan differs."""
    plan = finder.trial.plan_rows(finder.rows, finder.axis, finder.ranks)
    differences = notes_on_differences(plan, finder.trial.blocks, finder.axis)
    return [*notes_on_replicated(plan, finder), *differences]


# -- stages and the batch -------------------------------------------------------------------------


def _rest(request: ProposalRequest) -> list[ProposedRow]:
    """Return the rows of the pipeline and of data parallelism."""
    rows: list[ProposedRow] = []
    stages, sliced = request.axis("stages"), request.axis("sliced")
    data = [axis for axis in (request.axis("data"), request.axis("experts")) if axis is not None]
    count = request.mesh.get(stages or "", 1)
    if stages is not None:
        rows.append(_cut(request, stages, count))
    over = [*data, *([sliced] if sliced is not None else [])]
    if request.gathered and over:
        gather = make_call("gather_rows", over=over[0] if len(over) == 1 else tuple(over))
        rows.append(ProposedRow(tuple(request.gathered), gather))
    if sliced is not None:
        rows.append(ProposedRow((), make_call("zero", stage=3, over=sliced)))
    if data:
        batch_axes = data[0] if len(data) == 1 else tuple(data)
        rows.append(ProposedRow((), make_call("zero", stage=0 if sliced else 1, over=batch_axes)))
    if stages is not None:
        order = make_call("pipeline", order="1F1B", micro=_micro(request, count))
        rows.append(ProposedRow((), order))
    return rows


def _micro(request: ProposalRequest, stages: int) -> int:
    """Return the number of microbatches for the rows that a rank has."""
    if request.micro:
        return request.micro
    parts = 1
    for name, size in request.mesh.items():
        parts *= size if ROLES[name] in ("data", "sliced", "experts") else 1
    return max(1, min(MICRO_PER_STAGE * stages, row_count(request.batch) // parts))


def _cut(request: ProposalRequest, axis: str, stages: int) -> ProposedRow:
    """Return the row that splits lists of blocks: all outermost ones, else the largest alone."""
    facts, lists = request.blocks.facts, request.blocks.lists
    outer = [name for name in lists if "*" not in name.split(".")]
    outer.sort(key=lambda name: list(facts.sites).index(name))
    largest = sorted(outer, key=lambda name: -facts.numel(name))
    name_choices = [tuple(outer), *((name,) for name in largest)]
    first_refusal: Refusal | None = None
    for names in dict.fromkeys(names for names in name_choices if names):
        row = ProposedRow(names, make_call("pipeline_split", over=axis))
        refusal = request.trial.cut_refusal(row, axis, stages)
        if refusal is None:
            return row
        first_refusal = first_refusal or refusal
    if first_refusal is not None:
        raise first_refusal
    return _cut_between(request, axis, stages)


def _cut_between(request: ProposalRequest, axis: str, stages: int) -> ProposedRow:
    """Return the row that splits a model without lists of blocks between the modules that it calls.

    Raises Refusal S212 where there are fewer modules than stages, or the split itself is refused.
    """
    facts = request.blocks.facts
    title = "this model has no list of blocks, and cannot be cut into stages between its modules"
    try:
        names = list(dict.fromkeys(default_units(facts.model, request.trial.sample)))
        stage_of = balanced_stages([ChainUnit(name, facts.numel(name)) for name in names], stages)
        starts = {stage: name for name, stage in zip(reversed(names), reversed(stage_of)) if stage}
        first_units = tuple(starts[stage] for stage in sorted(starts))
        row = ProposedRow(first_units, make_call("pipeline_split", over=axis))
        refusal = request.trial.cut_refusal(row, axis, stages)
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
    request: ProposalRequest,
    blocks: Blocks,
    rows: Mapping[str, list[ProposedRow]],
    others: list[ProposedRow],
    notes: list[str],
) -> n.File:
    """Build the schedule with its comments."""
    steps: list[n.Step] = []
    if request.adapters:
        statements = fold_statements(request.adapters, blocks)
        steps.append(make_step("adapters", statements, relax="model"))
    steps += proof_steps(rows, blocks)
    if others:
        calls = [row.statement for row in sorted(others, key=lambda row: not row.names)]
        name = "data" if request.axis("stages") is None else "pipeline"
        steps.append(make_step(name, calls, TRAIN, request.relax))
    mesh = lift.mesh(request.mesh, None, NOWHERE, f"# {headline(blocks)}")
    comment_lines = (line for note in notes for line in wrap_comment(note))
    return make_schedule_file("proposed", blocks.facts.class_name, mesh, steps, *comment_lines)
