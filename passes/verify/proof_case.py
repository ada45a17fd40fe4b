"""The `Case` of a proof, and its two sides: the original here, the program on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.ir.module_copies import copy_module
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.expert_capacity import limit_capacity
from schedlang.passes.analyze.holdings import compression_axes
from schedlang.passes.analyze.input_checks import add_forward_line
from schedlang.passes.analyze.prepare import Prepared, prepare
from schedlang.passes.analyze.staleness import VersionTable, version_table_of
from schedlang.passes.complete.complete import complete_plan
from schedlang.passes.lower.build import build
from schedlang.passes.propagate.original_forward import weight_of
from schedlang.passes.verify.observe import Batch, Condition, Loss, Observation, observe
from schedlang.passes.verify.original import Sequential, randomise
from schedlang.passes.verify.quantized_saved_tensors import quantize_saved_tensors
from schedlang.passes.verify.randomness import (
    compare_generators,
    describe_draws,
    generator_states,
    join_draws,
)
from schedlang.passes.verify.relaxed_original import (
    SequentialByParts,
    SequentialCompressed,
    SequentialScaled,
    SequentialScaledByParts,
    SequentialStale,
    apply_casts,
    buffer_replicas,
)
from schedlang.runtime import full_tensors
from schedlang.runtime.activation_memory.quantized import NearTieMap
from schedlang.runtime.batch import RowShares, split_batch, with_leaf_tensors
from schedlang.runtime.checkpointing.holdings import first_rank
from schedlang.runtime.comm import world
from schedlang.runtime.float64 import Float64, as_float64, to_float64
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.grad_reduction.batch_statistics import ScaledLoss
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.moe.discrete_choices import ChoiceRecorder
from schedlang.runtime.offload.offloaded_activations import offload_all_sizes
from schedlang.runtime.offload.offloaded_step import with_peer_state
from schedlang.runtime.program import Program
from schedlang.runtime.rng.logical_dropout import LogicalDropout, NoTrainingDraws
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
    by_parts: bool = False  # the original trains by parts: statistics are relaxed
    tipped: NearTieMap | None = None  # ranks' codes of values midway between two codes
    choices: Mapping[Any, Tensor] = field(default_factory=dict)  # ranks' choices, by operator
    # the plan and a batch that cost expectations are about, if another plan runs
    expected_for: tuple[Plan, Batch] | None = None

    @property
    def cuts(self) -> tuple[RowShares, int]:
        """The number of data-parallel replicas, and the number of microbatches of each."""
        order = self.plan.order
        return self.plan.share_weights, 1 if order is None else order.micro

    @property
    def table(self) -> VersionTable | None:
        """The versions of stale weights that microbatches use; None if weights are never stale.

        The case must be prepared.
        """
        return version_table_of(self.prepared.staged) if self.prepared is not None else None

    def with_model(self, module: nn.Module) -> Case:
        """Return the case with another untouched module of equal names and shapes."""
        return replace(
            self, plan=replace(self.plan, model=self.plan.model.for_module(module, True))
        )


def prepare_case(case: Case) -> Case:
    """Trace the plan once, for all ranks; a plan that cannot run is refused here.

    If the case was prepared before, the new one has the same table of bits, so that they compare.
    """
    plan = complete_plan(case.plan, case.batches[0], case.loss)
    case = replace(case, plan=plan)
    micro = plan.micro
    with add_forward_line(plan.model.model):
        sample = split_batch(case.batches[0], plan.share_weights, micro)[0][0].inputs
    bits = case.prepared.bits if case.prepared is not None else None
    return replace(case, prepared=prepare(plan, sample, case.loss, case.weight, bits))


def randomised_float64(case: Case) -> Case:
    """Return the case in float64, with randomised parameters."""
    return _with_float64(case, randomise(_in_dtype(case), case.seed))


def own_float64(case: Case) -> Case:
    """Return the case in float64, with the model's own parameters."""
    return _with_float64(case, _in_dtype(case))


def _with_float64(case: Case, module: nn.Module) -> Case:
    batches = tuple(to_float64(_cast_batch(case, batch)) for batch in case.batches)
    return replace(case.with_model(as_float64(module)), batches=batches)


