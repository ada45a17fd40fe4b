"""The two sides of a proof: the original in this process, the program on its ranks."""

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
    """A plan to be proven, with all that a rank needs to run it.

    `batches` one for each step; `prepared` what is known of the plan before there are ranks.
    `dtype` is the working dtype that is checked beside float64: that of the model if None, not
    checked if "none".
    """

    plan: Plan
    batches: tuple[Batch, ...]
    loss: Loss | None = None
    weight: Weight | None = None
    seed: int = 0
    dtype: str | None = None
    prepared: Prepared | None = None
    parted: bool = False  # compare with the original trained by parts: statistics are relaxed
    tipped: Found | None = None  # numbers that lie where two are as near, as ranks took them
    chosen: Mapping[Any, Tensor] = field(default_factory=dict)  # by operators, as ranks chose it
    # the plan that expectations are about and a batch of it, where another one is run
    meant: tuple[Plan, Batch] | None = None

    @property
    def cuts(self) -> tuple[Shares, int]:
        """The replicas that share a batch, and the number of microbatches in each share."""
        order = self.plan.order
        return self.plan.dealt, 1 if order is None else order.micro

    @property
    def table(self) -> Table | None:
        """The versions of weights that are met, where they are stale; the case is prepared."""
        return table_of(self.prepared.staged) if self.prepared is not None else None

    def with_model(self, module: nn.Module) -> Case:
        """The same for another untouched module of the same names and shapes, changed by rows."""
        return replace(self, plan=replace(self.plan, model=self.plan.model.like(module, True)))


def prepared(case: Case) -> Case:
    """The case with its plan traced once, here, for all ranks: here it is refused, if it is.

    A case that was prepared keeps its table of bits: what it is compared with has the same.
    """
    plan = completed(case.plan, case.batches[0], case.loss)
    case = replace(case, plan=plan)
    micro = plan.micro
    with at_the_forward(plan.model.model):
        sample = split(case.batches[0], plan.dealt, micro)[0][0].inputs
    bits = case.prepared.bits if case.prepared is not None else None
    return replace(case, prepared=prepare(plan, sample, case.loss, case.weight, bits))


def widened(case: Case) -> Case:
    """The case on a float64 copy of the model with other parameters, and float64 batches."""
    return _wide(case, randomised(_typed(case), case.seed))


def wide_alone(case: Case) -> Case:
    """The case on a float64 copy of the model with its own parameters, and float64 batches."""
    return _wide(case, _typed(case))


def _wide(case: Case, module: nn.Module) -> Case:
    batches = tuple(wide(_cast(case, batch)) for batch in case.batches)
    return replace(case.with_model(as_float64(module)), batches=batches)


def as_worked(case: Case) -> Case | None:
    """The case in the working dtype, from the very weights that the float64 run starts from."""
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
        module = _typed(case)
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if kinds == {torch.float64}:
        return None
    batches = tuple(_cast(case, batch) for batch in case.batches)
    return replace(case.with_model(randomised(module, case.seed)), batches=batches)


def _typed(case: Case) -> nn.Module:
    """The model in the dtype asked for."""
    module = case.plan.model.base.model
    if case.dtype in (None, "none"):
        return module
    return copied(module).to(getattr(torch, str(case.dtype)))


def _cast(case: Case, batch: Batch) -> dict[str, Any]:
    """The batch with its floats in the dtype asked for: a model takes what it computes in."""
    if case.dtype in (None, "none"):
        return dict(batch)

    dtype = getattr(torch, str(case.dtype))

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    out: dict[str, Any] = pytree.tree_map(cast, dict(batch))
    return out


def modes_of(case: Case) -> Any:
    """The modes that both sides run under, and the dropout among them."""
    dropout = dropout_of(case)
    return (Float64(), dropout), dropout


def dropout_of(case: Case) -> LogicalDropout:
    """Make the masks that the original draws, as the program does."""
    known = case.prepared
    return LogicalDropout(
        case.seed, unbatched=known.traced.unbatched if known is not None else None
    )


def twin(case: Case) -> nn.Module:
    """A copy of the original, which training may change; experts drop what rows let them drop."""
    return limited(case.plan, copied(case.plan.model.compared))


@contextmanager
def alone(case: Case, *, beside: bool = False, **options: Any) -> Iterator[Sequential]:
    """The loop around a copy of the original, as a proof runs it: float64, with logical draws.

    One of several threads runs it `beside` others: then who began them sees to globals.
    """
    modes, _ = modes_of(case)
    kept = nullcontext() if beside else kept_outside(case.plan.model.model, case.loss)
    with kept, ambient(*modes):
        subject = Sequential(twin(case), loss=case.loss, **options)
        if case.prepared is not None:
            subject.rewritten = case.prepared.traced.rewritten
        yield subject


