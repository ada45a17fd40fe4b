"""Prepare a plan with a batch before there are ranks: trace, stages, holdings, checks.

`prepare` is the door; its result is the same on all ranks. It refuses plans that cannot run, and
modules whose recomputation would compute something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.diagnostics.user_errors import refusal_of
from schedlang.ir.features import Settled
from schedlang.ir.module_attributes import module_kind
from schedlang.ir.plan import Action, Plan, place_at_row
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.cast_trial import check_casts
from schedlang.passes.analyze.compressed_activations import (
    BitTable,
    check_compressed,
    find_bit_table,
    find_saved_splits,
)
from schedlang.passes.analyze.expert_capacity import check_routing
from schedlang.passes.analyze.holdings import holdings_of
from schedlang.passes.analyze.input_checks import check_batch_keys, check_batch_rows
from schedlang.passes.analyze.residence import check_peers
from schedlang.passes.analyze.staleness import check_stale
from schedlang.passes.partition.recomputed_chains import Chains, CostSubject, chains_of
from schedlang.passes.partition.staging import Staged, stages_of
from schedlang.passes.propagate.loss_sums import with_statistics
from schedlang.passes.propagate.original_forward import Weight
from schedlang.passes.propagate.propagate import Traced, backward_root, propagate
from schedlang.passes.propagate.sequence_trials import slicing_of, tokens_of
from schedlang.pipeline.timeline.table import Kind

if TYPE_CHECKING:
    from schedlang.runtime.activation_memory.repeat_checks import Difference
    from schedlang.runtime.checkpointing.holdings import Holding, TransferPlans
    from schedlang.runtime.context_parallel.local_tokens import TokenSplit
    from schedlang.runtime.sequence_pipelining.slices import Slicing


_SHOWN = 60  # characters


def check_repeats(
    plan: Plan,
    rows: Sequence[Action],
    sample: Mapping[str, Any],
    loss: Loss | None,
    equal: Mapping[str, object] | None = None,
) -> None:
    """Refuse (S843) a row that recomputes a module whose second forward differs from the first.

    This is so for random draws from other generators than torch's, and for a module that is called
    with other tensors in place of its weights, since a recomputation would use its own weights. One
    module of each kind is run twice on the meta device; the result is cached in the model.
    `equal`: unit of the model -> its kind; two units of each kind are called.
    """
    from schedlang.runtime.activation_memory.repeat_checks import RepeatCheck
    from schedlang.runtime.tracing.equal_units import EqualUnits
    from schedlang.runtime.tracing.meta_runs import meta_model, without_values

    kinds = {site: module_kind(plan.model, site) for action in rows for site in action.sites}
    key = ("repeats", tuple(sorted(kinds)))
    if key in plan.model.cache:
        return
    model: Any = meta_model(plan.model.model, {})
    model.train()
    replaced: list[str] = []
    for site in kinds:
        model.get_submodule(site).register_forward_pre_hook(partial(_note_replaced, replaced, site))
    units = EqualUnits(model, equal or {})

    def forward(inputs: Mapping[str, Any]) -> None:
        with units.using():
            backward_root(model, inputs, loss)

    try:
        with without_values(sample) as (inputs, _):
            differences = RepeatCheck(model, kinds).run(lambda: forward(inputs))
    except Exception:
        if not (units.imitated or units.different):
            raise
        units.different = True
    if units.different:
        return check_repeats(plan, rows, sample, loss)
    if replaced:
        raise Refusal(_other_weights(replaced[0], _label(rows, replaced[0])))
    if differences:
        raise Refusal(_not_repeatable(plan, differences[0], _label(rows, differences[0].module)))
    plan.model.cache[key] = True


TRIES = 16  # forwards with other draws


def _draws_by_rows(plan: Plan, sample: Mapping[str, Any]) -> bool:
    """Return whether a model draws more numbers by Python or numpy for more rows.

    Raises Refusal (S614) if it decides by draws which modules it calls: parameters of modules that
    were not called when it was recorded would count as unused.
    """
    from schedlang.runtime.batch import row_count, run_model
    from schedlang.runtime.global_state import (
        host_generator_states,
        restore_global_state,
        seed_host_generators,
    )
    from schedlang.runtime.propagation.trace import repeat_rows
    from schedlang.runtime.tracing.meta_runs import meta_model, without_values

    model: Any = meta_model(plan.model.model, {})
    model.train()
    called: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(_note_call, called, name))
    calls = set()
    with restore_global_state(plan.model.model):
        for number in range(TRIES):
            called.clear()
            seed_host_generators(number)
            with without_values(sample) as (inputs, _):
                run_model(model, inputs)
            calls.add(tuple(called))
        drawn = host_generator_states()
        seed_host_generators(TRIES - 1)
        try:
            with without_values(repeat_rows(sample, row_count(sample) + 1)) as (inputs, _):
                run_model(model, inputs)
        except Exception:  # it accepts no other number of rows
            drawn = {}
        by_rows = drawn != host_generator_states()
    if len(calls) > 1:
        fewest, most = sorted(calls, key=len)[:: len(calls) - 1]
        name = next(iter(Counter(most) - Counter(fewest)), most[0])
        raise Refusal.of(
            "S614",
            f"`{name}` is called or not, as Python's `random` or numpy draws",
            notes=("a plan is made for one sequence of calls",),
            helps=("draw with torch: `torch.rand(()) < 0.1` instead of `random.random() < 0.1`",),
        )
    return by_rows


def _note_call(called: list[str], name: str, *_: object) -> None:
    called.append(name)


def _label(rows: Sequence[Action], site: str) -> Label:
    row = next(action for action in rows if site in action.sites)
    return Label(row.span) if row.span else Label()


def _note_replaced(sites: list[str], site: str, module: Any, *_: object) -> None:
    """Note a module that is called with other tensors in place of its parameters."""
    from torch.nn import Parameter

    values = (value for submodule in module.modules() for value in submodule._parameters.values())
    if any(value is not None and not isinstance(value, Parameter) for value in values):
        sites.append(site)


def _other_weights(name: str, label: Label) -> Diagnostic:
    return Diagnostic(
        "S843",
        f"recomputing `{name}` would use its own weights, not the weights of this call",
        label,
        notes=("`torch.func.functional_call` replaces the weights for this call only",),
        helps=("checkpoint a module around the one that makes these weights",),
    )


def _not_repeatable(plan: Plan, change: Difference, label: Label) -> Diagnostic:
    runs = [
        f"with {text[:_SHOWN]}" if text else "not at all, or as a different call"
        for text in (change.first, change.second)
    ]
    name = plan.model.sites[change.module].class_name
    cause = f"it draws from {change.drawn}" if change.drawn else f"`{change.function}` differs"
    call_notes = (f"`{name}` calls it {runs[0]}, then {runs[1]}", f"at {change.place}")
    return Diagnostic(
        "S843",
        f"recomputing `{change.module}` gives another result: {cause}",
        label,
        notes=(
            *(() if change.drawn else call_notes),
            "recomputation repeats the random numbers of torch's generators, and no others",
        ),
        helps=(
            "draw with torch: `torch.rand(())` instead of `random.random()`",
            "or checkpoint other modules",
        ),
    )


def check_settled(plan: Plan, traced: Traced) -> None:
    """Call `settled` of each row that has it, for each of its sites; place refusals at the row."""
    for action, row in plan.rows_with(Settled):
        for target in plan.targets(action):
            try:
                row.settled(target, plan, traced)
            except Refusal as refusal:
                raise refusal.at(action.span) from refusal


Loss = Callable[..., Any]


@dataclass(frozen=True)
class Prepared:
    """The results of `prepare`: equal on all ranks and for all dtypes, and can be sent to ranks."""

    traced: Traced
    staged: Staged
    holdings: Mapping[str, Holding]
    slicing: Slicing | None = None  # where the pipeline splits sequences into slices
    tokens: TokenSplit | None = None  # where ranks split sequences
    chains: Chains = field(default_factory=dict)  # of rows with a memory limit
    bits: BitTable = field(default_factory=dict)  # of saved tensors, of rows with a budget
    draws: bool = False  # the model draws random numbers, by torch, Python or numpy
    draws_by_rows: bool = False  # more numbers by Python or numpy for more rows
    # outputs of units of earlier stages, where these are known before there are ranks
    outputs: Mapping[Any, Any] = field(default_factory=dict, repr=False)
    # cached ways to gather full tensors: the programs of a proof, one per optimizer, share them
    gather_routes: TransferPlans = field(default_factory=dict, repr=False, compare=False)


def prepare(
    plan: Plan,
    sample: Mapping[str, Any],
    loss: Loss | None = None,
    weight: Weight | None = None,
    bits: BitTable | None = None,
    *,
    trains: bool = True,
) -> Prepared:
    """Trace a plan with one microbatch, split it into stages, and analyse both.

    `trains`: a loss is needed; a program that only evaluates needs no loss.
    `bits`: a known table, of this plan or of another plan of the model; else it is measured.
    Raises Refusal where the plan cannot run.
    """
    from schedlang.runtime.global_state import restore_global_state

    assert not plan.completions, "rows are completed before a plan is prepared"
    with restore_global_state(plan.model.model, loss):
        check_axes(plan)
        parts = plan.shares * plan.micro
        if plan.kind_options:
            check_routing(plan)
        if weight is not None:
            _check_weight(weight, sample)
        if parts > 1:
            check_batch_rows(plan, sample)
        traced = _traced(plan, sample, loss)
        if traced.unequal_draws and plan.mesh.world > 1:
            raise _unequal_draws(traced)
        by_rows = traced.draws_on_host and plan.mesh.world > 1 and _draws_by_rows(plan, sample)
        if traced.missing_loss is not None:
            if trains:  # without a loss, any key may be a key that a loss would read
                raise Refusal(traced.missing_loss)
        elif any(getattr(module, "sparse", False) is True for module in plan.model.model.modules()):
            _check_dense(plan)
        if traced.missing_loss is None and traced.unread_keys:
            check_batch_keys(plan, sample, traced, loss, weight)
        for name, parameter in plan.model.base.model.named_parameters():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise _hooked(name)
        check_settled(plan, traced)
        if plan.casts:
            check_casts(plan, sample, loss)
        if parts > 1 or plan.contexts:
            traced = with_statistics(plan, traced, sample, loss, weight is not None)
        staged = stages_of(plan, traced, sample, loss)
        slicing, tokens = None, None
        chains: Chains = {}
        if plan.order is not None:
            check_stale(plan, staged)
            _check_reentrant(plan, traced, staged)
            slicing = slicing_of(plan, traced, staged.timeline.slices, sample, loss, weight)
        if plan.stores:
            check_peers(plan, staged)
        if plan.activation_codings:
            check_compressed(plan, traced, staged, slicing)
        if plan.contexts:
            tokens = tokens_of(plan, traced, sample, loss, weight)
        counting = CostSubject(plan, traced, staged, sample, loss, tokens)
        recompute_rows = plan.rows_changing(Facet.RECOMPUTE)
        if recompute_rows:
            chains = chains_of(counting)
        if plan.activation_codings:
            traced = replace(traced, saved_splits=find_saved_splits(counting, chains))
        if recompute_rows:
            check_repeats(plan, recompute_rows, sample, loss, traced.equal_units)
        if bits is None:
            bits = find_bit_table(plan, sample, loss, chains) if plan.activation_codings else {}
        held, drawn = holdings_of(plan, staged), traced.is_random or traced.draws_on_host
        return Prepared(traced, staged, held, slicing, tokens, chains, bits, drawn, by_rows)


def _hooked(name: str) -> Refusal:
    """Return S867: hooks on the gradient of a model's parameter do not exist on its copies."""
    return Refusal.of(
        "S867",
        f"`{name}` has a hook, and its copies do not have this hook",
        notes=("a program trains copies or shards of parameters, with parts of the batch",),
        helps=(
            "let the forward do it: `weight * mask + (weight * (1 - mask)).detach()`",
            "or remove the hook before `build`: `handle.remove()`",
        ),
    )