def working_case(case: Case) -> Case | None:
    """Return the case in the working dtype, with the same initial weights as the float64 run.

    Returns None if no working dtype is checked. Refuses (S704) an unknown dtype.
    """
    module = case.plan.model.base.model
    if case.dtype == "none":
        return None
    if case.dtype is not None:
        if case.dtype not in DTYPES:
            raise Refusal.of(
                "S704",
                f"`{case.dtype}` is not a working dtype",
                helps=(f"choose one of {', '.join(DTYPES)}",),
            )
        module = _in_dtype(case)
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if kinds == {torch.float64}:
        return None
    batches = tuple(_cast_batch(case, batch) for batch in case.batches)
    return replace(case.with_model(randomise(module, case.seed)), batches=batches)


def _in_dtype(case: Case) -> nn.Module:
    """Return the model in the requested dtype."""
    module = case.plan.model.base.model
    if case.dtype in (None, "none"):
        return module
    return copy_module(module).to(getattr(torch, str(case.dtype)))


def _cast_batch(case: Case, batch: Batch) -> dict[str, Any]:
    """Return a batch with floats in the requested dtype, because a model expects its own dtype."""
    if case.dtype in (None, "none"):
        return dict(batch)

    dtype = getattr(torch, str(case.dtype))

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    cast_values: dict[str, Any] = pytree.tree_map(cast, dict(batch))
    return cast_values


def proof_modes(case: Case) -> Any:
    """Return the modes that both sides run under, and the dropout mode among them."""
    dropout = make_dropout(case)
    return (Float64(), dropout), dropout


def make_dropout(case: Case) -> LogicalDropout:
    """Make the dropout mode that draws the original's masks, as the program does."""
    prepared = case.prepared
    return LogicalDropout(
        case.seed, unbatched=prepared.traced.unbatched_masks if prepared is not None else None
    )


def copy_original(case: Case) -> nn.Module:
    """Copy the original, so that training may change it; experts drop tokens as rows allow."""
    return limit_capacity(case.plan, copy_module(case.plan.model.reference_model))


@contextmanager
def original_subject(
    case: Case, *, in_thread: bool = False, **options: Any
) -> Iterator[Sequential]:
    """Yield the training loop of a copy of the original, as a proof runs it.

    The loop runs in float64 with logical draws. In one of several threads, pass `in_thread`: then
    the caller protects the globals.
    """
    modes, _ = proof_modes(case)
    restored = (
        nullcontext() if in_thread else restore_global_state(case.plan.model.model, case.loss)
    )
    with restored, enter_modes(*modes):
        subject = Sequential(copy_original(case), loss=case.loss, **options)
        if case.prepared is not None:
            subject.rewritten = case.prepared.traced.rewritten_parameters
            subject.takes_gradient = case.prepared.traced.takes_gradient
        yield subject


def run_original(case: Case, conditions: Sequence[Condition]) -> tuple[Observation, int]:
    """Observe the original under each condition; also return the number of dropout masks drawn."""
    modes, dropout = proof_modes(case)

    def make(condition: Condition) -> Sequential:
        return make_original_subject(condition.case or case, condition, dropout)

    recorder = ChoiceRecorder(case.choices)
    with restore_global_state(case.plan.model.model, case.loss), enter_modes(*modes, recorder):
        observation = observe(make, conditions)
    return replace(observation, choices=recorder.found), dropout.drawn


def make_original_subject(
    case: Case, condition: Condition, dropout: LogicalDropout | None = None, *, cast: bool = False
) -> Sequential:
    """Return the original's training loop under a condition, with the rules that rows relax.

    With `cast`, modules compute in the dtypes that rows allow.
    """
    subject = _make_loop(case, condition, dropout, cast)
    if case.prepared is not None:
        subject.rewritten = case.prepared.traced.rewritten_parameters
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
        "takes_gradient": case.prepared is not None and case.prepared.traced.takes_gradient,
    }
    table, module = case.table, copy_original(case)
    is_compressed = bool(compression_axes(case.plan))
    row = case.plan.loss_scaling if cast else None
    if cast:
        apply_casts(case.plan, module, options)
    prepared = case.prepared
    # outside of the casts, as in a program
    module = quantize_saved_tensors(case.plan, module, prepared, case.tipped)
    if row is not None and not case.by_parts and not case.plan.activation_codings:
        return SequentialScaled(module, condition.optimizer, **options, row=row)
    if (
        not case.by_parts
        and table is None
        and not is_compressed
        and not case.plan.activation_codings
    ):
        return Sequential(module, condition.optimizer, **options)
    assert case.prepared is not None
    replicas, micro = case.cuts
    weigh = case.weight or weight_of(case.prepared.traced, case.plan.shares * micro)
    options |= {
        "split": lambda batch: split_batch(batch, replicas, micro),
        "weigh": weigh,
        "directions": buffer_replicas(case.prepared.staged),
        "apart": case.by_parts,
    }
    if table is not None:
        return SequentialStale(module, condition.optimizer, **options, table=table)
    if is_compressed:
        holdings = case.prepared.holdings
        return SequentialCompressed(
            module, condition.optimizer, **options, plan=case.plan, holdings=holdings
        )
    if row is not None:
        return SequentialScaledByParts(module, condition.optimizer, **options, row=row)
    return SequentialByParts(module, condition.optimizer, **options)


