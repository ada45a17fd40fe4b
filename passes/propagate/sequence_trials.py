"""Models on parts of sequences: over ranks (`context_parallel`), or in slices of a pipeline.

Before training, a small stand-in of the model is run to find out how the model computes on some
tokens of its sequences: `tokens_of` for ranks, `slicing_of` for slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from schedlang.diagnostics.diagnostic import OwnError, Refusal
from schedlang.ir.annotations import ContextSplit
from schedlang.ir.model import quote_module
from schedlang.ir.plan import Action, Plan, place_at_row
from schedlang.ir.primitive import Facet
from schedlang.passes.propagate.loss_sums import run_many_rows, sums_of_all_rows
from schedlang.passes.propagate.original_forward import Weight, several_losses, weight_of
from schedlang.passes.propagate.propagate import Traced
from schedlang.passes.propagate.sharded_run import Loss

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.comm.collectives import Group, RankGroups
    from schedlang.runtime.context_parallel.local_tokens import AttentionMethod, TokenSplit
    from schedlang.runtime.propagation.batch_sums import BatchSum
    from schedlang.runtime.sequence_pipelining.slices import SliceRunner, Slicing
    from schedlang.runtime.sequence_pipelining.trial import Trial


T = TypeVar("T")


@dataclass(frozen=True)
class TrialSubject:
    """The subject of a trial: the model of a plan, a microbatch, the user's loss and weight."""

    plan: Plan
    traced: Traced
    sample: Mapping[str, Any]
    loss: Loss | None = None
    weight: Weight | None = None

    @property
    def model(self) -> nn.Module:
        """Return the unmodified model."""
        return self.plan.model.model

    def make_trial(self, count: int, *, short: bool) -> Trial:
        """Return a stand-in for `count` parts; `short`: few tokens, and one block of each kind."""
        from schedlang.runtime.sequence_pipelining.trial import make_trial

        labels = self.traced.labels
        return make_trial(
            self.model,
            self.sample,
            count,
            loss=self.loss,
            weight=self.weight or weight_by_tokens(self.traced, count),
            rule=labels[0] if len(labels) == 1 else None,
            random=self.traced.is_random,
            unbatched=self.traced.unbatched_masks,
            short=short,
            sites=self.plan.contexts,
        )


@dataclass(frozen=True)
class TrialQuestion(Generic[T]):
    """The question that a trial answers.

    guess    returns the answer for a model without values, without running it
    probe    runs a trial and returns the answer, or raises Refusal
    refusal  returns the refusal, from a title and notes, for a model that no trial can run
    """

    guess: Callable[[Trial], T]
    probe: Callable[[Trial], T]
    refusal: Callable[..., Refusal]


def answer_by_trial(subject: TrialSubject, count: int, question: TrialQuestion[T]) -> T:
    """Return the answer of a short stand-in, or else of a stand-in of full length and depth.

    Raises the probe's Refusal, or OwnError if the stand-in runs alone but its probe fails.
    """
    from schedlang.runtime.context_parallel.plain_run import can_run

    if is_on_meta(subject.model):
        with suppress(Exception):  # missing blocks may be the cause, as below
            return question.guess(subject.make_trial(count, short=True))
        return question.guess(subject.make_trial(count, short=False))
    try:
        return question.probe(subject.make_trial(count, short=True))
    except Exception as error:
        # any error, also a refusal: missing blocks or too short sequences may be its only cause;
        # the full stand-in is closer to the model, and decides
        short_error = error
    trial = subject.make_trial(count, short=False)
    try:
        return question.probe(trial)
    except (Refusal, OwnError) as refusal:
        raise refusal from short_error
    except Exception as error:
        error.__cause__ = short_error
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        if can_run(trial):
            kind = type(subject.model).__name__
            raise OwnError(f"`{kind}` runs alone on a small batch", message) from error
        title = f"`{type(subject.model).__name__}` does not run on a small batch, to be tried"
        raise question.refusal(title, message) from error


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model has tensors without values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def weight_by_tokens(traced: Traced, count: int) -> Weight:
    """Return the weight function of parts: by counted labels, or by tokens without labels."""
    from schedlang.runtime.batch import row_count
    from schedlang.runtime.sequence_pipelining.slices import sequence_length

    if len(traced.labels) > 1 and count > 1:
        raise several_losses(traced)
    if traced.labels:
        return weight_of(traced, count)
    return lambda batch: float(row_count(batch) * sequence_length(batch))


def tokens_of(
    plan: Plan, traced: Traced, sample: Mapping[str, Any], loss: Loss | None, weight: Weight | None
) -> TokenSplit | None:
    """Return how the model runs on shards of sequences; None where sequences are not split.

    Raises Refusal S659 at the last row that splits sequences if the model cannot run so. A model
    without values is not probed: it cannot be built either.
    """
    if plan.mesh.size(plan.context_axes) == 1:
        return None
    try:
        _check_axes(plan)
        token_split = _probe_tokens(TrialSubject(plan, traced, sample, loss, weight))
        token_split.layout(sample)  # are there enough tokens?
    except Refusal as refusal:
        raise place_at_row(refusal, last_context_row(plan)) from refusal
    row = last_context_row(plan)
    return token_split if row is None else replace(token_split, row=row.span)


