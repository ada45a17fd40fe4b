"""One probe: the original, run on a batch and on the parts that ranks make of it, and compared.

copy        a twin of the original in float64, with logical draws, as a proof runs it; or alone,
            as its user calls it, where it is asked whose fault a difference is
inputs      a batch, its parts, and what each part weighs
hypotheses  the weighed parts make the whole: loss and gradients (S703), the buffers that a
            forward writes (S708), and each call of torch in between, to tell the line
compare     tensor by tensor, relative error at most RTOL
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from schedlang.diagnostics.diagnostic import Diagnostic, OwnError, Refusal
from schedlang.ir.copied import copied
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.analyze.routing import unlimited
from schedlang.passes.propagate.original import ALLOW, check_microbatches, relaxed, weight_of
from schedlang.passes.propagate.propagate import Traced
from schedlang.passes.verify.across_stages import check_across_stages
from schedlang.passes.verify.carried import buffers_put_back, check_buffers, check_carried
from schedlang.passes.verify.compare import RTOL, tensor_rows
from schedlang.passes.verify.finite import check_batch
from schedlang.passes.verify.observe import Batch, Key, Observation
from schedlang.passes.verify.original import Sequential, loss_of, parts_unlike, rows
from schedlang.passes.verify.relaxed import check_sums, directions_of
from schedlang.passes.verify.sides import (
    Case,
    alone,
    modes_of,
    prepared,
    twin,
    wide_alone,
    widened,
)
from schedlang.report import Row
from schedlang.runtime.batch import Part, called, named_tensors, split
from schedlang.runtime.device import has_float64, undrawn
from schedlang.runtime.grad_reduction.batch_statistics import Meeting, gather_statistics
from schedlang.runtime.kept_outside import kept_outside
from schedlang.runtime.modes import ambient
from schedlang.runtime.no_labels import no_labels
from schedlang.runtime.rng.logical_dropout import Alone, ByRow
from schedlang.runtime.tracing.meta import meta_model, model_line, name_of
from schedlang.runtime.training import Training

Derived = dict[str, Tensor | None]  # the loss under "", and gradients by name


@dataclass(frozen=True)
class Probe:
    """A batch of a prepared case in float64, and the parts that the program makes of it."""

    case: Case
    batch: Batch
    changed: set[str] = field(default_factory=set, compare=False)  # attributes, by a forward

    @cached_property
    def shares(self) -> list[list[Part]]:
        """The microbatches of each data-parallel rank."""
        return split(self.batch, self.case.plan.dealt, self.case.plan.micro)

    @property
    def parts(self) -> list[Part]:
        """All of them, those of one rank after the other."""
        return [part for share in self.shares for part in share]

    @cached_property
    def weights(self) -> list[float]:
        """The weight of each part in the mean loss, as `build` decides it."""
        case, parts = self.case, self.parts
        assert case.prepared is not None
        weigh = case.weight or weight_of(case.prepared.traced, len(parts))
        with ambient(*modes_of(case)[0]):
            found = [weigh(part.inputs) for part in parts]
        if case.weight is not None and not sum(found):
            title = "`weight` gives 0 for every part of the batch"
            helps = ("return a count of what the loss is a mean over: rows, tokens",)
            raise Refusal.of("S621", title, helps=helps)
        return found

    def together(self) -> list[Derived] | None:
        """Weighed losses and gradients of parts that share their sums; None: they share none.

        Each part runs on a copy of its own in a thread of this process; they meet at each sum.
        """
        case, parts, total = self.case, self.parts, sum(self.weights)
        assert case.prepared is not None
        shared = case.prepared.traced.statistics
        if shared is None:
            return None
        meeting = Meeting(len(parts))

        def run(place: int) -> Derived:
            part, share = parts[place], self.weights[place] / total
            try:
                with alone(case, beside=True, scale=share) as subject, no_labels(share):
                    gather_statistics(subject.module, shared.sums, meeting.at(place))
                    return {"": subject.derive(part.inputs, part.rows), **subject.gradients()}
            except BaseException:
                meeting.barrier.abort()  # the others would wait for this one
                raise

        kept = kept_outside(case.plan.model.model, case.loss)
        with kept, ThreadPoolExecutor(len(parts)) as threads:
            return list(threads.map(run, range(len(parts))))

    def disagreement(self, evaluate: bool = False) -> Row | None:
        """The first of loss and gradients that the weighed parts do not give as the whole does."""
        if len(self.parts) == 1:
            return None
        with alone(self.case, evaluate=evaluate) as subject:
            return self.differs(subject)

    def differs(self, subject: Sequential, whole: Derived | None = None) -> Row | None:
        """See `disagreement`: on this subject, which has derived the `whole` already if given."""
        if len(self.parts) == 1:
            return None
        given = self.batch, self.parts, self.weights, self.together()
        found = parts_agree(subject, *given, whole=whole)
        self.changed.update(subject.changed)
        return next((row for row in found if not row.ok), None)


# ---- The parts make the whole: loss and gradients.


def parts_agree(
    subject: Sequential,
    batch: Batch,
    parts: Sequence[Part],
    weights: Sequence[float],
    weighed: Sequence[Derived] | None = None,
    *,
    whole: Derived | None = None,
    rtol: float = RTOL,
) -> tuple[Row, ...]:
    """Compare loss and gradients of a batch with the weighed means of those of its parts.

    Buffers are put back as they were. `weighed` are the losses and gradients of the parts, times
    their weights, where they were derived together; `whole` those of the batch, where known.
    """
    name = f"{len(parts)} parts"
    whole = whole or derived(subject, batch, range(rows(batch)))
    if weighed is None:
        weighed = [found for _, found in weighed_shares(subject, parts, weights)]
    sides = [
        Observation(
            {
                Key(name, "loss of parts" if k == "" else "gradients of parts", 0, k or "loss"): v
                for k, v in found.items()
            },
            order=subject.order,
        )
        for found in (whole, _added(weighed))
    ]
    return tuple(tensor_rows(sides[0], sides[1], rtol, exact=False))


def weighed_shares(
    subject: Sequential, parts: Sequence[Part], weights: Sequence[float]
) -> Iterator[tuple[int, Derived]]:
    """Yield what each part that weighs something adds to loss and gradients, with its number."""
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if weight:
            found, share = derived(subject, part.inputs, part.rows), weight / sum(weights)
            yield number, {key: None if x is None else x * share for key, x in found.items()}


def _added(shares: Iterable[Derived]) -> Derived:
    total: Derived = {}
    for found in shares:
        for key, share in found.items():
            before = total.get(key)
            total[key] = share if before is None else before if share is None else before + share
    return total


def derived(subject: Sequential, batch: Batch, samples: Iterable[int]) -> Derived:
    """Loss and gradients of one run; buffers are put back."""
    with buffers_put_back(subject):
        found: Derived = {"": subject.derive(batch, tuple(samples)).clone()}
        found |= {n: None if g is None else g.clone() for n, g in subject.gradients().items()}
    return found


# ---- The same of the model alone: whether it shows what our runs show.


SEEDS = (0, 1)
MUCH = 1e-3  # of what our runs show, what the model alone has to show at least
UNTOLD = float("inf")


def gap_alone(probe: Probe) -> float:
    """Return the relative gap of loss and gradients between the parts, weighed, and the whole.

    None of our loops, meetings, dtypes and logical draws takes part, so that what they do wrong is
    not said of the model; what it draws it draws by row.  `UNTOLD` where it draws in other ways, or
    does not run without a mode.
    """
    case, parts, weights = probe.case, probe.parts, probe.weights
    module = twin(case)
    Training(module).on()
    every = [row for part in parts for row in part.rows]
    try:
        with undrawn():
            whole, again = (_called(case, module, probe.batch, every, seed) for seed in SEEDS)
            if not _gap(whole, again) <= RTOL:
                return UNTOLD
            added: dict[str, Tensor] = {}
            for part, weight in zip(parts, weights):
                found = _called(case, module, part.inputs, part.rows) if weight else {}
                for name, value in found.items():
                    share = value * (weight / sum(weights))
                    added[name] = added.get(name, torch.zeros(())) + share
    except Exception:  # whatever the model raises where no mode carries it
        return UNTOLD
    return _gap(added, whole)


def _called(
    case: Case, module: nn.Module, batch: Mapping[str, Any], rows: Sequence[int], seed: int = 0
) -> dict[str, Tensor]:
    """The loss of rows of a batch, under "", and its gradients; the module stays as it is."""
    torch.manual_seed(seed)
    fresh = copied(module)
    with ambient(Alone(ByRow(rows))):
        loss = (case.loss or loss_of)(called(fresh, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in fresh.named_parameters() if p.grad is not None}
    return {"": loss.detach(), **found}


def _gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the gap of tensors, each relative to its size; of small ones to the largest size."""
    if a.keys() != b.keys() or any(a[k].shape != b[k].shape for k in b):
        return UNTOLD
    most = max(float(value.norm()) for value in b.values())
    gaps = [float((a[k] - b[k]).norm()) / (float(b[k].norm()) + 1e-3 * most or 1.0) for k in b]
    return max((gap if gap == gap else UNTOLD for gap in gaps), default=0.0)


