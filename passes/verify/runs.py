"""Runs: under which conditions a proof trains, made so that mistakes show."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.passes.analyze.routing import routings, unlimited
from schedlang.passes.propagate.original import check_microbatches
from schedlang.passes.verify.finite import check_batch
from schedlang.passes.verify.observe import Batch, Condition, conditions
from schedlang.passes.verify.sides import Case, modes_of, prepared, twin
from schedlang.passes.verify.variants import Batches, Labels, varied
from schedlang.report import Gap, Row

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.passes.verify.original import Sequential
    from schedlang.runtime.batch import Part

# ---- Buffers that a forward writes: whether microbatches leave in them what the whole batch
# would.


def check_buffers(
    subject: Sequential, batch: Batch, shares: Sequence[Sequence[Part]], rtol: float = 1e-9
) -> None:
    """Refuse a model whose buffers depend on how a batch is split (S708), measured on the original.

    `shares` are the microbatches of each data-parallel rank, which run one after the other.
    """
    from schedlang.passes.verify.original import rows

    before = {name: b.detach().clone() for name, b in subject.module.named_buffers()}
    if not before:
        return
    whole = _after(subject, before, [(batch, range(rows(batch)))])
    changed = [name for name, value in before.items() if not _near(whole[name], value, 0.0)]
    for parts in shares if changed else ():
        found = _after(subject, before, [(part.inputs, part.rows) for part in parts])
        for name in changed:
            if not _near(found[name], whole[name], rtol):
                raise _refusal(name, len(parts))


def _after(
    subject: Sequential,
    before: dict[str, Tensor],
    parts: Sequence[tuple[Batch, Sequence[int]]],
) -> dict[str, Tensor]:
    """The buffers after a forward and backward of each part in turn; then they are put back."""
    for inputs, samples in parts:
        subject.derive(inputs, samples)
    buffers = dict(subject.module.named_buffers())
    after = {name: buffers[name].detach().clone() for name in before}
    for name, value in before.items():
        buffers[name].copy_(value)
    return after


def _near(x: Tensor, r: Tensor, rtol: float) -> bool:
    import torch

    return x.shape == r.shape and torch.allclose(
        x.double(), r.double(), rtol=rtol, atol=rtol * 1e-3, equal_nan=True
    )


def _refusal(name: str, parts: int) -> Refusal:
    why = f"{parts} microbatches in turn" if parts > 1 else "the rows of one rank alone"
    return Refusal(
        Diagnostic(
            "S708",
            f"the buffer `{name}` depends on how the batch is split",
            notes=(
                f"on the original, after {why} it differs from its value after the full batch",
                "a forward updates it: an average over calls, a count, statistics of the batch",
            ),
            helps=(
                "use one microbatch, `micro=1`, or no data parallelism, as the note says",
                'or allow it: `step "..." relax(batch_stats) {`',
            ),
        )
    )


# ---- Runs: under which conditions a proof trains, made so that mistakes show.


EVALUATED = "SGD, eval mode"
MUCH = 1e-3  # of what our runs show, what the model alone has to show at least
SCALE = 3.0  # of the loss: a backward that takes its gradient for 1 is found out


@dataclass(frozen=True)
class Runs:
    """The training runs, what was derived from the user's batches, and what could not be had."""

    told: tuple[Condition, ...]
    batches: Batches
    derived: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()


def runs(case: Case, evaluate: bool = False) -> Runs:
    """SGD on the batches as given; AdamW, clipped, on variants of them, some weights frozen.

    To AdamW the scale of the loss does not matter, so there the loss is multiplied.
    With `evaluate` there is one more, in eval mode.
    The case is prepared and in float64. Clipping is set by the gradient norm of the original.
    """
    from schedlang.passes.verify.original import Sequential
    from schedlang.runtime.modes import ambient

    modes, _ = modes_of(case)
    with ambient(*modes):
        norm = Sequential(twin(case), loss=case.loss).norm(case.batches[0])
    seen = batches_of(case)
    made, said = varied(seen)
    derived = []
    for place, words in said.items():
        if _sound(case, made[place]):
            derived += words
        else:
            made[place] = seen.all[place]
    plain, clipped = conditions(case.batches, norm, made)
    still, gaps = _frozen(case)
    told = [plain, replace(clipped, case=still, scale=SCALE)]
    limit, more = _limit(case, plain)
    told += [*limit, *_at_once(case, plain), *_unlimited(case, plain)]
    if evaluate:
        told.append(replace(plain, name=EVALUATED, batches=case.batches[:2], evaluate=True))
    if case.table is not None:  # a norm over stages that update apart is known too late to clip by
        plainly = [c.name.removesuffix(", clipped") for c in told]
        told = [replace(c, clip=None, name=name) for c, name in zip(told, plainly)]
    both = replace(seen, all=(*case.batches, *made))
    return Runs(tuple(told), both, tuple(derived), (*gaps, *more))


