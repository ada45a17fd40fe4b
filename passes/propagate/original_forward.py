"""Record one forward of the original model on the meta device: calls, labels, draws.

Also the weight of a part of a batch in the mean loss of the full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, quote_names
from schedlang.diagnostics.user_errors import refusal_of
from schedlang.ir.plan import Plan
from schedlang.passes.propagate.batch_refusals import HELP_RELAX, batch_refusal, is_about_values
from schedlang.passes.propagate.equal_units import MIN_EQUAL, units_to_record
from schedlang.passes.propagate.loss_sums import record_many_rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.runtime.global_state import WrittenAttributes
    from schedlang.runtime.propagation.dry_run import ShardedLeaf
    from schedlang.runtime.propagation.label_flow import LabelRule, LossCall
    from schedlang.runtime.propagation.trace import Call, ModuleStack, RecordedForward

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Original:
    """The results of one forward of the original.

    labels                     how losses read their labels
    label_counts               number of counted labels, of each mean of cross-entropies whose
                               labels are known
    loss_calls                 each call of a loss -> the index in `labels` of its mean, or None
    unread_keys                keys of the batch that neither the user's loss nor the forward takes
    is_random                  whether an operator draws random numbers
    draws_on_host              whether Python or numpy draws random numbers
    mask_shapes                (module, turn) of each random mask -> its full shape; (): unknown
    unbatched_masks            (module, turn) of each mask -> it has no dim of samples; empty where
                               all have one
    unequal_draws              draws that ranks cannot make equal -> module and line of the model
    reached_parameters         parameters that the loss depends on, for all values
    has_reentrant_checkpoints  whether the model has reentrant checkpoints, whose backward runs
                               another backward
    no_grad_modules            modules that are called without a graph, in such a checkpoint or by a
                               teacher -> the `autograd.Function` in whose forward they are called,
                               if any
    outside_calls              (module, enclosing module): called while the enclosing module does
                               not run
    overwrites modules that write into their input tensors
    outside_parameters       (parameter, enclosing module): read or replaced while that module does
                             not run
    rewritten_parameters     parameters that the forward writes into: moving averages, clipped
                             weights
    differentiating_modules  modules whose own forward takes a gradient -> the line of the model
                             that does
    takes_gradient           whether the forward, or the loss, takes a gradient itself
    missing_loss             the message where there is no loss to train with
    reads_values             whether the model read values: other values may reach fewer parameters
    uses_batch_conditions    whether conditions of the model are decided by the batch; else all are
                             false
    varying_modules          modules whose number or order of calls depends on values; also uncalled
                             modules then
    call_counts              modules in the order of their first call, and how often each is called
    choosing_modules         modules that choose by values (a top-k) -> the call that does
    equal_units              units that do the same with their arguments and parameters -> the
                             number of their kind
    """

    labels: tuple[LabelRule, ...] = ()
    label_counts: tuple[float, ...] = ()
    loss_calls: Mapping[LossCall, int | None] = field(default_factory=dict)
    unread_keys: tuple[str, ...] = ()
    is_random: bool = False
    draws_on_host: bool = False
    mask_shapes: Mapping[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    unbatched_masks: Mapping[tuple[str, int], bool] = field(default_factory=dict)
    unequal_draws: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    reached_parameters: frozenset[str] = frozenset()
    has_reentrant_checkpoints: bool = False
    no_grad_modules: Mapping[str, str] = field(default_factory=dict)
    outside_calls: frozenset[tuple[str, str]] = frozenset()
    overwriting_modules: frozenset[str] = frozenset()
    outside_parameters: frozenset[tuple[str, str]] = frozenset()
    rewritten_parameters: frozenset[str] = frozenset()
    differentiating_modules: Mapping[str, str] = field(default_factory=dict)
    takes_gradient: bool = False
    missing_loss: Diagnostic | None = None
    reads_values: bool = False
    uses_batch_conditions: bool = False
    varying_modules: frozenset[str] = frozenset()
    call_counts: Mapping[str, int] = field(default_factory=dict)
    choosing_modules: Mapping[str, str] = field(default_factory=dict)
    equal_units: Mapping[str, int] = field(default_factory=dict)


class Recording(NamedTuple):
    """The calls of the original by (module, turn), and the results of the forward."""

    frames: Mapping[tuple[str, int], Sequence[Call]]
    original: Original


def record_original(
    plan: Plan,
    batch: Mapping[str, Any],
    loss: Loss | None,
    leaves: Mapping[str, ShardedLeaf],
    draws: bool = False,
    truths: bool = False,
) -> Recording:
    """Run the unchanged model on the meta device, without values, and record its calls.

    `draws`: random draws are recorded, too; a model that turns out to draw is run again with it.
    `truths`: conditions on tensors get the truth that the batch decides, for a model that fails
    where they are false (an assert). Raises Refusal where the model or the user's loss fails.
    """
    from schedlang.runtime.batch import accepted_inputs, is_loss, run_forward
    from schedlang.runtime.global_state import WrittenAttributes, restore_global_state
    from schedlang.runtime.propagation.trace import RecordedForward, Trace, find_reached_parameters
    from schedlang.runtime.rng.logical_dropout import DrawObserver
    from schedlang.runtime.tracing.meta_runs import without_values

    model, stack = _watched_copy(plan, leaves, accesses=True)
    facts, own, failure = plan.model, plan.model.base.model, None
    draws |= any(s.is_a("Dropout") and model.get_submodule(s.fqn).p for s in facts.sites.values())
    draws_seen, read_keys = DrawObserver(lambda: stack.frames[-1][0]) if draws else None, set[str]()
    watched = None if loss is None else (loss, WrittenAttributes(model, (facts.model, own)))
    loss_call = watched and partial(_call_loss, read_keys, *watched)
    repeats = any(len(site.children) >= MIN_EQUAL for site in facts.sites.values())
    units = units_to_record(plan, model) if repeats else None
    with restore_global_state(facts.model, loss) as drew, without_values(batch) as (inputs, values):
        recorded = RecordedForward(stack, inputs, values, draws)
        values.drew = None if draws_seen is None else draws_seen.observe_operator
        with draws_seen or nullcontext(), Trace(stack, recorded, asked=truths) as trace:
            try:
                with nullcontext() if units is None else units.recording(values, trace):
                    output, value = run_forward(model, inputs, loss_call)
            except Refusal:
                raise
            except Exception as error:
                failure = error
    if failure is not None:
        if trace.answered:
            return record_original(plan, batch, loss, leaves, draws, truths=True)
        raise batch_refusal(failure, facts.model, batch, values.constants.listed) from failure
    if values.random and not draws:
        return record_original(plan, batch, loss, leaves, True, truths)
    loss_value = value if loss is None or is_loss(value) else None
    trained, reentrant, foreign = find_reached_parameters(model, loss_value, own, loss)
    no_loss = loss_value is None or foreign or not loss_value.requires_grad
    original = Original(
        labels=tuple(recorded.labels.rules),
        label_counts=tuple(recorded.labels.counted),
        loss_calls=recorded.labels.calls,
        unread_keys=tuple(sorted(batch.keys() - accepted_inputs(facts.model, batch) - read_keys)),
        is_random=draws_seen is not None and draws_seen.random,
        draws_on_host=bool(drew),
        mask_shapes=recorded.drawn,
        unbatched_masks=_unbatched(plan, batch, loss, recorded) if recorded.sourceless else {},
        unequal_draws={} if draws_seen is None else draws_seen.apart,
        reached_parameters=trained,
        has_reentrant_checkpoints=reentrant,
        outside_calls=frozenset(stack.outside),
        overwriting_modules=frozenset(stack.overwrites),
        missing_loss=_missing_loss(model, batch, loss, output, value, foreign) if no_loss else None,
        takes_gradient=recorded.takes_gradient,
        reads_values=values.read_unknown,
        uses_batch_conditions=truths,
        call_counts=stack.turns,
        choosing_modules=recorded.choices,
        equal_units=units.equal_units((output, value), recorded.frames, stack) if units else {},
        **({} if stack.access is None else stack.access.as_arguments()),
    )
    if values.read_unknown or values.read_known or trace.answered:
        original = _with_other_values(plan, batch, loss, leaves, original)
    return Recording(recorded.frames, original)


def _watched_copy(
    plan: Plan, leaves: Mapping[str, ShardedLeaf], accesses: bool = False
) -> tuple[nn.Module, ModuleStack]:
    """Return a copy of the model on the meta device, and the stack that records its calls.

    `accesses`: accesses to parameters are recorded, too, if the plan splits batch, model or state.
    """
    from schedlang.runtime.propagation.parameter_access import ParameterAccess
    from schedlang.runtime.propagation.stand_ins import put_stand_ins
    from schedlang.runtime.propagation.trace import ModuleStack
    from schedlang.runtime.tracing.meta_runs import meta_model

    parts = plan.data_axes or plan.cuts or plan.order or plan.stores
    stack = ModuleStack(access=ParameterAccess() if accesses and parts else None)
    model = meta_model(plan.model.model, {})
    model.train()
    if plan.computes:
        put_stand_ins(model, {fqn: kind for fqn, kind in plan.computes.items() if fqn in leaves})
    stack.watch(model, {fqn for fqn, leaf in leaves.items() if leaf.kind})
    return model, stack


def _with_other_values(
    plan: Plan,
    batch: Mapping[str, Any],
    loss: Loss | None,
    leaves: Mapping[str, ShardedLeaf],
    original: Original,
) -> Original:
    """Add the modules whose calls differ with other values, where ranks shard state.

    Each rank has its own rows, so values differ between ranks. A model that does not run with
    other values counts as one that reads values.
    """
    if not any(row.stage > 0 for row in plan.all_replicas):
        return original
    from torch.random import fork_rng

    from schedlang.runtime.batch import run_forward
    from schedlang.runtime.global_state import restore_global_state
    from schedlang.runtime.propagation.imitated_units import EqualTurns
    from schedlang.runtime.propagation.trace import Trace
    from schedlang.runtime.tracing.equal_units import EqualUnits
    from schedlang.runtime.tracing.meta_runs import without_values

    model, stack = _watched_copy(plan, leaves)
    trace = Trace(stack, other=True)
    units = EqualUnits(model, original.equal_units, observer=EqualTurns(stack))
    try:
        state_restored = restore_global_state(plan.model.model, loss)
        with (
            state_restored,
            fork_rng(devices=[]),
            without_values(batch, True) as (inputs, _),
            trace,
            units.using(),
        ):
            run_forward(model, inputs, loss)
    except Exception:  # an impossible shape, an index out of range
        if not (units.imitated or units.different):
            return _with_varying(replace(original, reads_values=True), plan, set(), stack.outside)
        units.different = True
    if units.different:  # all units have to run
        other = _with_other_values(plan, batch, loss, leaves, replace(original, equal_units={}))
        return replace(other, equal_units=original.equal_units)
    counts, other_counts = original.call_counts, stack.turns
    varying = {fqn for fqn in (*counts, *other_counts) if counts.get(fqn) != other_counts.get(fqn)}
    if [fqn for fqn in counts if fqn not in varying] != [
        f for f in other_counts if f not in varying
    ]:
        varying = {*counts, *other_counts}
    return _with_varying(original, plan, varying, stack.outside)


def _with_varying(
    original: Original, plan: Plan, varying: set[str], outside: set[tuple[str, str]]
) -> Original:
    """Add modules whose calls depend on values, and those that no forward without values calls.

    Values may choose these, too: with all numbers zero no expert has rows.
    """
    uncalled = {fqn for fqn in plan.model.sites if fqn not in original.call_counts}
    owners = {name.rpartition(".")[0] for name in plan.model.unique_parameters}
    if not varying and uncalled.isdisjoint(owners):
        return original
    names, pairs = frozenset(varying | uncalled), original.outside_calls | outside
    return replace(original, reads_values=True, varying_modules=names, outside_calls=pairs)


def _missing_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Loss | None,
    output: Any,
    value: Any,
    foreign: Mapping[str, bool],
) -> Diagnostic | None:
    """Return the message about a loss that is missing or that trains nothing, or None.

    Without labels a batch can still be evaluated. `foreign` are parameters with which the loss is
    computed and that no program trains; the value says whether they belong to the model.
    """
    from torch import is_grad_enabled

    from schedlang.runtime.batch import bad_loss_diagnostic, is_loss, no_loss_diagnostic

    if not is_loss(value):
        return (
            no_loss_diagnostic(model, output, batch)
            if loss is None
            else bad_loss_diagnostic(value, model, batch)
        )
    if foreign:
        own_text = "the model's own: what is trained is a copy of it"
        loss_text = "of the loss, and what is trained are the model's"
        return Diagnostic(
            "S615",
            f"the loss is computed with {quote_names(foreign)}, which no program trains",
            notes=(f"they are parameters {own_text if all(foreign.values()) else loss_text}",),
            helps=("let the model's forward compute this part, and return it with the output",),
        )
    if not is_grad_enabled() or not any(p.requires_grad for p in model.parameters()):
        return None
    return Diagnostic(
        "S615",
        "the loss has no gradient",
        notes=("a backward from it reaches no parameter",),
        helps=("compute it from the output, nothing of which is detached or made by `no_grad`",),
    )


def _unbatched(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None, recorded: RecordedForward
) -> dict[tuple[str, int], bool]:
    """Return for each draw whether it has no dim of samples; empty where all have one.

    An example is dropout on a table of relative positions: its shape is the same for all batches.
    Only draws that do not depend on a tensor of the batch are checked, since their shape may have
    been computed from the number of rows.
    """
    many = record_many_rows(plan, batch, loss)
    if many is None:
        return {}
    equal = {
        draw for draw in recorded.sourceless if many.mask_shapes.get(draw) == recorded.drawn[draw]
    }
    return {draw: draw in equal for draw in recorded.drawn} if equal else {}


class ObservedBatch(dict[str, Any]):
    """A batch that records which keys are read; all other methods read by the two methods below."""

    def __init__(self, batch: Mapping[str, Any], read_keys: set[str]) -> None:
        super().__init__(batch)
        self.read_keys = read_keys

    def __getitem__(self, key: str) -> Any:
        self.read_keys.add(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        self.read_keys.update(super().keys())
        return super().__iter__()

    get, pop, __contains__ = Mapping.get, MutableMapping.pop, Mapping.__contains__  # type: ignore[assignment]
    keys, values, items = Mapping.keys, Mapping.values, Mapping.items  # type: ignore[assignment]


def _call_loss(
    read: set[str], loss: Loss, written: WrittenAttributes, output: Any, batch: Mapping[str, Any]
) -> Any:
    """Call the user's loss and add the keys that it reads to `read`; its errors become S865."""
    with written.unread():
        try:
            return loss(output, ObservedBatch(batch, read))
        except Exception as error:
            if is_about_values(error):
                raise
            raise refusal_of(error, "loss", loss) from error