def _traced(plan: Plan, sample: Mapping[str, Any], loss: Loss | None) -> Traced:
    """Trace a copy of the model; refuse (S867) if that writes into the model itself."""
    versions = _buffer_versions(plan)
    traced = propagate(plan, sample, loss)
    for name, version in _buffer_versions(plan).items():
        if versions[name] != version:
            raise _write_refusal(name)
    return traced


def _buffer_versions(plan: Plan) -> dict[str, int]:
    """Count the writes to each buffer of the user's own model; one on meta has no value to lose."""
    buffers = plan.model.base.model.named_buffers()
    pairs = (
        (name, buffer) for name, buffer in buffers if not (buffer.is_inference() or buffer.is_meta)
    )
    return {name: buffer._version for name, buffer in pairs}


def _write_refusal(name: str) -> Refusal:
    """Return S867: a function holds the model itself, and writes into it when a copy runs."""
    return Refusal.of(
        "S867",
        f"a run of a copy of the model writes into `{name}` of the model itself",
        notes=("a hook, or another function, was made with the model in it: no copy has its own",),
        helps=(
            "take the module that a hook is given: `lambda module, args, output: ...`",
            "or register a method: `module.register_forward_hook(self.count)`",
        ),
    )


def _check_dense(plan: Plan) -> None:
    """Refuse (S868) tables with sparse gradients: reductions and norms need dense gradients."""
    for fqn, module in plan.model.model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) is True and getattr(weight, "requires_grad", False):
            raise Refusal.of(
                "S868",
                f"the gradient of `{fqn}.weight` would be sparse",
                notes=(f"`{type(module).__name__}` was made with `sparse=True`",),
                helps=(
                    f"make it dense: `model.get_submodule({fqn!r}).sparse = False`",
                    f"or freeze it: `{fqn}  freeze()`",
                ),
            )