def _limit(case: Case, plain: Condition) -> tuple[list[Condition], tuple[Gap, ...]]:
    """Where statistics of parts are relaxed: a run in which they make no difference.

    In eval mode they stand still, and the program has to equal the original itself.
    """
    if not case.parted:
        return [], ()
    if _parts(case, case.batches[0], evaluate=True)[1] is not None:
        said = "no limit of `batch_stats`: parts differ in eval mode too"
        return [], (Gap(said, "what is not due to the statistics of parts"),)
    whole = replace(case, parted=False)
    name = "eval mode, where `batch_stats` vanishes"
    return [replace(plain, name=name, batches=case.batches[:2], evaluate=True, case=whole)], ()


def _at_once(case: Case, plain: Condition) -> list[Condition]:
    """Where weights are stale: a run with one update a step, at its end, in which none is."""
    if case.table is None or case.parted:
        return []
    assert case.plan.order is not None
    order = replace(case.plan.order, every=case.plan.micro)
    whole = prepared(replace(case, plan=replace(case.plan, order=order)))
    name = "one update a step, where `staleness` vanishes"
    return [replace(plain, name=name, batches=case.batches[:2], case=whole)]


def _unlimited(case: Case, plain: Condition) -> list[Condition]:
    """Where experts drop tokens: a run in which they take all, and equal the model as it is."""
    if not any(routings(case.plan)) or case.parted or case.table is not None:
        return []
    whole = prepared(replace(case, plan=unlimited(case.plan)))
    name = "capacity without limit, where `routing` vanishes"
    return [replace(plain, name=name, batches=case.batches[:2], case=whole)]


def batches_of(case: Case) -> Batches:
    """The batches of a case, how they are cut, and what in them is known to be labels."""
    from schedlang.runtime.batch import shares

    replicas, micro = case.cuts

    def cut(count: int) -> list[range]:
        return [
            range(share.start + run.start, share.start + run.stop)
            for share in shares(count, replicas)
            for run in shares(len(share), micro)
        ]

    rules = case.prepared.traced.labels if case.prepared is not None else ()
    labels = tuple(Labels(rule.source, rule.ignore_index) for rule in rules)
    return Batches(case.batches, cut, labels)


# -- what the original says of a batch ---------------------------------------------------------


def check_parts(case: Case) -> Case:
    """The case; refuse a model whose loss over the parts, weighed, is not that of the whole.

    Where the schedule relaxes batch statistics such a model is compared with itself, by parts.
    """
    free = replace(case, plan=unlimited(case.plan))  # what is dropped depends on the whole
    count, bad = _parts(free, case.batches[0])
    if bad is not None:
        check_batch(free, 0)
    relaxed = {name for _, names in case.plan.relaxed for name in names}
    if bad is None:
        try:
            if count > 1:
                _buffers(free, case.batches[0])
            return case
        except Refusal:
            if "batch_stats" not in relaxed:
                raise
    if "batch_stats" in relaxed:
        return replace(case, parted=True)
    assert bad is not None
    from schedlang.runtime.batch import split

    _of_the_model(free, bad)
    sample = split(case.batches[0], case.plan.shares, case.plan.micro)[0][0].inputs
    check_microbatches(case.plan, sample, case.loss, case.weight is not None)
    raise Refusal(
        Diagnostic(
            "S703",
            "splitting the batch changes the loss of this model",
            notes=(
                f"on the original, split into {count} parts, {bad.place} differs by"
                f" {bad.error:.1e}",
                "statistics over the batch (batch norm, router losses) would differ by rank",
                *_line_of(case),
            ),
            helps=(
                "define `weight(batch)` in the model file: the weight of a part of the batch",
                'or allow it: `step "..." relax(batch_stats) {`',
            ),
        )
    )


def _line_of(case: Case) -> tuple[str, ...]:
    """Where the parts first compute something else than the whole; empty where nobody can tell."""
    from schedlang.passes.propagate.original import part_weight
    from schedlang.passes.verify.meeting_rows import line_where_rows_meet
    from schedlang.runtime.batch import split

    plan = case.plan
    if case.prepared is not None and case.prepared.traced.statistics is not None:
        return ()  # parts share some sums, and are not alike there
    parts = [p for share in split(case.batches[0], plan.shares, plan.micro) for p in share]
    weigh = part_weight(plan, parts[0].inputs, case.loss, case.weight, len(parts))
    line = line_where_rows_meet(case, parts, [weigh(part.inputs) for part in parts])
    return (f"rows of the batch meet in {line}",) if line else ()