Weight = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class LabelWeight:
    """The weight of a part by its counted labels, or by its rows for evaluation without labels."""

    rule: LabelRule

    def __call__(self, batch: Mapping[str, Any]) -> float:
        """Return the weight of a part."""
        return self.rule.count(batch)

    def counted(self, batch: Mapping[str, Any]) -> Tensor | float:
        """Return the weight of a part as a tensor on the device of the labels."""
        return self.rule.count_on_device(batch)


HELP_ROWS = "define `weight(batch)` in the model file: its rows, if all have equally many labels"


def weight_of(traced: Original, parts: int) -> Weight:
    """Return the weight function of parts of a batch: by counted labels, else by rows.

    Several means with labels of their own are weighted one by one, and parts by rows. Refuses
    (S621) several parts where such means cannot be, and means that class weights divide.
    """
    from schedlang.runtime.batch import row_count

    means: Weight | None = getattr(traced, "label_means", None)
    if parts > 1 and means is not None:
        return means
    if len(traced.labels) == 1:
        if traced.labels[0].class_weights and parts > 1:
            raise _weighted_classes()
        if traced.labels[0].rewritten and parts > 1:
            raise _rewritten_labels(traced.labels[0].source)
        return LabelWeight(traced.labels[0])
    if len(traced.labels) > 1 and parts > 1:
        raise several_losses(traced)
    return lambda batch: float(row_count(batch))