def _check_reentrant(plan: Plan, traced: Traced, staged: Staged) -> None:
    """Refuse (S608) an order that splits backwards if the model has reentrant checkpoints."""
    if traced.has_reentrant_checkpoints and (staged.timeline.kind == Kind.W).any():
        note = "torch runs their backward for all inputs together: it cannot be split"
        helps = (
            "let the model say `torch.utils.checkpoint.checkpoint(.., use_reentrant=False)`",
            'use an order that does not split backwards: `order="1F1B"`, `order="Interleaved1F1B"`',
        )
        title = "this order splits backwards; the model has reentrant checkpoints"
        assert plan.order is not None
        refusal = Refusal.of("S608", title, notes=(note,), helps=helps)
        raise place_at_row(refusal, plan.origin(plan.order))


def _unequal_draws(traced: Traced) -> Refusal:
    """Return S812: ranks must make equal random draws, and cannot make the draws of the model."""
    from schedlang.runtime.rng.logical_dropout import not_reproducible_refusal

    name, (site, line) = next(iter(traced.unequal_draws.items()))
    return not_reproducible_refusal(name, site, line)


def _check_weight(weight: Weight, sample: Mapping[str, Any]) -> None:
    """Refuse a weight function that raises (S865), or returns no finite number >= 0 (S621)."""
    try:
        value = float(weight(sample))
    except Exception as error:
        raise refusal_of(error, "weight", weight) from error
    if not 0 <= value < float("inf"):
        raise Refusal.of(
            "S621",
            f"`weight` gives {value:g} for a part of the batch",
            notes=("losses of parts are added, each times its share of the total weight",),
            helps=("return a count of what the loss is a mean over: rows, tokens",),
        )


def check_axes(plan: Plan) -> None:
    """Refuse (S205) an axis that no row uses: its ranks would all do the same work."""
    used = plan.used_axes
    for axis, size in plan.mesh.axes:
        if size > 1 and axis not in used:
            raise Refusal.of(
                "S205",
                f"no row uses the axis `{axis}`",
                notes=(f"its {size} ranks would all do the same work",),
                helps=(
                    f"split the batch over it: `zero(stage=0, over={axis})`",
                    f"or set `{axis}` to 1: `--mesh {axis}=1`",
                ),
            )