def _of_the_model(case: Case, bad: Row) -> None:
    """Raise an error of our own where the model alone does not show what our runs of it show."""
    from schedlang.diagnostics.diagnostic import OwnError
    from schedlang.passes.propagate.original import part_weight
    from schedlang.passes.verify.original import RTOL, parts_differ
    from schedlang.runtime.batch import split

    plan = case.plan
    parts = [p for share in split(case.batches[0], plan.shares, plan.micro) for p in share]
    weigh = part_weight(plan, parts[0].inputs, case.loss, case.weight, len(parts))
    alone = parts_differ(case, parts, [weigh(part.inputs) for part in parts])
    # a model that computes in fewer bits shows their roundings, and what is much larger is ours
    if alone <= max(RTOL, MUCH * bad.error):
        raise OwnError(
            f"runs of the parts of a batch give another {bad.place} than the whole",
            f"{bad.place} differs by {bad.error:.1e}, and by {alone:.1e} with the model alone",
            f"the model, `{type(plan.model.model).__name__}`, in {len(parts)} parts",
        )


def _buffers(case: Case, batch: Batch) -> None:
    """Refuse a model in whose buffers the parts leave what the whole does not (S708)."""
    from schedlang.passes.verify.original import Sequential
    from schedlang.passes.verify.parted import directions_of
    from schedlang.runtime.batch import split
    from schedlang.runtime.modes import ambient

    plan = case.plan
    modes, _ = modes_of(case)
    with ambient(*modes):
        subject = Sequential(twin(case), loss=case.loss)
        shares = split(batch, plan.shares, plan.micro)
        assert case.prepared is not None
        ways = directions_of(case.prepared.staged)
        check_buffers(subject, batch, [run for parts in shares for run in ways.apart(parts)])


def _parts(case: Case, batch: Batch, evaluate: bool = False) -> tuple[int, Row | None]:
    """Into how many parts a batch is cut, and what of their loss and gradients is not the whole."""
    from schedlang.passes.propagate.original import part_weight
    from schedlang.passes.verify.compare import parts_agree
    from schedlang.passes.verify.original import Sequential
    from schedlang.runtime.batch import split
    from schedlang.runtime.modes import ambient

    plan = case.plan
    micro = plan.micro
    parts = [p for share in split(batch, plan.shares, micro) for p in share]
    if len(parts) == 1:
        return 1, None
    weigh = part_weight(plan, parts[0].inputs, case.loss, case.weight, len(parts))
    modes, _ = modes_of(case)
    with ambient(*modes):
        weights = [weigh(part.inputs) for part in parts]
        rows = parts_agree(
            Sequential(twin(case), loss=case.loss, evaluate=evaluate),
            batch,
            [(part.inputs, part.rows) for part in parts],
            weights,
            _together(case, parts, weights),
        )
    return len(parts), next((row for row in rows if not row.ok), None)


def _together(
    case: Case, parts: Sequence[Part], weights: Sequence[float]
) -> list[dict[str, Tensor | None]] | None:
    """The parts with the sums over rows that they share in the program; None: they share none."""
    from schedlang.passes.verify.original import together

    assert case.prepared is not None
    shared = case.prepared.traced.statistics
    return together(case, parts, weights, shared.sums) if shared is not None else None


def _sound(case: Case, batch: Batch) -> bool:
    """Whether the original takes a derived batch, and its parts make the whole."""
    import math

    from schedlang.passes.verify.original import Sequential
    from schedlang.runtime.modes import ambient

    modes, _ = modes_of(case)
    try:
        with ambient(*modes):
            norm = Sequential(twin(case), loss=case.loss).norm(batch)
        return math.isfinite(norm) and (case.parted or _parts(case, batch)[1] is None)
    except Exception:  # whatever the model raises for what its user never gave it
        return False


# -- frozen parameters -------------------------------------------------------------------------


def _frozen(case: Case) -> tuple[Case | None, tuple[Gap, ...]]:
    """The case with a quarter of the parameters frozen, where the user froze none."""
    from schedlang.runtime.changed import Freeze

    module = case.plan.model.model
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    if len(names) < len(list(module.parameters())):
        return None, ()
    still = {name for name in names if zlib.crc32(name.encode()) % 4 == 0} or {names[0]}
    try:
        if len(still) == len(names):
            return None, (Gap("no frozen parameters", _FROZEN),)
        untouched = case.plan.model.base.model
        return prepared(case.with_model(Freeze(frozenset(still))(untouched))), ()
    except Refusal as refusal:
        said = refusal.diagnostics[0].title
        return None, (Gap(f"no frozen parameters ({said})", _FROZEN),)


_FROZEN = "frozen weights that are updated, or stop the gradient of others"