def _weighted_classes() -> Refusal:
    """Return S621: a mean divides by class weights, which no weight of a part is known for."""
    return Refusal.of(
        "S621",
        "the mean of the loss divides by the class weights of its labels",
        notes=("parts of a batch are weighted by how many labels they have",),
        helps=(
            "define `weight(batch)` in the model file: the sum of the class weights of its labels",
            HELP_RELAX.replace("or", "or give a weight, and also", 1),
        ),
    )


def _rewritten_labels(source: str) -> Refusal:
    """Return S621: labels count that no weight of a part knows."""
    return Refusal.of(
        "S621",
        f"the forward changes which labels count, of those that it makes from `{source}`",
        notes=("parts of a batch are weighted by how many labels they have",),
        helps=(
            "define `weight(batch)` in the model file: how many labels of the batch count",
            "or change them in the batch, before the model gets it",
            HELP_RELAX.replace("or", "or give a weight, and also", 1),
        ),
    )


def several_losses(traced: Original) -> Refusal:
    """Return S621: a model has several losses, and its loss is not a sum of their means."""
    return Refusal.of(
        "S621",
        f"the model has {len(traced.labels)} losses, each with its own labels",
        notes=(
            "a part of the batch would need a different weight in each",
            "each is weighted by itself only if the loss is a weighted sum of them, if labels come"
            " from the batch, and if sequences are not split",
        ),
        helps=(
            HELP_ROWS,
            "or write each mean in the forward as a sum divided by its count, and use one"
            " microbatch: ranks sum both",
            HELP_RELAX.replace("or", "or give a weight, and also", 1),
        ),
    )
