"""The `Case` of a proof, and its two sides: the original here, the program on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir import pytree
from schedlang.ir.copied import copied
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.holdings import compressed_over
from schedlang.passes.analyze.prepare import Prepared, prepare
from schedlang.passes.analyze.routing import limited
from schedlang.passes.analyze.staleness import Table, table_of
from schedlang.passes.analyze.taking import at_the_forward
from schedlang.passes.complete.complete import completed
from schedlang.passes.lower.build import build
from schedlang.passes.propagate.original import weight_of
from schedlang.passes.verify.fewer_bits import with_kept
from schedlang.passes.verify.observe import Batch, Condition, Loss, Observation, observe
from schedlang.passes.verify.original import Sequential, randomised
from schedlang.passes.verify.randomness import (
    draws_in_words,
    generators,
    generators_agree,
    together,
)
from schedlang.passes.verify.relaxed import (
    Compressed,
    Parted,
    Replayed,
    ScaledParted,
    ScaledSteps,
    cast_twin,
    directions_of,
)
from schedlang.runtime import whole
from schedlang.runtime.activation_memory.quantized import Found
from schedlang.runtime.batch import Shares, followed, split
from schedlang.runtime.checkpointing.holding import first_rank
from schedlang.runtime.comm import world
from schedlang.runtime.float64 import Float64, as_float64
from schedlang.runtime.float64 import widened as wide
from schedlang.runtime.grad_reduction.batch_statistics import Scaled
from schedlang.runtime.kept_outside import kept_outside
from schedlang.runtime.modes import ambient
from schedlang.runtime.moe.choices import Choices
from schedlang.runtime.offload.saved_tensors import everything_moves
from schedlang.runtime.offload.step import with_peer_state
from schedlang.runtime.program import Program
from schedlang.runtime.rng.logical_dropout import LogicalDropout, Undrawn
from schedlang.runtime.scope import named_sites

DTYPES = ("float32", "bfloat16", "float16", "none")
Weight = Callable[[Batch], float]


@dataclass(frozen=True)
class Case:
    """A plan to prove, with everything that a rank needs to run it.

    batches   one for each step
    prepared  facts of the plan that are known before ranks start
    dtype     the working dtype that is checked besides float64: None is the model's, "none" none
    """

    plan: Plan
    batches: tuple[Batch, ...]
    loss: Loss | None = None
    weight: Weight | None = None
    seed: int = 0
    dtype: str | None = None
    prepared: Prepared | None = None
    parted: bool = False  # the original trains by parts: statistics are relaxed
    tipped: Found | None = None  # ranks' codes of values midway between two codes
    chosen: Mapping[Any, Tensor] = field(default_factory=dict)  # ranks' choices, by operator
    # the plan and a batch that cost expectations are about, if another plan runs
    meant: tuple[Plan, Batch] | None = None

    @property
    def cuts(self) -> tuple[Shares, int]:
        """The number of data-parallel replicas, and the number of microbatches of each."""
        order = self.plan.order
        return self.plan.dealt, 1 if order is None else order.micro

    @property
    def table(self) -> Table | None:
        """The versions of stale weights that microbatches use; None if weights are never stale.

        The case must be prepared.
        """
        return table_of(self.prepared.staged) if self.prepared is not None else None

    def with_model(self, module: nn.Module) -> Case:
        """Return the case with another untouched module of equal names and shapes."""
        return replace(self, plan=replace(self.plan, model=self.plan.model.like(module, True)))


def prepared(case: Case) -> Case:
    """Trace the plan once, for all ranks; a plan that cannot run is refused here.

    If the case was prepared before, the new one has the same table of bits, so that they compare.
    """
    plan = completed(case.plan, case.batches[0], case.loss)
    case = replace(case, plan=plan)
    micro = plan.micro
    with at_the_forward(plan.model.model):
        sample = split(case.batches[0], plan.dealt, micro)[0][0].inputs
    bits = case.prepared.bits if case.prepared is not None else None
    return replace(case, prepared=prepare(plan, sample, case.loss, case.weight, bits))


def widened(case: Case) -> Case:
    """Return the case in float64, with randomised parameters."""
    return _with_float64(case, randomised(_in_dtype(case), case.seed))


def wide_alone(case: Case) -> Case:
    """Return the case in float64, with the model's own parameters."""
    return _with_float64(case, _in_dtype(case))


def _with_float64(case: Case, module: nn.Module) -> Case:
    batches = tuple(wide(_cast_batch(case, batch)) for batch in case.batches)
    return replace(case.with_model(as_float64(module)), batches=batches)