# ---- Each call of torch: the line of a model at which rows of a batch meet.


MOST = 1 << 26  # numbers that are kept of one pass; of more nothing is told
Call = tuple[str, str, Tensor]  # the function, the model's line, what it gave


def line_where_rows_meet(probe: Probe) -> str:
    """The first call whose result for the whole batch is not made of those of the parts.

    A result with rows should be that of the parts, one after the other; one without should be alike
    in all, or their mean by weight.  "" where no line can be told: parts take other ways.
    """
    parts = probe.parts
    whole = _calls(probe.case, probe.batch, [row for part in parts for row in part.rows])
    each = [_calls(probe.case, part.inputs, part.rows) for part in parts]
    if whole is None or any(one is None or len(one) != len(whole) for one in each):
        return ""
    for place, (name, line, value) in enumerate(whole):
        found = [one[place] for one in each if one is not None]
        if any(other[0] != name for other in found):
            return ""
        if line and not _made_of(value, [other[2] for other in found], probe.weights):
            return f"`{name}`, at {line}"
    return ""


def _calls(case: Case, batch: Batch, rows: Sequence[int]) -> list[Call] | None:
    """The calls of the original on some rows, in order; None where they give too much."""
    calls: list[Call] = []

    class Noting(TorchFunctionMode):
        """Keeps the floats that calls give."""

        kept = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.is_floating_point() and self.kept <= MOST:
                with DisableTorchFunction():
                    self.kept += out.numel()
                    calls.append((name_of(func), model_line(), out.detach().clone()))
            return out

    with alone(case) as subject, Noting() as noting:
        subject.derive(batch, rows)
    return calls if noting.kept <= MOST else None


