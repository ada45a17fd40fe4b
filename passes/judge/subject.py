"""A user's program as a subject of observation (`verify.observe.Subject`).

All ranks make the same calls in the same order, because most methods contain collectives.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.tensor import DTensor

from schedlang.diagnostics.diagnostic import Refusal, kind_of, quote_names
from schedlang.ir import pytree
from schedlang.passes.judge.layouts import (
    WRAPPERS,
    ElementIndex,
    RankLayouts,
    RankTensor,
    candidate_names,
    declared_shard,
    find_original_name,
    join_layouts,
    local_tensor,
    match_parameters,
    unique_parameters,
)
from schedlang.passes.judge.program import (
    Make,
    call_with_optimizer,
    check_norm,
    check_optimizer,
    pickle_function,
    user_errors,
)
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.regions import RankCopy, assemble, distance
from schedlang.passes.judge.simulated_step import record_claims, record_own_steps
from schedlang.passes.judge.step_draws import make_from_equal_states, seeded_generators
from schedlang.passes.verify.compare import ratio
from schedlang.passes.verify.mapped_tensors import MappedTensors, map_tensor
from schedlang.passes.verify.observe import Batch, Condition, flatten_output
from schedlang.runtime.batch import named_tensors
from schedlang.runtime.comm import world
from schedlang.runtime.scope import Scope, enter_scope, named_sites
from schedlang.runtime.training_mode import TrainingMode

EPS = 1e-6  # as in torch's clip_grad_norm_


class ProgramSubject:
    """One rank's program under one condition; see `passes.verify.observe.Subject`.

    `begin(step)` is called at the start of each step, so that the step draws its own masks.
    """

    grad_norm: Tensor | float | None = None

    def __init__(
        self,
        make: Make,
        original: nn.Module,
        condition: Condition,
        record: RunRecord,
        begin: Callable[[int], None] = lambda step: None,
        earlier: ProgramSubject | None = None,
    ) -> None:
        self.make, self.condition, self.record, self.begin = make, condition, record, begin
        self.original = original
        self.rank, self.table = world.rank(), ElementIndex(original)
        model = copy.deepcopy(original)
        pytree.record_outputs(*model.modules())
        self._buffers_of_original = {n: b.shape for n, b in model.named_buffers()}
        self._modules = {name for name, _ in model.named_modules()}
        saved = set(model.state_dict())
        self._saved_buffers = saved - set(self.table.aliases)
        self._renames = not saved <= {*self.table.aliases, *self._buffers_of_original}
        self.program, record.seeds = make_from_equal_states(make, model, self.rank)
        if earlier is None:
            self.holdings = self._find_layouts()
        else:
            self.holdings = earlier.holdings.checked(self.rank, self.program.modules)
        record.holdings = record.holdings or self.holdings
        record_claims(self.program, record)
        parameters = [p for _, p in unique_parameters(self.program.modules)]
        self._parameters = list(zip(self.holdings.ranks[self.rank], parameters))
        inside = [submodule for module in self.program.modules for submodule in module.modules()]
        record.compiled |= any(isinstance(submodule, OptimizedModule) for submodule in inside)
        self._training = [TrainingMode(module) for module in self.program.modules]
        for number, module in enumerate(self.program.modules):
            named_sites(module, self._prefix(number))
        self._train()
        if record.initial is None:
            full, record.start_errors = self._assemble_values(
                [local_tensor(p.detach()) for _, p in self._parameters]
            )
            record.initial = MappedTensors(record.folder)
            record.initial.update({n: v for n, v in full.items() if v is not None})
        self._optimizer = self._make_optimizer()
        self._outputs: Any = None
        self._errors: dict[str, float] = {}
        self._gradients: dict[str, Tensor | None] = {}
        self._step: int = earlier._step if earlier is not None else 0

    def _find_layouts(self) -> RankLayouts:
        """Return the layouts found before if they still hold on every rank, else new ones."""
        known_layouts = self.record.holdings
        still_valid = known_layouts is not None and known_layouts.still_matches(
            self.rank, self.program.modules, self.table
        )
        if known_layouts is not None and all(world.all_gather_object(still_valid)):
            return known_layouts
        return join_layouts(
            world.all_gather_object(match_parameters(self.program, self.table)), self.table
        )

    def _prefix(self, number: int) -> str:
        return f"{number}:" if len(self.program.modules) > 1 else ""

    def named_modules(self) -> dict[str, nn.Module]:
        """Return this rank's modules by name.

        With several chunks, names begin with the chunk's number.
        """
        return {
            name: submodule
            for number, module in enumerate(self.program.modules)
            for name, submodule in module.named_modules(prefix=self._prefix(number))
        }

    def original_module(self, name: str) -> str | None:
        """Return the original's name of a module of this program; None if it is unknown.

        The name follows from the weights of the module, or of the nearest enclosing module with
        weights.
        """
        parts = name.replace(":.", ":").split(".") if name else []
        for count in range(len(parts), -1, -1):
            base = self._original_homes.get(".".join(parts[:count]))
            if base is not None:
                inner_names = [part for part in parts[count:] if part not in WRAPPERS]
                candidate = ".".join([base] * bool(base) + inner_names)
                if candidate in self._modules:
                    return candidate
        bare = (name.partition(":")[2] or name).lstrip(".")
        return next((option for option in candidate_names(bare) if option in self._modules), None)

    @cached_property
    def _original_homes(self) -> dict[str, str | None]:
        """Names of modules here -> the original's, from the names of weights; None: ambiguous."""
        homes: dict[str, str | None] = {}
        for tensor in self.holdings.ranks[self.rank]:
            bare = tensor.name.partition(":")[2] or tensor.name
            alike = [n for n, first in self.table.aliases.items() if [first] == list(tensor.pieces)]
            matching = [c for c in candidate_names(bare) if c in alike] or alike
            if not matching or len(matching) > 1 and matching == alike:
                continue
            local_parts, original_parts = tensor.name.split("."), matching[0].split(".")
            while local_parts and original_parts and local_parts.pop() == original_parts.pop():
                local, original = ".".join(local_parts), ".".join(original_parts)
                homes[local] = original if homes.get(local, original) == original else None
        return homes

    def declared_part(self, name: str, full: Tensor) -> Tensor | None:
        """Return the part of a mask that the user declares for a module here, or None."""
        bare = (name.partition(":")[2] or name).lstrip(".")
        declaration = (self.program.dropout or {}).get(bare)
        return None if declaration is None else declared_shard(bare, declaration, full)

    def _make_optimizer(self) -> Any:
        groups = self.holdings.groups
        pairs = [
            (next((groups[n] for n in tensor.pieces), groups.get(tensor.name, tensor.name)), p)
            for tensor, p in self._parameters
            if p.requires_grad
        ]
        if not pairs:
            return None
        factory = self.program.optimizer
        if factory is None:
            return self.condition.optimizer(pairs)
        if self.record.optimizer is None:
            self.record.optimizer = pickle_function(factory, "optimizer")
        with user_errors(factory, "optimizer", self.rank):
            return check_optimizer(factory(pairs), f"on rank {self.rank}")

    def _train(self) -> None:
        for mode in self._training:
            mode.train()

    # -- a step

    def train_step(self, batch: Batch) -> Tensor:
        """Run the program's step on a copy of the batch, clip, and step the optimizer."""
        self._errors = {}
        before = self._parameter_sums()
        value = self.forward_backward(batch)
        after = self._parameter_sums()
        self.record.changed_by_step |= {name for name in before if before[name] != after[name]}
        parameter_ids = {id(p) for _, p in self._parameters}
        self.record.replaced_by_step |= {
            n for n, p in unique_parameters(self.program.modules) if id(p) not in parameter_ids
        }
        if isinstance(value, tuple) and len(value) == 2:
            value, self._outputs = value
            self.record.offers.add("output")
        loss = self._loss(value)
        copies = self._copies([self._gradient(p, tensor) for tensor, p in self._parameters])
        if self._step == 0:
            clipped = "clipped" in self.condition.name
            self.record.copies |= {(clipped, n): rank_copies for n, rank_copies in copies.items()}
        self._gradients, errors = self._assemble(copies, keep=self._step == 0)
        self._errors |= {f"gradient of {name}": error for name, error in errors.items()}
        self._clip()
        if self._optimizer is not None:
            with user_errors(self.program.optimizer or self.make, "optimizer", self.rank):
                self._optimizer.step()
        self._step += 1
        return loss

    def _parameter_sums(self) -> dict[str, float]:
        """Return the sum of each local trained parameter, to detect a step that changes them."""
        trained = [(tensor.name, p.detach()) for tensor, p in self._parameters if p.requires_grad]
        return {name: float(local_tensor(p).double().sum()) for name, p in trained}

    def forward_backward(self, batch: Batch) -> Any:
        """Run the program's step on a batch and return its result; no optimizer step.

        Gradients stay in the parameters.
        """
        self._train()
        for module in self.program.modules:
            module.zero_grad(set_to_none=True)
        self.begin(self._step)
        with (
            enter_scope(Scope(self._step, 0, ())),
            record_own_steps(self.record),
            seeded_generators(self._step, self.program.modules) as drawn,
        ):
            value = self._call_user("step", self.program.step, batch)
        if self._step == 0:
            self.record.drawn[self.condition.name] = drawn
        return value

    def _call_user(self, part: str, function: Callable[[Any], Any], batch: Batch) -> Any:
        """Call a user's function with a copy of the batch; refuse (S764) one that changes it."""
        copied = pytree.tree_map(
            lambda v: v.detach().clone() if isinstance(v, Tensor) else v, dict(batch)
        )
        with user_errors(self.make, part, self.rank):
            value = function(copied)
        after, before = named_tensors(copied), named_tensors(batch)
        changed = [n for n, v in before.items() if n not in after or not _is_equal(after[n], v)]
        if changed:
            message = (
                f"`{part}` changes the batch in place on rank {self.rank}: {quote_names(changed)}"
            )
            helps = ("work on a copy: `batch = dict(batch)`, `labels = batch['labels'].clone()`",)
            raise Refusal.of("S764", message, helps=helps)
        return value

    def _loss(self, value: Any) -> Tensor:
        """Combine the losses that ranks return into the loss of the batch."""
        if isinstance(value, DTensor):
            value = value.full_tensor()
        number = value is None or isinstance(value, (int, float))
        if not number and not (isinstance(value, Tensor) and value.numel() == 1):
            message = f"`step` returns {kind_of(value)} on rank {self.rank}, not a loss"
            helps = ("return a number, None where the rank has none, or `(loss, output)`",)
            raise Refusal.of("S766", message, helps=helps)
        local_loss = None if value is None else float(value.detach() if number is False else value)
        losses = [loss for loss in world.all_gather_object(local_loss) if loss is not None]
        if not losses:
            message = "`step` returns a loss on no rank"
            helps = ("return the loss on the rank that computes it, None on the others",)
            raise Refusal.of("S766", message, helps=helps)
        self.record.losses = self.record.losses or losses
        op = self.program.world_loss
        combined = math.fsum(losses) / (len(losses) if op == "mean" else 1)
        total = torch.tensor(losses[0] if op == "same" else combined, dtype=torch.float64)
        if op == "same":
            gap = distance(total.new_tensor(losses), total)
            self._errors["loss"] = ratio(gap, abs(float(total)))
        return total

    def _gradient(self, p: nn.Parameter, tensor: RankTensor) -> Tensor | None:
        """Return this rank's part of a gradient; refuse (S762) one that is no gradient of it."""
        gradient = None if p.grad is None else _shard_as(p.grad, p)
        if gradient is None or gradient.numel() == local_tensor(p).numel():
            return gradient
        message = (
            f"`step` leaves a gradient of shape {tuple(gradient.shape)} for `{tensor.name}` of "
            f"shape {tensor.shape} on rank {self.rank}: no optimizer can step it"
        )
        helps = ("run the last backward of the step outside of `no_sync`, so that it is reduced",)
        raise Refusal.of("S762", message, helps=helps)

    def _clip(self) -> None:
        """Clip gradients with the program's `clip`, else by the norm of the full gradients."""
        max_norm = math.inf if self.condition.clip is None else self.condition.clip
        if self.program.clip is not None:
            with user_errors(self.make, "clip", self.rank):
                norm = self.program.clip(max_norm)
            self.grad_norm = check_norm(norm, self.rank)
            clipped = self._copies([self._gradient(p, tensor) for tensor, p in self._parameters])
            self._gradients = self._assemble(clipped)[0]
            return
        norms = [float(g.norm()) for g in self._gradients.values() if g is not None]
        norm = world.all_gather_object(math.hypot(*norms))[0]
        factor = min(1.0, max_norm / (norm + EPS))
        if factor < 1:
            with torch.no_grad():
                for _, p in self._parameters:
                    if p.grad is not None:
                        p.grad.mul_(factor)
            scaled = {n: g if g is None else g * factor for n, g in self._gradients.items()}
            self._gradients = scaled

    @property
    def output(self) -> Any:
        """Values of the training output by path, as a list over ranks."""
        return self._by_rank(self._outputs)

    def eval_step(self, batch: Batch) -> Any:
        """Return the output in eval mode by path, as lists over ranks; None: not offered."""
        if self.program.evaluate is None:
            return None
        return self._by_rank(self.evaluate("evaluate", batch))

    def evaluate(self, part: str, batch: Batch) -> Any:
        """Return what a function of the program returns in eval mode."""
        for mode in self._training:
            mode.evaluate()
        scope = Scope(self._step, 0, (), evaluation=1)
        with (
            torch.no_grad(),
            enter_scope(scope),
            seeded_generators(self._step, self.program.modules),
        ):
            return self._call_user(part, getattr(self.program, part), batch)

    def _by_rank(self, output: Any) -> dict[str, list[Tensor]]:
        local = {
            name: (v.full_tensor() if isinstance(v, DTensor) else torch.as_tensor(v)).detach()
            for name, v in flatten_output(output, set())
        }
        rank_outputs = world.all_gather_object(local)
        names = dict.fromkeys(name for values in rank_outputs for name in values)
        return {name: [values[name] for values in rank_outputs if name in values] for name in names}

    # -- full tensors

    def _copies(self, values: Sequence[Tensor | None]) -> dict[str, list[RankCopy]]:
        """Return all ranks' copies of each parameter of the original, in the order of ranks."""
        mapped = [
            None if v is None else map_tensor(v.reshape(-1), self.record.folder) for v in values
        ]
        copies: dict[str, list[RankCopy]] = {}
        for rank, (tensors, rank_values) in enumerate(
            zip(self.holdings.ranks, world.all_gather_object(mapped))
        ):
            for tensor, value in zip(tensors, rank_values):
                for name, (local_region, region) in tensor.pieces.items():
                    copy_ = RankCopy(rank, tensor.name, local_region, region, value)
                    copies.setdefault(name, []).append(copy_)
        return copies

    def _assemble(
        self, copies: Mapping[str, Sequence[RankCopy]], keep: bool = False
    ) -> tuple[dict[str, Tensor | None], dict[str, float]]:
        """Assemble full tensors, and measure how far copies of the same elements differ.

        Each element is taken from the first rank that holds it. Only rank 0 assembles, from the
        files that ranks wrote; other ranks return empty results. The files are removed afterwards
        unless `keep`.
        """
        full: dict[str, Tensor | None] = {}
        errors: dict[str, float] = {}
        if self.rank == 0:
            for name, shape in self.table.shapes.items():
                present = [entry for entry in copies.get(name, ()) if entry.stored is not None]
                full[name] = None
                if present:
                    full[name], gap, size = assemble(present, shape, self.record.folder)
                    if gap or len(present) > 1:
                        errors[name] = ratio(gap, size)
        world.barrier()
        for copy_ in () if keep else (c for rank_copies in copies.values() for c in rank_copies):
            if copy_.rank == self.rank and copy_.stored is not None:
                copy_.stored.remove_file()
        return full, errors

    def _assemble_values(
        self, values: Sequence[Tensor | None]
    ) -> tuple[dict[str, Tensor | None], dict[str, float]]:
        return self._assemble(self._copies(values))

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Return full gradients as the last step left them."""
        trained = set(self.trainable())
        return {name: g for name, g in self._gradients.items() if name in trained}

    def input_gradients(self) -> None:
        """Return None: the program's step does not return gradients of the batch."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return full parameters and buffers, tied ones under each of their names.

        If hooks of the original change its state dict, the program's values go through the same
        hooks.
        """
        full, errors = self._assemble_values(
            [local_tensor(p.detach()) for _, p in self._parameters]
        )
        self._errors |= errors
        known_values = {
            name: value if dtype.is_floating_point else value.to(dtype)  # of quantised weights
            for name, first_name in self.table.aliases.items()
            for dtype in (self.table.parameters[first_name].dtype,)
            if (value := full.get(first_name)) is not None
        }
        buffers = self._buffers()
        if not self._renames or self.rank > 0:
            return known_values | {n: b for n, b in buffers.items() if n in self._saved_buffers}
        model = copy.deepcopy(self.original)
        model_tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in model_tensors.items():
            if (value := {**buffers, **known_values}.get(name)) is not None:
                tensor.data.copy_(value)
        saved: Mapping[str, Tensor] = model.state_dict()
        return saved

    def buffers(self) -> Mapping[str, Tensor]:
        """Return buffers with a known name, including those that are not in the state dict."""
        return self._buffers()

    def _buffers(self) -> dict[str, Tensor]:
        local_buffers: dict[str, Tensor] = {}
        shapes = self._buffers_of_original
        for number, module in enumerate(self.program.modules):
            for name, buffer in module.named_buffers():
                original = find_original_name(self.program, f"{number}:{name}", shapes)
                if original is not None and local_tensor(buffer).shape == shapes[original]:
                    local_buffers[original] = local_tensor(buffer).detach().clone()
        buffers: dict[str, Tensor] = {}
        for rank_buffers in world.all_gather_object(local_buffers):
            for name, value in rank_buffers.items():
                first_value = buffers.setdefault(name, value)
                gap = distance(value.double(), first_value.double())
                error = ratio(gap, float(first_value.double().norm()))
                key = f"buffer {name}"
                self._errors[key] = max(self._errors.get(key, 0.0), error)
        self.record.lost_buffers |= set(shapes) - set(buffers)
        return buffers

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Return full optimizer state, by parameter and slot."""
        state = self._optimizer.state if self._optimizer is not None else {}
        slots = dict.fromkeys(k for p in state for k in state[p])
        all_slots = {k: None for names in world.all_gather_object(list(slots)) for k in names}
        full_state: dict[str, dict[str, Any]] = {}
        for slot in all_slots:
            local_values = [state[p].get(slot) if p in state else None for _, p in self._parameters]
            shaped = [
                _shard_as(v, p) if _is_elementwise(v, p) else None
                for v, (_, p) in zip(local_values, self._parameters)
            ]
            full, _ = self._assemble_values(shaped)
            numbers = {
                name: v
                for (one, p), v in zip(self._parameters, local_values)
                if v is not None and not _is_elementwise(v, p)
                for name in one.pieces
            }
            for name, value in full.items():
                if value is not None:
                    full_state.setdefault(name, {})[slot] = value
            for one in reversed(world.all_gather_object(numbers)):
                for name, value in one.items():
                    full_state.setdefault(name, {})[slot] = value
        return full_state

    def trainable(self) -> list[str]:
        """Return the original's names of the parameters that some rank trains."""
        names = {n for t in self.holdings.all_tensors if t.requires_grad for n in t.pieces}
        return [name for name in self.table.names if name in names]

    def replicas(self) -> Mapping[str, float]:
        """Return differences between copies of parameters, gradients, buffers, a `same` loss."""
        return dict(self._errors)

    # -- saved state

    def save(self) -> Any:
        """Return this rank's state to save, and record its entries with the original's names."""
        if self.program.state_dict is None:
            return None
        with user_errors(self.program.state_dict, "state_dict", self.rank):
            state = call_with_optimizer(self.program.state_dict, self._optimizer)
        mappings = [
            {
                name: v.full_tensor() if isinstance(v, DTensor) else v
                for name, v in mapping.items()
                if isinstance(v, Tensor)
            }
            for mapping in _named_mappings(state, set(self.table.aliases) | self._saved_buffers)
        ]
        self.record.saved = MappedTensors(self.record.folder)
        if self.rank == 0 and mappings:  # other mappings may be averaged weights
            self.record.saved.update(
                next((mapping for mapping in mappings if self._is_current(mapping)), mappings[0])
            )
        return state

    def _is_current(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether a state of full tensors contains this rank's current parameters."""
        pairs = [
            (local.read(local_tensor(p.detach()).reshape(-1)), region.read(state[name].reshape(-1)))
            for tensor, p in self._parameters
            for name, (local, region) in tensor.pieces.items()
            if name in state and state[name].shape == self.table.shapes[name]
        ]
        return all(torch.equal(a.reshape(-1), b.reshape(-1).to(a.dtype)) for a, b in pairs)

    def load(self, state: Any) -> None:
        """Load a saved state into this rank's program."""
        assert self.program.load is not None
        with user_errors(self.program.load, "load", self.rank):
            call_with_optimizer(self.program.load, self._optimizer, state)

    def local_state(self) -> dict[str, Any]:
        """Return this rank's own parameters, persistent buffers and optimizer state, by name."""
        values: dict[str, Any] = {}
        state = self._optimizer.state if self._optimizer is not None else {}
        for tensor, p in self._parameters:
            name = next(iter(tensor.pieces)) if len(tensor.pieces) == 1 else tensor.name
            values[name] = local_tensor(p.detach())
            slots = state.get(p, {})
            values |= {f"{slot} of {name}": _local_value(value) for slot, value in slots.items()}
        for number, module in enumerate(self.program.modules):
            for name, buffer in module.named_buffers():
                owner = module.get_submodule(name.rpartition(".")[0])
                if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                    original = find_original_name(
                        self.program, f"{number}:{name}", self._buffers_of_original
                    )
                    original = original or f"{self._prefix(number)}{name}"
                    values[f"buffer {original}"] = local_tensor(buffer.detach())
        return values

    def local_gradients(self) -> dict[str, Tensor]:
        """Return this rank's own gradients as the last step left them, by parameter name."""
        gradients = ((tensor.name, self._gradient(p, tensor)) for tensor, p in self._parameters)
        return {f"gradient of {name}": g for name, g in gradients if g is not None}


def _local_value(value: Any) -> Any:
    return local_tensor(value.detach()) if isinstance(value, Tensor) else value


def _named_mappings(state: Any, names: set[str]) -> list[Mapping[str, Any]]:
    """Return the mappings nested in a state that have the most of the original's names as keys."""
    counted: list[tuple[int, Mapping[str, Any]]] = []
    waiting = [state]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += value.values()
            mapping = {k: v for k, v in value.items() if isinstance(k, str)}
            counted.append((sum(isinstance(mapping.get(k), Tensor) for k in names), mapping))
        elif isinstance(value, (list, tuple)):
            waiting += value
    largest = max((count for count, _ in counted), default=0)
    return [mapping for count, mapping in counted if count == largest > 0]


def _is_elementwise(value: Any, p: nn.Parameter) -> bool:
    """Return whether an optimizer slot has one number per element of its parameter."""
    return isinstance(value, Tensor) and value.shape == p.shape and p.dim() > 0


def _shard_as(value: Any, p: nn.Parameter) -> Tensor:
    """Return this rank's part of a tensor of a parameter's shape, sharded as the parameter is."""
    if isinstance(value, DTensor) and isinstance(p, DTensor):
        value = value.redistribute(placements=p.placements)  # resolves a partial gradient
    return local_tensor(value.detach())


def _is_equal(after: Tensor, before: Tensor) -> bool:
    if after.shape != before.shape or after.dtype != before.dtype:
        return False
    equal = torch.eq(after.detach(), before.detach())
    nan = after.isnan() & before.isnan() if after.is_floating_point() else torch.zeros_like(equal)
    return bool((equal | nan).all())