def original(case: Case, told: Sequence[Condition]) -> tuple[Observation, int]:
    """Observe the original under each condition; and how many dropout masks it drew."""
    modes, dropout = modes_of(case)

    def make(condition: Condition) -> Sequential:
        return sequential(condition.case or case, condition, dropout)

    chosen = Choices(case.chosen)
    with kept_outside(case.plan.model.model, case.loss), ambient(*modes, chosen):
        seen = observe(make, told)
    return replace(seen, choices=chosen.found), dropout.drawn


def sequential(
    case: Case, condition: Condition, dropout: LogicalDropout | None = None, *, cast: bool = False
) -> Sequential:
    """The loop around a copy of the model, under a condition: plain, or as the rows relax it.

    `cast`: what rows let compute in another dtype does.
    """
    subject = _loop(case, condition, dropout, cast)
    if case.prepared is not None:
        subject.rewritten = case.prepared.traced.rewritten
    return subject


def _loop(
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
    # around the casts, as a program has it
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
    """A program as a subject of observation; all ranks call alike."""

    def __init__(
        self, program: Program, evaluate: bool = False, *, apart: bool = False, follow: bool = True
    ) -> None:
        self.program, self.apart = program, apart  # apart: each replica has buffers of its own
        # the program says these itself, of whole tensors under original names
        self.input_gradients, self.buffers = program.input_gradients, program.buffers
        self.trainable = cache(program.trained)  # ranks ask each other
        program.evaluate = evaluate
        dropout = program.assembly.dropout
        self.logical = dropout if isinstance(dropout, LogicalDropout) else None
        if self.logical is not None:
            self.logical.noted = {}
        else:  # then nobody has asked the modules for their places
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
        """Parts that the last output does not hold, and why."""
        return self.program.left_out

    def train_step(self, batch: Batch) -> Tensor:
        """One step of the program."""
        # what a model writes into what it is given is not to be met again
        loss = self.program.train_step(batch if self.follow else followed(batch, grad=False))
        self.grad_norm = self.program.grad_norm
        return loss

    def eval_step(self, batch: Batch) -> Any:
        """The output, without what the last stage cannot give."""
        if self.program.assembly.dropout is not None:
            return self.program.eval_step(batch)
        with ambient(Undrawn(0)):
            return self.program.eval_step(batch)

    def state_dict(self) -> Mapping[str, Tensor]:
        """Whole parameters and buffers, on the first rank, which compares; others lack some."""
        return whole.state_dict(self.program.assembly, first_rank)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Whole optimizer state, on the first rank."""
        return _optimizer_state(self.program)

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Whole gradients, on the first rank; one that no rank has is None."""
        found = whole.gradients(self.program.assembly, first_rank)
        return {name: found.get(name) for name in self.trainable()}

    def generators(self) -> Mapping[str, Tensor]:
        """Generators of this rank; those of others are compared as copies."""
        return generators(self.program.assembly.module)

    def draws(self) -> list[str]:
        """The masks drawn by all ranks, in words."""
        noted = self.logical.noted if self.logical is not None else None
        return draws_in_words(together(world.all_gather_object(noted)))

    def replicas(self) -> Mapping[str, float]:
        """Differences between copies on different ranks."""
        everyone = world.all_gather_object(self.generators())
        return {
            **self.program.replica_errors(),
            **({} if self.apart else self.program.buffer_errors()),
            **generators_agree(everyone),
        }


@with_peer_state
def _optimizer_state(program: Program) -> dict[str, dict[str, Any]]:
    return whole.optimizer_state(program.assembly, program.optimizer, first_rank)


def program_of(case: Case, **options: Any) -> Program:
    """Build, on a rank, the program of a prepared case; `options` are more of those of `build`.

    Ranks are given one case, so there is nothing to agree on.
    """
    given = {"loss": case.loss, "weight": case.weight, "seed": case.seed, "prepared": case.prepared}
    return build(case.plan, case.batches[0], **({"compare": "nothing"} | given | options))


def built(case: Case, condition: Condition) -> Program:
    """The program that a rank runs under a condition; what it offloads moves, however small."""
    run = condition.case or case
    loss = run.loss if condition.scale == 1 else Scaled(run.loss, condition.scale)
    with everything_moves():
        return program_of(run, loss=loss, optimizer=condition.optimizer, clip=condition.clip)


def observed(
    case: Case, told: Sequence[Condition], made: list[Program], *, brief: bool = False
) -> Observation:
    """One rank's observation of programs, which are noted in `made`; `brief` as of `observe`."""

    def make(condition: Condition) -> Distributed:
        program = built(case, condition)
        made.append(program)
        apart = (condition.case or case).parted
        return Distributed(program, condition.evaluate, apart=apart, follow=condition.follow)

    with kept_outside(case.plan.model.model, case.loss):
        return observe(make, told, keep=world.rank() == 0, brief=brief)


def tried(case: Case, told: Sequence[Condition], brief: bool = False) -> Observation:
    """One rank's observation of programs beside that of the proof: to find a row to blame, say."""
    with ambient(Float64()):
        return observed(case, told, [], brief=brief)