def _made_of(whole: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> bool:
    if all(part.shape == whole.shape for part in parts):
        mean = sum(part * weight for part, weight in zip(parts, weights)) / sum(weights)
        return all(_same(part, whole) for part in parts) or _same(torch.as_tensor(mean), whole)
    ndims = {part.ndim for part in parts}
    if ndims != {whole.ndim}:
        return False
    dims = [d for d in range(whole.ndim) if any(p.shape[d] != whole.shape[d] for p in parts)]
    if len(dims) != 1 or sum(part.shape[dims[0]] for part in parts) != whole.shape[dims[0]]:
        return False
    (dim,) = dims
    if _same(torch.cat(list(parts), dim), whole):
        return True
    rows = [part.shape[dim] for part in parts]  # or rows are counted first: [tokens, rows]
    for inner in {n for n in range(2, min(rows) + 1) if all(size % n == 0 for size in rows)}:
        split = [torch.unflatten(part, dim, (inner, -1)) for part in parts]
        if _same(torch.cat(split, dim + 1).flatten(dim, dim + 1), whole):
            return True
    return False


def _same(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm()) <= RTOL * float(b.norm()) + 1e-12


# ---- What is refused of a model whose parts do not make the whole.


def check_parts(case: Case) -> Case:
    """The case; refuse a model whose loss over the parts, weighed, is not that of the whole.

    Where the schedule relaxes batch statistics such a model is compared with itself, by parts.
    """
    check_across_stages(case)
    free = replace(case, plan=unlimited(case.plan))  # what is dropped depends on the whole
    probe = Probe(free, case.batches[0])
    bad = probe.disagreement()
    if bad is not None:
        check_batch(free, 0)
    loose = relaxed(case.plan)
    if bad is None:
        try:
            if len(probe.parts) > 1:
                _check_left_behind(probe)
            check_sums(case)
            return case
        except Refusal:
            if not loose:
                raise
    if loose:
        return replace(case, parted=True)
    assert bad is not None
    _of_the_model(probe, bad)
    sample = probe.parts[0].inputs
    check_microbatches(case.plan, sample, case.loss, case.weight is not None)
    # parts that share some sums are not alike where they meet
    known = case.prepared is not None and case.prepared.traced.statistics is not None
    line = "" if known else _line_if_told(Probe(case, case.batches[0]))
    differs = (
        f"on the original, split into {len(probe.parts)} parts, {bad.place} differs by"
        f" {bad.error:.1e}"
    )
    meet = (f"rows of the batch meet in {line}",) if line else ()
    if _sums(probe):
        raise Refusal.of(
            "S703",
            "the loss of this model is a sum over rows, not a mean",
            notes=(differs, "the losses of the parts add up to that of the whole", *meet),
            helps=("divide it by what it adds up, in `loss(output, batch)`, or by an option",),
        )
    raise Refusal(
        Diagnostic(
            "S703",
            "splitting the batch changes the loss of this model",
            notes=(
                differs,
                "statistics over the batch (batch norm, router losses) would differ by rank",
                *meet,
            ),
            helps=(
                "define `weight(batch)` in the model file: the weight of a part of the batch",
                'or allow it: `step "..." relax(batch_stats) {`',
            ),
        )
    )


def _sums(probe: Probe) -> bool:
    """Return whether the losses of the parts add up to that of the whole, as no mean does."""
    with alone(probe.case) as subject:
        whole = derived(subject, probe.batch, range(rows(probe.batch)))[""]
        parts = [derived(subject, part.inputs, part.rows)[""] for part in probe.parts]
    assert whole is not None
    total = torch.stack([loss for loss in parts if loss is not None]).sum()
    return bool((total - whole).abs() <= RTOL * whole.abs())


def _line_if_told(probe: Probe) -> str:
    """The line where rows meet; an error on the way there must not stand for what is refused."""
    try:
        return line_where_rows_meet(probe)
    except Exception:  # tensors inside of `vmap`, say, which end with it
        return ""


def check_own_parts(case: Case) -> None:
    """Refuse as `check_parts` where the model's own parameters alone show it, or unlike parts do.

    A hinge, or a clamp, is flat at some parameters; these are the ones that training begins with.
    A loss over a mask's sum of its own splits well as long as all parts have equal sums.
    """
    if relaxed(case.plan) or case.plan.shares * case.plan.micro == 1:
        return
    own = wide_alone(replace(case, plan=unlimited(case.plan)))
    parts = [part.rows for part in Probe(own, own.batches[0]).parts]
    for batch in (own.batches[0], parts_unlike(own.batches[0], parts)):
        if batch is not None and Probe(own, batch).disagreement() is not None:
            check_parts(replace(own, batches=(batch,)))


def _of_the_model(probe: Probe, bad: Row) -> None:
    """Raise an error of our own where the model alone does not show what our runs of it show."""
    found = gap_alone(probe)
    # a model that computes in fewer bits shows their roundings, and what is much larger is ours
    if found <= max(RTOL, MUCH * bad.error) and found != UNTOLD:
        name = type(probe.case.plan.model.model).__name__
        raise OwnError(
            f"runs of the parts of a batch give another {bad.place} than the whole",
            f"{bad.place} differs by {bad.error:.1e}, and by {found:.1e} with the model alone",
            f"the model, `{name}`, in {len(probe.parts)} parts",
        )


def batch_norm(model: nn.Module, traced: Traced) -> tuple[str, str] | None:
    """The first module, and its class, that trains by statistics of the rows that it is given."""
    bare = meta_model(model, {})
    Training(bare).on()
    for fqn, one in bare.named_modules():
        by_rows = isinstance(one, _BatchNorm) and not isinstance(one, nn.SyncBatchNorm)
        if by_rows and one.training and fqn in traced.entries:
            return fqn, type(one).__name__
    return None


def _check_batch_norms(plan: Plan, found: Prepared) -> None:
    """Refuse (S703) a model with a batch norm that trains by the rows of a part, without a run."""
    first = None if relaxed(plan) else batch_norm(plan.model.model, found.traced)
    if first is not None:
        raise Refusal.of(
            "S703",
            "splitting the batch changes the loss of this model",
            notes=("`{}`, a `{}`, takes statistics over the rows of a part".format(*first),),
            helps=(ALLOW.removeprefix("or "), "or replace it by a norm of each row"),
        )


def _check_left_behind(probe: Probe) -> None:
    """Refuse a model in whose buffers, or attributes, the parts leave what the whole does not
    (S708)."""
    assert probe.case.prepared is not None
    ways = directions_of(probe.case.prepared.staged)
    with alone(probe.case) as subject:
        runs = [run for parts in probe.shares for run in ways.apart(parts)]
        check_buffers(subject, probe.batch, runs)
        if probe.changed:
            shared = probe.case.prepared.traced.statistics is not None
            check_carried(subject, probe.batch, probe.shares, probe.changed, shared)


# ---- Asked before ranks train, as `verify` asks it.


CHEAP = 10**9  # parameters times numbers of a batch: about a second of one core, both sides in all


def sound(case: Case) -> Case:
    """The case with its plan traced once; refuses whatever `verify` refuses before it has ranks.

    A model that lies on the meta device has no loss to ask for.
    """
    made = prepared(case)
    if not _on_meta(made.plan):
        check_parts(widened(made))
        check_own_parts(made)
    return made


def cheaply(
    plan: Plan, batch: Mapping[str, Any], found: Prepared, *, loss: Any = None, weight: Any = None
) -> None:
    """Refuse as `verify` does where parts do not make the whole (S703, S708), if soon found out.

    For `build`, on each rank alike: it runs the model on the whole batch, which for a large one
    takes as long as steps do, and memory that its ranks may not have.  Of one only its batch norms
    are looked at; the rest `verify` says.
    """
    numbers = max((t.numel() for t in named_tensors(batch).values()), default=0)
    size = sum(fact.numel for fact in plan.model.unique.values())
    apart = plan.shares * plan.micro > 1 or found.staged.axis is not None
    if not apart or found.traced.lossless is not None:
        return
    devices = {tensor.device for tensor in plan.model.model.parameters()}
    if size * numbers > CHEAP or _on_meta(plan) or not all(map(has_float64, devices)):
        _check_batch_norms(plan, found)
        return
    case = Case(plan, (dict(batch),), loss, weight, dtype="none", prepared=found)
    try:
        with kept_outside(plan.model.model, loss):
            check_parts(widened(case))
            check_own_parts(case)
    except Refusal as refusal:
        if refusal.diagnostic.code in ("S707", "S710"):  # of parts they say nothing
            return
        raise
    except Exception as error:
        # what cannot be copied, or run in float64, trains all the same; an error that the original
        # alone does not end in is one of what was asked here, or of a part of the batch
        if isinstance(error, OwnError) or _runs(case):
            raise


def _runs(case: Case) -> bool:
    """Return whether the original runs as a proof runs it, on the whole batch."""
    try:
        wider = widened(case)
        with alone(wider) as subject:
            derived(subject, wider.batches[0], range(rows(wider.batches[0])))
    except Exception:  # the question is whether there is any
        return False
    return True


def _on_meta(plan: Plan) -> bool:
    return any(tensor.is_meta for tensor in plan.model.model.parameters())