def as_worked(case: Case) -> Case | None:
    """Return the case in the working dtype, with the same initial weights as the float64 run.

    Returns None if no working dtype is checked. Refuses (S704) an unknown dtype.
    """
    module = case.plan.model.base.model
    if case.dtype == "none":
        return None
    if case.dtype is not None:
        if case.dtype not in DTYPES:
            raise Refusal(
                Diagnostic(
                    "S704",
                    f"`{case.dtype}` is not a working dtype",
                    helps=(f"choose one of {', '.join(DTYPES)}",),
                )
            )
        module = _in_dtype(case)
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if kinds == {torch.float64}:
        return None
    batches = tuple(_cast_batch(case, batch) for batch in case.batches)
    return replace(case.with_model(randomised(module, case.seed)), batches=batches)


def _in_dtype(case: Case) -> nn.Module:
    """Return the model in the requested dtype."""
    module = case.plan.model.base.model
    if case.dtype in (None, "none"):
        return module
    return copied(module).to(getattr(torch, str(case.dtype)))


def _cast_batch(case: Case, batch: Batch) -> dict[str, Any]:
    """Return a batch with floats in the requested dtype, because a model expects its own dtype."""
    if case.dtype in (None, "none"):
        return dict(batch)

    dtype = getattr(torch, str(case.dtype))

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    out: dict[str, Any] = pytree.tree_map(cast, dict(batch))
    return out


def modes_of(case: Case) -> Any:
    """Return the modes that both sides run under, and the dropout mode among them."""
    dropout = dropout_of(case)
    return (Float64(), dropout), dropout


def dropout_of(case: Case) -> LogicalDropout:
    """Make the dropout mode that draws the original's masks, as the program does."""
    known = case.prepared
    return LogicalDropout(
        case.seed, unbatched=known.traced.unbatched if known is not None else None
    )


def twin(case: Case) -> nn.Module:
    """Copy the original, so that training may change it; experts drop tokens as rows allow."""
    return limited(case.plan, copied(case.plan.model.compared))


@contextmanager
def alone(case: Case, *, in_thread: bool = False, **options: Any) -> Iterator[Sequential]:
    """Yield the training loop of a copy of the original, as a proof runs it.

    The loop runs in float64 with logical draws. In one of several threads, pass `in_thread`: then
    the caller protects the globals.
    """
    modes, _ = modes_of(case)
    kept = nullcontext() if in_thread else kept_outside(case.plan.model.model, case.loss)
    with kept, ambient(*modes):
        subject = Sequential(twin(case), loss=case.loss, **options)
        if case.prepared is not None:
            subject.rewritten = case.prepared.traced.rewritten
        yield subject


def original(case: Case, conditions: Sequence[Condition]) -> tuple[Observation, int]:
    """Observe the original under each condition; also return the number of dropout masks drawn."""
    modes, dropout = modes_of(case)

    def make(condition: Condition) -> Sequential:
        return sequential(condition.case or case, condition, dropout)

    chosen = Choices(case.chosen)
    with kept_outside(case.plan.model.model, case.loss), ambient(*modes, chosen):
        seen = observe(make, conditions)
    return replace(seen, choices=chosen.found), dropout.drawn


def sequential(
    case: Case, condition: Condition, dropout: LogicalDropout | None = None, *, cast: bool = False
) -> Sequential:
    """Return the original's training loop under a condition, with the rules that rows relax.

    With `cast`, modules compute in the dtypes that rows allow.
    """
    subject = _make_loop(case, condition, dropout, cast)
    if case.prepared is not None:
        subject.rewritten = case.prepared.traced.rewritten
    return subject


def _make_loop(
    case: Case, condition: Condition, dropout: LogicalDropout | None, cast: bool
) -> Sequential:
    options: dict[str, Any] = {
        "loss": case.loss,
        "clip": condition.clip,
        "scale": condition.scale,
        "evaluate": condition.evaluate,
        "follow": condition.follow,
        "dropout": dropout,
    }
    table, module = case.table, twin(case)
    few = bool(compressed_over(case.plan))
    row = case.plan.scaled if cast else None
    if cast:
        cast_twin(case.plan, module, options)
    known = case.prepared
    # outside of the casts, as in a program
    module = with_kept(case.plan, module, known, case.tipped)
    if row is not None and not case.parted and not case.plan.kept:
        return ScaledSteps(module, condition.optimizer, **options, row=row)
    if not case.parted and table is None and not few and not case.plan.kept:
        return Sequential(module, condition.optimizer, **options)
    assert case.prepared is not None
    replicas, micro = case.cuts
    weigh = case.weight or weight_of(case.prepared.traced, case.plan.shares * micro)
    options |= {
        "split": lambda batch: split(batch, replicas, micro),
        "weigh": weigh,
        "directions": directions_of(case.prepared.staged),
    }
    if table is not None:
        return Replayed(module, condition.optimizer, **options, table=table)
    if few:
        held = case.prepared.holdings
        return Compressed(module, condition.optimizer, **options, plan=case.plan, holdings=held)
    if row is not None:
        return ScaledParted(module, condition.optimizer, **options, row=row)
    return Parted(module, condition.optimizer, **options)