def token_layout_of(plan: Plan) -> str:
    """Return the layout of tokens over ranks: that of some row, else "contiguous"."""
    layouts = {context.layout for rows in plan.contexts.values() for context in rows} - {None}
    return next(iter(layouts), None) or "contiguous"


def last_context_row(plan: Plan) -> Action | None:
    """Return the last row that splits sequences, or None."""
    contexts = [context for rows in plan.contexts.values() for context in rows]
    return plan.origin(max(contexts, key=lambda context: context.row)) if contexts else None


@contextmanager
def refusals_at_context_row(plan: Plan) -> Iterator[None]:
    """Place refusals raised inside the context at the last row that splits sequences."""
    try:
        yield
    except Refusal as refusal:
        raise place_at_row(refusal, last_context_row(plan)) from refusal


def _check_axes(plan: Plan) -> None:
    if plan.order is not None and plan.order.slices > 1:
        raise Refusal.of(
            "S662",
            "sequences are split over ranks, and into slices as well",
            notes=("slices pass keys from one to the next, ranks exchange them",),
            helps=("leave `slices` out: `slices=1`", "or leave `context_parallel` out"),
        )
    axes = {
        site: plan.mesh.fold([a for context in rows for a in context.axes])
        for site, rows in plan.contexts.items()
    }
    for site, site_axes in axes.items():
        if site_axes != plan.context_axes:
            other_axes = ", ".join(axis for axis in plan.context_axes if axis not in site_axes)
            raise Refusal.of(
                "S660",
                f"`{site}` does not attend to the keys of all ranks",
                notes=(f"rows at other modules split sequences over `{other_axes}`, too",),
                helps=("use the same axes in the rows of all attentions",),
            )


def _probe_tokens(subject: TrialSubject) -> TokenSplit:
    from schedlang.runtime.context_parallel.probe import (
        SplitModules,
        guess_tokens,
        image_refusal,
        probe,
        unrunnable_refusal,
    )

    no_tokens = image_refusal(subject.sample)
    if no_tokens is not None:
        raise no_tokens
    plan = subject.plan
    ranks, kind = plan.mesh.size(plan.context_axes), token_layout_of(plan)

    def tried(trial: Trial) -> TokenSplit:
        module_names = {name for name, _ in trial.model.named_modules()}
        attentions = [site for site in plan.contexts if site in module_names]
        statistics = subject.traced.statistics
        if statistics is not None and statistics.sums:
            sums = _sums_of_trial(trial, subject.weight)
            return probe(trial, kind, ranks, SplitModules(attentions, sums))
        try:
            return probe(trial, kind, ranks, SplitModules(attentions))
        except (Refusal, OwnError) as error:
            raise _unshared(trial, subject.weight, error) from error

    def refusal(title: str, message: str) -> Refusal:
        return unrunnable_refusal(subject.model, title, message)

    return answer_by_trial(
        subject,
        ranks,
        TrialQuestion(lambda trial: guess_tokens(trial, kind, ranks), tried, refusal),
    )


def _unshared(trial: Trial, weight: Weight | None, error: Refusal | OwnError) -> Refusal | OwnError:
    """Return the refusal S659 of a loss whose sums no ranks share; the error itself for others."""
    sums = _sums_of_trial(trial, weight)
    if not sums or (isinstance(error, Refusal) and error.diagnostic.code != "S659"):
        return error
    place = f", {sums[0].line}" if sums[0].line else ""
    return Refusal.of(
        "S659",
        f"the loss of `{type(trial.model).__name__}` has sums over all tokens that ranks do not"
        " share here",
        notes=(
            f"the forward of {quote_module(sums[0].fqn)} takes a {sums[0].name}{place}",
            "ranks do not share sums of microbatches, or relaxed ones",
            *(error.diagnostic.notes if isinstance(error, Refusal) else ()),
        ),
        helps=(
            "use one microbatch, `micro=1`, and leave out `relax(batch_stats)`",
            "or split rows: `zero(stage=0, over=cp)`",
        ),
    )


def _sums_of_trial(trial: Trial, weight: Weight | None) -> tuple[BatchSum, ...]:
    """Return the sums over the batch in a stand-in, which may have fewer blocks than its model."""
    many_rows = run_many_rows(trial.model, trial.batch, trial.loss)
    return sums_of_all_rows(many_rows and many_rows.sums, weight is not None)


def install_attention(
    plan: Plan, module: nn.Module, tokens: TokenSplit | None, ranks: RankGroups
) -> None:
    """Install attention over the keys of all ranks in a rank's module, if sequences are split."""
    from schedlang.runtime.context_parallel.installation import install_context

    if tokens is not None:
        contexts = plan.contexts.items()
        install_context(
            module, tokens, {site: _method_of(site, rows, ranks.group) for site, rows in contexts}
        )


