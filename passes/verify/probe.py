"""Check that the parts of a batch make the same loss and gradients as the whole batch.

copy        of the original in float64, with logical draws, as a proof runs it; or the model
            alone, as its user calls it, to find whose fault a difference is
inputs      a batch, its parts, and the weight of each part
hypotheses  the weighted parts equal the whole: loss and gradients (S703), buffers that a forward
            writes (S708)
comparison  tensor by tensor, relative error at most RTOL
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from schedlang.diagnostics.diagnostic import Diagnostic, OwnError, Refusal
from schedlang.diagnostics.tables import DEFAULT_COLUMNS
from schedlang.ir.annotations import RowGather
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.expert_capacity import without_capacity
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.propagate.batch_refusals import HELPS_NORM, HELPS_WEIGHT
from schedlang.passes.propagate.loss_sums import (
    check_microbatches,
    is_statistics_relaxed,
    known_sums,
)
from schedlang.passes.propagate.original_forward import weight_of
from schedlang.passes.propagate.propagate import Traced
from schedlang.passes.verify.compare import RTOL, compare_tensors
from schedlang.passes.verify.forward_state import check_attributes, check_buffers, restored_buffers
from schedlang.passes.verify.linear_backward import check_linear
from schedlang.passes.verify.loss_alone import UNKNOWN, check_loss_alone, model_gap, part_error
from schedlang.passes.verify.mixing_call import MixingCall, find_mixing_call
from schedlang.passes.verify.observe import Batch, Key, Observation
from schedlang.passes.verify.original import Sequential, count_rows, repeat_first_rows
from schedlang.passes.verify.original_checks import check_batch
from schedlang.passes.verify.proof_case import (
    Case,
    original_subject,
    own_float64,
    prepare_case,
    proof_modes,
    randomised_float64,
)
from schedlang.passes.verify.relaxed_original import buffer_replicas, check_sums, gathered_parts
from schedlang.passes.verify.stage_state import check_across_stages
from schedlang.report import Row
from schedlang.runtime.batch import BatchPart, named_tensors, split_batch
from schedlang.runtime.comm import world
from schedlang.runtime.device import has_float64
from schedlang.runtime.forward import wrap
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.grad_reduction.batch_statistics import (
    UNEQUAL_SUMS,
    ThreadSum,
    gather_statistics,
)
from schedlang.runtime.grad_reduction.row_gathering import RowGathering, gather_in_threads
from schedlang.runtime.label_means import scaled_means, with_means
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.row_lists import describe_number_lists
from schedlang.runtime.tracing.meta_runs import meta_model
from schedlang.runtime.training_mode import TrainingMode
from schedlang.runtime.zero_weight_loss import zero_unlabelled_loss

LossAndGradients = dict[str, Tensor | None]  # loss under "", gradients by name


@dataclass(frozen=True)
class Probe:
    """A batch of a prepared case in float64, and the parts that the program makes of it."""

    case: Case
    batch: Batch
    # attributes that a forward changes
    changed: set[str] = field(default_factory=set, compare=False)

    @cached_property
    def shares(self) -> list[list[BatchPart]]:
        """The microbatches of each data-parallel rank."""
        return split_batch(self.batch, self.case.plan.share_weights, self.case.plan.micro)

    @cached_property
    def parts(self) -> list[BatchPart]:
        """All microbatches, rank after rank."""
        return with_means(self._weigh, [part for share in self.shares for part in share])

    @property
    def _weigh(self) -> Any:
        assert self.case.prepared is not None
        count = sum(map(len, self.shares))
        return self.case.weight or weight_of(self.case.prepared.traced, count)

    @cached_property
    def weights(self) -> list[float]:
        """The weight of each part in the mean loss, as `build` decides it."""
        case, parts = self.case, self.parts
        assert case.prepared is not None
        states = torch.get_rng_state(), random.getstate()
        with enter_modes(*proof_modes(case)[0]):
            part_weights = [self._weigh(part.inputs) for part in parts]
        if not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate():
            title = "`weight` draws random numbers"
            notes = (
                "ranks weigh the parts of a batch alone: they would draw apart, and shift the"
                " draws of the model",
            )
            helps = ("return a number that depends on the batch alone: rows, tokens",)
            raise Refusal.of("S621", title, notes=notes, helps=helps)
        if case.weight is not None and not sum(part_weights):
            title = "`weight` gives 0 for every part of the batch"
            helps = ("return a count of what the loss is a mean over: rows, tokens",)
            raise Refusal.of("S621", title, helps=helps)
        return part_weights

    def derive_jointly(self) -> list[LossAndGradients] | None:
        """Return weighted losses and gradients of parts that share sums; None if they share none.

        Each part runs on its own copy in a thread of this process; the threads wait for each other
        at each sum.
        """
        case, parts, total = self.case, self.parts, sum(self.weights)
        assert case.prepared is not None
        shared = case.prepared.traced.statistics
        if shared is None:
            return None
        meeting, errors = ThreadSum(len(parts)), list[BaseException]()
        counts = [len(part.rows) for part in parts]

        def run(index: int) -> LossAndGradients:
            part, share = parts[index], self.weights[index] / total
            try:
                with (
                    original_subject(case, in_thread=True, scale=share) as subject,
                    zero_unlabelled_loss(share),
                    scaled_means(part),
                ):
                    gather_statistics(subject.module, shared.sums, meeting.sum_at(index))
                    for fqn in shared.gathered:
                        gather = gather_in_threads(counts, index, meeting.sum_at(index))
                        module = subject.module.get_submodule(fqn)
                        wrap(module, "gathered", RowGathering(fqn, gather))
                    loss = subject.forward_backward(part.inputs, part.rows)
                    meeting.end(index)
                    return {"": loss, **subject.gradients()}
            except BaseException as error:
                mixed = "through the graph a second time" in str(error)  # another thread's
                errors.append(Refusal(UNEQUAL_SUMS) if mixed else error)
                meeting.barrier.abort()  # otherwise the other threads wait forever
                raise errors[0] from None  # what follows in other threads is no cause

        state_restored = restore_global_state(case.plan.model.model, case.loss)
        with state_restored, ThreadPoolExecutor(len(parts)) as threads:
            return list(threads.map(run, range(len(parts))))

    def first_difference(self, evaluate: bool = False) -> Row | None:
        """Return the first of loss and gradients that differs between weighted parts and whole."""
        if len(self.parts) == 1:
            return None
        with original_subject(self.case, evaluate=evaluate) as subject:
            return self.first_difference_on(subject)

    def first_difference_on(
        self, subject: Sequential, whole: LossAndGradients | None = None
    ) -> Row | None:
        """Return `first_difference` on this subject; `whole` are its loss and gradients, if
        known."""
        if len(self.parts) == 1:
            return None
        parts_args = self.batch, self.parts, self.weights, self.derive_jointly()
        rows = compare_parts(subject, *parts_args, whole=whole)
        self.changed.update(subject.changed)
        return next((row for row in rows if not row.ok), None)


# ---- Loss and gradients of parts and whole.


_LOSS, _GRADIENTS = "loss of parts", "gradients of parts"  # kinds of rows


def compare_parts(
    subject: Sequential,
    batch: Batch,
    parts: Sequence[BatchPart],
    weights: Sequence[float],
    weighed: Sequence[LossAndGradients] | None = None,
    *,
    whole: LossAndGradients | None = None,
    rtol: float = RTOL,
) -> tuple[Row, ...]:
    """Compare loss and gradients of a batch with the weighted sums of those of its parts.

    Buffers are restored. `weighed` are the weighted losses and gradients of parts that were derived
    jointly; `whole` are those of the batch, if known.
    """
    name = f"{len(parts)} parts"
    whole = whole or loss_and_gradients(subject, batch, range(count_rows(batch)))
    if weighed is None:
        weighed = [results for _, results in weighted_parts(subject, parts, weights)]
    sides = [
        Observation(
            {
                Key(name, _LOSS if k == "" else _GRADIENTS, 0, k or "loss"): v
                for k, v in results.items()
            },
            order=subject.order,
        )
        for results in (whole, _add_parts(weighed))
    ]
    sizes = _least_sizes(subject.module, whole)
    return tuple(compare_tensors(sides[0], sides[1], rtol, exact=False, sizes=sizes))


def _least_sizes(module: nn.Module, whole: LossAndGradients) -> dict[str, float]:
    """Return below which size a loss, and its gradients, are roundings of each other.

    Terms of the loss may cancel: rows of a pair that are equal, or advantages that are relative to
    their group, leave roundings of a loss that moves with its parameters, or of gradients.
    """
    norms = [float(p.detach().norm()) for n, p in module.named_parameters() if n in whole]
    parameter, loss = max(norms, default=0.0) or 1.0, whole[""]
    gradient = max((float(g.norm()) for n, g in whole.items() if n and g is not None), default=0.0)
    return {
        _LOSS: gradient * parameter,
        _GRADIENTS: 0.0 if loss is None else float(loss.detach().abs()) / parameter,
    }


def weighted_parts(
    subject: Sequential, parts: Sequence[BatchPart], weights: Sequence[float]
) -> Iterator[tuple[int, LossAndGradients]]:
    """Yield the weighted loss and gradients of each part with a nonzero weight, and its number.

    The loss is weighted before the backward, as in a step: a backward may be nonlinear.
    """
    plain = subject.scale
    try:
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            if weight:
                subject.scale = plain * (weight / sum(weights))
                with scaled_means(part):
                    results = loss_and_gradients(subject, part.inputs, part.rows)
                yield number, results
    finally:
        subject.scale = plain


def _add_parts(shares: Iterable[LossAndGradients]) -> LossAndGradients:
    total: LossAndGradients = {}
    for part_results in shares:
        for key, share in part_results.items():
            added = total.get(key)
            total[key] = share if added is None else added if share is None else added + share
    return total


def loss_and_gradients(
    subject: Sequential, batch: Batch, samples: Iterable[int]
) -> LossAndGradients:
    """Return loss (under "") and gradients of one run; restore buffers."""
    with restored_buffers(subject):
        results: LossAndGradients = {"": subject.forward_backward(batch, tuple(samples)).clone()}
        results |= {n: None if g is None else g.clone() for n, g in subject.gradients().items()}
    return results


# ---- Refusals of models whose parts do not make the whole.


def check_parts(case: Case) -> Case:
    """Return the case; refuse a model whose weighted loss over parts is not that of the whole.

    If the schedule relaxes batch statistics, such a model is compared with itself, run by parts.
    """
    try:
        return _check_parts(case)
    except Exception as error:
        _raise_error(case, error)


def _check_parts(case: Case) -> Case:
    check_across_stages(case)
    # dropped tokens depend on the full batch
    uncapped = replace(case, plan=without_capacity(case.plan))
    probe = Probe(uncapped, case.batches[0])
    difference = probe.first_difference()
    if difference is not None:
        check_batch(uncapped, 0)
    is_relaxed = is_statistics_relaxed(case.plan)
    if difference is None:
        try:
            if len(probe.parts) > 1:
                _check_state(probe)
            check_sums(case)
            return case
        except Refusal:
            if not is_relaxed:
                raise
    if is_relaxed:
        if case.plan.row_gathers:
            raise gathered_parts(case.plan)
        return replace(case, by_parts=True)
    assert difference is not None
    _check_model_alone(probe, difference)
    sample = probe.parts[0].inputs
    check_microbatches(case.plan, sample, case.loss, case.weight is not None)
    check_linear(case, probe.batch, len(probe.parts), difference)
    raise _changed_loss(case, probe, difference)


def _changed_loss(case: Case, probe: Probe, difference: Row) -> Refusal:
    """Return S703: the loss of a batch is not the mean of those of its parts."""
    prepared, parts, mixing = case.prepared, probe.parts, None
    # parts that share sums differ from the whole at their sums
    if prepared is None or prepared.traced.statistics is None:
        mixing = find_mixing_call(case, probe.batch, parts, probe.weights)
    differ_note = (
        f"on the original, split into {len(parts)} parts, {difference.place} differs by"
        f" {difference.error:.1e}"
    )
    mixing_note = () if mixing is None else (f"rows of the batch interact in {mixing.text}",)
    if _is_sum_loss(probe):
        added = "the losses of the parts add up to that of the full batch"
        divide = "divide it by the number of its terms, in `loss(output, batch)`, or by an option"
        return Refusal.of(
            "S703",
            "the loss of this model is a sum over rows, not a mean",
            notes=(differ_note, added, *mixing_note),
            helps=(divide,),
        )
    # no weights of parts make the statistics of a norm those of the batch
    norm = None if prepared is None else find_batch_norm(case.plan.model.model, prepared.traced)
    statistics_note = "statistics over the batch (batch norm, router losses) would differ by rank"
    gather_helps = _gather_helps(case, probe.batch, mixing) if norm is None else ()
    lists = describe_number_lists(probe.batch, count_rows(probe.batch))
    return Refusal.of(
        "S703",
        "splitting the batch changes the loss of this model",
        notes=(differ_note, statistics_note, *mixing_note, *lists),
        helps=(*gather_helps, *HELPS_WEIGHT) if norm is None else HELPS_NORM,
    )


def _gather_helps(case: Case, batch: Batch, mixing: MixingCall | None) -> tuple[str, ...]:
    """Return what `gather_rows` does for a model whose rows mix in a call, if a trial shows it."""
    if case.plan.row_gathers:
        return ("gather rows behind the last module that draws random numbers or mixes rows",)
    modules, axes = _gathered_modules(case, batch, mixing), case.plan.row_axes
    over = axes[0] if len(axes) == 1 else f"({', '.join(axes)})"
    if modules or mixing is None or not mixing.modules:
        row = f"{', '.join(modules)}  gather_rows(over={over})".strip()
        return (f"gather the rows that the loss compares: `{row}`",) if modules else ()
    row = f"features  gather_rows(over={over})"
    one = ", with one microbatch" if case.plan.micro > 1 else ""
    return (
        "let a module of its own, say `features`, return what this line compares of each row,"
        f" also labels, and gather it{one}: `{row}`",
    )


def _gathered_modules(case: Case, batch: Batch, mixing: MixingCall | None) -> tuple[str, ...]:
    """Return the modules whose outputs mix, if gathering their rows makes the parts the whole."""
    plan = case.plan
    if mixing is None or not mixing.modules or plan.micro > 1 or plan.contexts:
        return ()
    gathers = tuple(RowGather(fqn) for fqn in mixing.modules)
    try:
        trial = prepare_case(replace(case, plan=replace(plan, row_gathers=gathers)))
        differs = Probe(trial, batch).first_difference() is not None
    except Exception:  # what the model raises on gathered rows: labels of its own rows, say
        return ()
    return () if differs else mixing.modules


def rows_to_gather(case: Case) -> tuple[str, ...] | None:
    """Return the modules whose gathered rows let the parts of a batch make the whole.

    None where they make it without; () where no gathered rows help.
    """
    ready = randomised_float64(prepare_case(case))
    probe = Probe(ready, ready.batches[0])
    if probe.first_difference() is None:
        return None
    mixing = find_mixing_call(ready, probe.batch, probe.parts, probe.weights)
    return _gathered_modules(ready, probe.batch, mixing)


def _is_sum_loss(probe: Probe) -> bool:
    """Return whether the losses of the parts add up to that of the whole, as no mean does."""
    with original_subject(probe.case) as subject:
        full_loss = loss_and_gradients(subject, probe.batch, range(count_rows(probe.batch)))[""]
        parts = [loss_and_gradients(subject, part.inputs, part.rows)[""] for part in probe.parts]
    assert full_loss is not None
    total = torch.stack([loss for loss in parts if loss is not None]).sum()
    return bool((total - full_loss).abs() <= RTOL * full_loss.abs())


def check_own_parts(case: Case) -> None:
    """Refuse as `check_parts`, with the model's own parameters, and with unequal parts.

    A hinge or a clamp may be flat at randomised parameters; training begins with the model's own. A
    loss that divides by its own sum of a mask splits correctly if all parts have equal sums.
    """
    if is_statistics_relaxed(case.plan) or case.plan.shares * case.plan.micro == 1:
        return
    own_case = own_float64(replace(case, plan=without_capacity(case.plan)))
    parts = [part.rows for part in Probe(own_case, own_case.batches[0]).parts]
    for batch in (own_case.batches[0], repeat_first_rows(own_case.batches[0], parts)):
        if batch is not None and Probe(own_case, batch).first_difference() is not None:
            check_parts(replace(own_case, batches=(batch,)))


MUCH = 1e-3  # of the gap in our runs, which the model alone must show


def _check_model_alone(probe: Probe, row: Row) -> None:
    """Raise an OwnError if the model alone does not show what our runs of it show."""
    gap = model_gap(probe)
    # a model in a low dtype shows its roundings; a much larger gap is our mistake
    if gap <= max(RTOL, MUCH * row.error) and gap != UNKNOWN:
        name = type(probe.case.plan.model.model).__name__
        raise OwnError(
            f"the parts of a batch give another {row.place} than the full batch",
            f"{row.place} differs by {row.error:.1e}, and by {gap:.1e} with the model alone",
            f"the model, `{name}`, in {len(probe.parts)} parts",
        )


def find_batch_norm(model: nn.Module, traced: Traced) -> tuple[str, str] | None:
    """Return the name and class of the first module with statistics over rows in training."""
    bare_model = meta_model(model, {})
    TrainingMode(bare_model).train()
    for fqn, submodule in bare_model.named_modules():
        by_rows = isinstance(submodule, _BatchNorm) and not isinstance(submodule, nn.SyncBatchNorm)
        if by_rows and submodule.training and fqn in traced.call_counts:
            return fqn, type(submodule).__name__
    return None


def _check_batch_norms(plan: Plan, ready: Prepared) -> None:
    """Refuse (S703) a model with a batch norm over the rows of a part, without running it."""
    norm = None if is_statistics_relaxed(plan) else find_batch_norm(plan.model.model, ready.traced)
    if norm is not None:
        raise Refusal.of(
            "S703",
            "splitting the batch changes the loss of this model",
            notes=("`{}`, a `{}`, takes statistics over the rows of a part".format(*norm),),
            helps=HELPS_NORM,
        )


def _check_loss_sums(
    plan: Plan, batch: Mapping[str, Any], ready: Prepared, loss: Any, weight: Any
) -> None:
    """Refuse (S668, S703) a loss that its sums show to be no mean over rows; warn (W704) of others.

    For a model that is not run: what it sums over rows was recorded on the meta device.
    """
    if plan.shares * plan.micro == 1 or is_statistics_relaxed(plan):
        return
    if weight is None:
        check_microbatches(plan, batch, loss, False)
    sums = known_sums(plan, batch, loss, ready.traced.equal_units)
    for found in sums.reductions if sums is not None else ():
        note = f"it takes a {found.name} over the rows of a part, at {found.line}"
        if found.certain:
            title = "splitting the batch changes the loss of this model"
            notes = (f"{note}, and nothing divides it by their number",)
            helps = ("return a mean over rows, or over what counts in them",)
            raise Refusal.of("S703", title, notes=notes, helps=helps)
        if world.rank() == 0 and weight is None:
            _warn("the loss may be no mean over the rows of the batch", note)
            return


def _warn_of_pairs(plan: Plan, ready: Prepared) -> None:
    """Warn (W704), on the first rank, of a loss that seems to compare rows of the batch.

    Shapes alone do not show it: attention over the tokens of all rows may mask other rows.
    """
    line = ready.traced.paired_rows
    if not line or plan.row_gathers or world.rank() != 0:
        return
    _warn(
        "the loss may compare rows of the batch, and each rank has a part of them",
        f"a tensor of rows by rows, at {line}",
        "or gather the rows that are compared, by `gather_rows(over=...)` at their module",
    )


def _warn(title: str, note: str, *helps: str) -> None:
    """Warn (W704) of what a loss may be."""
    verify = "verify a smaller copy: `schedlang verify FILE --shrink`"
    notes = (note, "the model is too large to be tried here")
    warning = Diagnostic("W704", title, notes=notes, helps=(verify, *helps), level="warning")
    warnings.warn(warning.render(DEFAULT_COLUMNS), stacklevel=2)


def _check_state(probe: Probe) -> None:
    """Refuse (S708) a model whose parts leave other buffers or attributes than the whole."""
    assert probe.case.prepared is not None
    split = buffer_replicas(probe.case.prepared.staged)
    with original_subject(probe.case) as subject:
        runs = [part_list for parts in probe.shares for part_list in split.split_by_replica(parts)]
        check_buffers(subject, probe.batch, runs)
        if probe.changed:
            shared = probe.case.prepared.traced.statistics is not None
            check_attributes(subject, probe.batch, probe.shares, probe.changed, shared)


# ---- Checks before ranks train.


CHEAP_WORK = 10**9  # parameters times batch elements: about one second of one core


def prepare_checked(case: Case) -> Case:
    """Prepare a case, and refuse whatever `verify` refuses before ranks start.

    A model on the meta device has no loss to check.
    """
    ready = prepare_case(case)
    if not _on_meta(ready.plan):
        check_parts(randomised_float64(ready))
        check_own_parts(ready)
    return ready


def _raise_error(case: Case, error: Exception) -> NoReturn:
    """Raise an error of a check; S604 if the original raises it on a part of the batch alone."""
    known = isinstance(error, OwnError | Refusal) or not _original_runs(case)
    refusal = error if known else part_error(Probe(case, case.batches[0]), error)
    if refusal is not error:
        raise refusal from error
    raise error


def check_if_cheap(
    plan: Plan, batch: Mapping[str, Any], ready: Prepared, *, loss: Any = None, weight: Any = None
) -> None:
    """Refuse as `verify` does if parts do not make the whole (S703, S708), if cheap to find.

    For `build`, on all ranks alike. The check runs the model on the full batch, which for a large
    model takes as long as steps do, and memory that ranks may not have. A large model is only
    searched for batch norms, and its loss function is tried alone; `verify` checks the rest.
    """
    numbers = max((t.numel() for t in named_tensors(batch).values()), default=0)
    size = sum(param.numel for param in plan.model.unique_parameters.values())
    has_parts = plan.shares * plan.micro > 1 or ready.staged.axis is not None
    if not has_parts or ready.traced.missing_loss is not None:
        return
    devices = {tensor.device for tensor in plan.model.model.parameters()}
    if size * numbers > CHEAP_WORK or _on_meta(plan) or not all(map(has_float64, devices)):
        _check_batch_norms(plan, ready)
        check_loss_alone(plan, batch, ready, loss, weight)
        _check_loss_sums(plan, batch, ready, loss, weight)
        _warn_of_pairs(plan, ready)
        return
    case = Case(plan, (dict(batch),), loss, weight, dtype="none", prepared=ready)
    try:
        with restore_global_state(plan.model.model, loss):
            check_parts(randomised_float64(case))
            check_own_parts(case)
    except Refusal as refusal:
        # the first two do not concern parts; the last is about proofs alone
        if refusal.diagnostic.code in ("S707", "S710", "S717"):
            return
        raise
    except Exception as error:
        # a model that cannot be copied, or run in float64, may still train; an error that the
        # original alone does not raise comes from this check, or from a part of the batch
        if isinstance(error, OwnError) or _original_runs(case):
            _raise_error(case, error)


def _original_runs(case: Case) -> bool:
    """Return whether the original runs in a proof's setting, on the full batch."""
    try:
        wider = randomised_float64(case)
        with original_subject(wider) as subject:
            loss_and_gradients(subject, wider.batches[0], range(count_rows(wider.batches[0])))
    except Exception:  # any error means no
        return False
    return True


def _on_meta(plan: Plan) -> bool:
    return any(tensor.is_meta for tensor in plan.model.model.parameters())