class Distributed:
    """A program as a subject of observation; all ranks make the same calls."""

    def __init__(
        self,
        program: Program,
        evaluate: bool = False,
        *,
        separate_buffers: bool = False,
        follow: bool = True,
    ) -> None:
        self.program, self.separate_buffers = program, separate_buffers  # by replica
        # full tensors under original names
        self.input_gradients, self.buffers = program.input_gradients, program.buffers
        self.trainable = cache(program.trained)  # communicates between ranks
        program.evaluate = evaluate
        dropout = program.assembly.dropout
        self.logical = dropout if isinstance(dropout, LogicalDropout) else None
        if self.logical is not None:
            self.logical.noted = {}
        else:  # otherwise the dropout mode names the modules
            named_sites(program.assembly.module)
        program.follow_inputs = self.follow = follow
        program.keep_output = True
        self.grad_norm: Tensor | float | None = None  # of the last step, before clipping

    @property
    def output(self) -> Any:
        """The output of the last training step."""
        return self.program.output

    @property
    def left_out(self) -> Mapping[str, str]:
        """Parts that the last output does not contain, and why."""
        return self.program.left_out

    def train_step(self, batch: Batch) -> Tensor:
        """Do one step of the program."""
        # a model may write to its inputs
        loss = self.program.train_step(batch if self.follow else followed(batch, grad=False))
        self.grad_norm = self.program.grad_norm
        return loss

    def eval_step(self, batch: Batch) -> Any:
        """Return the output, without the parts that the last stage cannot give."""
        if self.program.assembly.dropout is not None:
            return self.program.eval_step(batch)
        with ambient(Undrawn(0)):
            return self.program.eval_step(batch)

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return full parameters and buffers on the first rank; others return only some."""
        return whole.state_dict(self.program.assembly, first_rank)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Return full optimizer state on the first rank."""
        return _optimizer_state(self.program)

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Return full gradients on the first rank; None for a gradient that no rank has."""
        found = whole.gradients(self.program.assembly, first_rank)
        return {name: found.get(name) for name in self.trainable()}

    def generators(self) -> Mapping[str, Tensor]:
        """Return this rank's generator states; other ranks' are compared as copies."""
        return generators(self.program.assembly.module)

    def draws(self) -> list[str]:
        """Return descriptions of the masks that all ranks drew."""
        noted = self.logical.noted if self.logical is not None else None
        return draws_in_words(together(world.all_gather_object(noted)))

    def replicas(self) -> Mapping[str, float]:
        """Return the differences between copies on different ranks."""
        everyone = world.all_gather_object(self.generators())
        return {
            **self.program.replica_errors(),
            **({} if self.separate_buffers else self.program.buffer_errors()),
            **generators_agree(everyone),
        }


@with_peer_state
def _optimizer_state(program: Program) -> dict[str, dict[str, Any]]:
    return whole.optimizer_state(program.assembly, program.optimizer, first_rank)


def program_of(case: Case, **options: Any) -> Program:
    """Build, on a rank, the program of a prepared case; `options` override arguments of `build`.

    All ranks receive the same case, so `build` does not compare plans.
    """
    given = {"loss": case.loss, "weight": case.weight, "seed": case.seed, "prepared": case.prepared}
    return build(case.plan, case.batches[0], **({"compare": "nothing"} | given | options))


def built(case: Case, condition: Condition) -> Program:
    """Build a rank's program for a condition; offloaded tensors move, however small they are."""
    run = condition.case or case
    loss = run.loss if condition.scale == 1 else Scaled(run.loss, condition.scale)
    with everything_moves():
        return program_of(run, loss=loss, optimizer=condition.optimizer, clip=condition.clip)


def observed(
    case: Case, conditions: Sequence[Condition], made: list[Program], *, brief: bool = False
) -> Observation:
    """Observe a rank's programs, and append them to `made`; `brief` as in `observe`."""

    def make(condition: Condition) -> Distributed:
        program = built(case, condition)
        made.append(program)
        separate_buffers = (condition.case or case).parted
        return Distributed(
            program, condition.evaluate, separate_buffers=separate_buffers, follow=condition.follow
        )

    with kept_outside(case.plan.model.model, case.loss):
        return observe(make, conditions, keep=world.rank() == 0, brief=brief)


def tried(case: Case, conditions: Sequence[Condition], brief: bool = False) -> Observation:
    """Observe a rank's program outside of the main proof, for example to find a row to blame."""
    with ambient(Float64()):
        return observed(case, conditions, [], brief=brief)