class ProgramSubject:
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
        loss = self.program.train_step(
            batch if self.follow else with_leaf_tensors(batch, grad=False)
        )
        self.grad_norm = self.program.grad_norm
        return loss

    def eval_step(self, batch: Batch) -> Any:
        """Return the output, without the parts that the last stage cannot give."""
        if self.program.assembly.dropout is not None:
            return self.program.eval_step(batch)
        with enter_modes(NoTrainingDraws(0)):
            return self.program.eval_step(batch)

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return full parameters and buffers on the first rank; others return only some."""
        return full_tensors.full_state_dict(self.program.assembly, first_rank)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Return full optimizer state on the first rank."""
        return _optimizer_state(self.program)

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Return full gradients on the first rank; None for a gradient that no rank has."""
        full_gradients = full_tensors.full_gradients(self.program.assembly, first_rank)
        return {name: full_gradients.get(name) for name in self.trainable()}

    def generators(self) -> Mapping[str, Tensor]:
        """Return this rank's generator states; other ranks' are compared as copies."""
        return generator_states(self.program.assembly.module)

    def draws(self) -> list[str]:
        """Return descriptions of the masks that all ranks drew."""
        noted = self.logical.noted if self.logical is not None else None
        return describe_draws(join_draws(world.all_gather_object(noted)))

    def replicas(self) -> Mapping[str, float]:
        """Return the differences between copies on different ranks."""
        all_generators = world.all_gather_object(self.generators())
        return {
            **self.program.replica_errors(),
            **({} if self.separate_buffers else self.program.buffer_errors()),
            **compare_generators(all_generators),
        }


@with_peer_state
def _optimizer_state(program: Program) -> dict[str, dict[str, Any]]:
    return full_tensors.full_optimizer_state(program.assembly, program.optimizer, first_rank)


def build_program(case: Case, **options: Any) -> Program:
    """Build, on a rank, the program of a prepared case; `options` override arguments of `build`.

    All ranks receive the same case, so `build` does not compare plans.
    """
    defaults = {
        "loss": case.loss,
        "weight": case.weight,
        "seed": case.seed,
        "prepared": case.prepared,
    }
    return build(case.plan, case.batches[0], **({"compare": "nothing"} | defaults | options))


def build_for_condition(case: Case, condition: Condition) -> Program:
    """Build a rank's program for a condition; offloaded tensors move, however small they are."""
    run_case = condition.case or case
    loss = run_case.loss if condition.scale == 1 else ScaledLoss(run_case.loss, condition.scale)
    with offload_all_sizes():
        return build_program(
            run_case, loss=loss, optimizer=condition.optimizer, clip=condition.clip
        )


def observe_programs(
    case: Case, conditions: Sequence[Condition], programs: list[Program], *, brief: bool = False
) -> Observation:
    """Observe a rank's programs, and append them to `programs`; `brief` as in `observe`."""

    def make(condition: Condition) -> ProgramSubject:
        program = build_for_condition(case, condition)
        programs.append(program)
        separate_buffers = (condition.case or case).by_parts
        return ProgramSubject(
            program, condition.evaluate, separate_buffers=separate_buffers, follow=condition.follow
        )

    with restore_global_state(case.plan.model.model, case.loss):
        return observe(make, conditions, keep=world.rank() == 0, brief=brief)


def observe_on_rank(
    case: Case, conditions: Sequence[Condition], brief: bool = False
) -> Observation:
    """Observe a rank's program outside of the main proof, for example to find a row to blame."""
    with enter_modes(Float64()):
        return observe_programs(case, conditions, [], brief=brief)