def first_rank_inputs(
    plan: Plan, model: nn.Module, tokens: TokenSplit | None, batch: Mapping[str, Any]
) -> tuple[Mapping[str, Any], AbstractContextManager[None]]:
    """Return the first rank's inputs, and a context, for a forward on the meta device.

    The attention of context parallelism is installed in `model`.
    """
    from schedlang.runtime.batch import BatchPart
    from schedlang.runtime.comm.collectives import Group
    from schedlang.runtime.context_parallel.installation import (
        MetaExchange,
        ShardContext,
        install_context,
    )

    if tokens is None:
        return batch, nullcontext()

    def group(axes: str | tuple[str, ...]) -> Group:
        folded = plan.mesh.fold(axes)
        return Group(folded, plan.mesh.group(0, folded), 0)

    methods = {site: _method_of(site, rows, group) for site, rows in plan.contexts.items()}
    install_context(model, tokens, methods)
    part = tokens.take_part(BatchPart(dict(batch), ()), 0, MetaExchange())
    return part.inputs, ShardContext(tokens).enter_shard(part.token_shard, nullcontext())


def _method_of(
    site: str, rows: tuple[ContextSplit, ...], group: Callable[[Any], Group]
) -> AttentionMethod:
    """Return the attention method of a module and its process groups, outermost first."""
    from schedlang.runtime.context_parallel.local_tokens import AttentionMethod

    outer = sorted(rows, key=lambda context: context.method == "ulysses")
    axes = [axis for context in outer for axis in _levels_of(context)]
    methods = [context.method for context in outer for _ in _levels_of(context)]
    groups = [replace(group(axis), label=site) for axis in axes]
    active = [k for k, group in enumerate(groups) if group.size > 1]
    if len(rows) == 1 and len(active) == len(groups):
        return AttentionMethod(METHOD_NAMES.get(methods[0], methods[0]), tuple(groups))
    if len(active) == 2:
        return AttentionMethod("usp", tuple(groups))
    (k,) = active
    return AttentionMethod(_one_level_method(methods[k], k), (groups[k],))


METHOD_NAMES = {"double_ring": "double ring"}


def _one_level_method(method: str, level: int) -> str:
    """Return the method that remains of a two-level method when the other level has one rank."""
    if method == "double_ring":
        return "ring"
    inner = {"usp": "ulysses", "nbody": "gather"}.get(method)
    return method if inner is None else ("ring", inner)[level]


def _levels_of(context: ContextSplit) -> list[str | tuple[str, ...]]:
    """Return the levels of a row: each axis for two-level methods, else all axes as one level."""
    return (
        list(context.axes) if context.method in ("usp", "double_ring", "nbody") else [context.axes]
    )


def slicing_of(
    plan: Plan,
    traced: Traced,
    count: int,
    sample: Mapping[str, Any],
    loss: Loss | None,
    weight: Weight | None,
) -> Slicing | None:
    """Return how the model runs on `count` slices of its sequences; None for one slice.

    Raises Refusal S655 at the row of the order if the model cannot run so. A model without values
    is not probed: it cannot be built either.
    """
    if count == 1:
        return None
    try:
        slicing = _probe_slices(TrialSubject(plan, traced, sample, loss, weight), count)
        slicing = replace(slicing, multiple=_length_multiple(traced))
        slicing.split_batch(sample)  # are there enough tokens?
        return slicing
    except Refusal as refusal:
        raise place_at_row(refusal, next(iter(plan.rows_changing(Facet.ORDER)), None)) from refusal


def _probe_slices(subject: TrialSubject, count: int) -> Slicing:
    from schedlang.runtime.sequence_pipelining.probe import guess_slicing, probe, split_refusal
    from schedlang.runtime.sequence_pipelining.slices import Slicing

    Slicing(count, "calls").split_batch(subject.sample)
    question = TrialQuestion(
        lambda trial: guess_slicing(trial, count), lambda trial: probe(trial, count), split_refusal
    )
    return answer_by_trial(subject, count, question)


def _length_multiple(traced: Traced) -> int:
    """Return the number that must divide lengths: of ranks that split activations by tokens."""
    from schedlang.ir.placement import S
    from schedlang.runtime.sharding.edges import dim_of

    edges = [edge for edges in traced.edges.values() for edge in edges]
    return math.lcm(
        *(
            edge.group.size
            for edge in edges
            for placement in (
                edge.input_before,
                edge.input_after,
                edge.output_before,
                edge.output_after,
            )
            if isinstance(placement, S) and dim_of(placement) == 1
        )
    )


def slices_of(
    slicing: Slicing | None, model: nn.Module, traced: Traced, weight: Weight | None
) -> SliceRunner | None:
    """Return the splitter of the local model's microbatches into slices; None without slices."""
    from schedlang.runtime.sequence_pipelining.slices import SliceRunner

    if slicing is None:
        return None
    return SliceRunner(model, slicing, weight or weight_by_tokens(traced, slicing.count))
