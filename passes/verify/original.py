"""The original as a subject of observation: a plain training loop of the untouched model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir import pytree
from schedlang.ir.module_copies import copy_module
from schedlang.ir.plan import Plan
from schedlang.passes.verify.observe import Batch, Loss, MakeOptimizer
from schedlang.passes.verify.randomness import describe_draws, generator_states, repeated_streams
from schedlang.runtime.batch import (
    named_tensors,
    no_loss_diagnostic,
    run_model,
    split_rows,
    with_leaf_tensors,
)
from schedlang.runtime.device import seeded_generator
from schedlang.runtime.global_state import HostDraws
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.scope import Scope, enter_scope, named_sites
from schedlang.runtime.submodules import remove_hooks_after
from schedlang.runtime.training_mode import TrainingMode

_UNTRAINED = Diagnostic(
    "S710",
    "the original's loss has no gradient",
    notes=("no parameter that requires a gradient leads to it, or it is detached on the way",),
    helps=("return the loss as it is computed: without `detach`, `item` or `no_grad`",),
)


class Sequential:
    """A module with the plainest training loop: forward, loss, backward, clip, step.

    module    is trained in place, so pass a copy
    loss      loss(output, batch); not needed if the model returns its loss
    scale     factor of the loss
    evaluate  train in eval mode
    follow    float inputs require gradients
    dropout   the mode under which the module runs; it reports the draws
    step      number of the next step
    apart     parts of a batch have draws of their own from Python and numpy
    takes_gradient: the model takes a gradient in its forward, so also in evaluation

    seeds_draws: draws from Python and numpy are seeded as a program seeds them.
    """

    seeds_draws = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer | None = None,
        *,
        loss: Loss | None = None,
        clip: float | None = None,
        scale: float = 1.0,
        evaluate: bool = False,
        follow: bool = True,
        dropout: LogicalDropout | None = None,
        step: int = 0,
        apart: bool = False,
        takes_gradient: bool = False,
    ) -> None:
        self.module, self.loss, self.clip = module, loss or returned_loss, clip
        self.scale, self.evaluate, self.follow = scale, evaluate, follow
        self.takes_gradient = takes_gradient  # also in evaluation
        self.dropout = dropout
        draws = HostDraws(0 if dropout is None else dropout.seed, apart)
        self._seeding = draws.enter if self.seeds_draws else None
        if dropout is not None:
            dropout.noted, dropout.begun = {}, {}
        self._parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._optimizer = optimizer(self._parameters) if optimizer else None
        self.grad_norm: Tensor | float | None = None
        self.order: tuple[str, ...] = ()
        self.rewritten: frozenset[str] = frozenset()  # parameters that the forward writes to
        self.changed: set[str] = set()  # plain attributes that a forward changes
        self.ties = tied_names(module)
        self.output: Any = None  # of the last training step
        self._training = TrainingMode(module)
        self._inputs: dict[str, Any] = {}
        self._steps = step
        self._evaluated = (0, 0)  # step, number of evaluations
        named_sites(module)

    def train_step(self, batch: Batch) -> Tensor:
        """Do forward, loss, backward, clip and step on the full batch; return the loss."""
        assert self._optimizer is not None, "this subject was made without an optimizer"
        loss = self.forward_backward(batch, range(count_rows(batch)))
        self._clip()
        self._optimizer.step()
        self._steps += 1
        return loss

    def _clip(self) -> None:
        max_norm = math.inf if self.clip is None else self.clip
        self.grad_norm = clip_grad_norm_([p for _, p in self._parameters], max_norm)

    def forward_backward(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """Return the loss of a part of a batch in training mode; gradients are in `gradients()`.

        No optimizer step is made.
        """
        self._set_mode()
        self.module.zero_grad(set_to_none=True)
        inputs = self._given(batch)
        scope = Scope(self._steps, 0, tuple(samples), seeding=self._seeding)
        with enter_scope(scope), self._record_order():
            output = run_model(self.module, inputs)
            loss = self.loss(output, inputs) * self.scale
            # the step will change parameters
            self.output = pytree.tree_map_only(nn.Parameter, lambda p: p.detach().clone(), output)
            if not loss.requires_grad:
                raise Refusal(_UNTRAINED)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().reshape(())  # a loss may have dims of size 1

    def _set_mode(self) -> None:
        self._training.evaluate() if self.evaluate else self._training.train()

    def _given(self, batch: Batch) -> dict[str, Any]:
        """Return the batch with fresh float tensors, which require gradients if `follow` is set."""
        inputs: dict[str, Any] = with_leaf_tensors(batch, self.follow)
        self._inputs = {k: v for k, v in named_tensors(inputs).items() if v.requires_grad}
        return inputs

    def gradient_norm(self, batch: Batch) -> float:
        """Return the norm of all gradients of a batch; buffers change as in a forward."""
        self.forward_backward(batch, range(count_rows(batch)))
        return float(get_total_norm([p.grad for _, p in self._parameters if p.grad is not None]))

    def eval_step(self, batch: Batch) -> Any:
        """Return the output in eval mode."""
        self._training.evaluate()
        samples, evaluation = tuple(range(count_rows(batch))), self._next_evaluation()
        scope = Scope(self._steps, 0, samples, evaluation, seeding=self._seeding)
        with torch.set_grad_enabled(self.takes_gradient), enter_scope(scope):
            output = run_model(self.module, batch)
        return without_graph(output) if self.takes_gradient else output

    def _next_evaluation(self) -> int:
        """Return the number of this evaluation since the last step."""
        step, count = self._evaluated
        self._evaluated = self._steps, count + 1 if step == self._steps else 1
        return self._evaluated[1]

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Return the gradients as the last step left them."""
        return {name: p.grad for name, p in self._parameters}

    def input_gradients(self) -> Mapping[str, Tensor | None]:
        """Return gradients of the float tensors of the last batch."""
        return {name: x.grad for name, x in self._inputs.items()}

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the module's state dict."""
        state: Mapping[str, Tensor] = self.module.state_dict()
        return state

    def buffers(self) -> Mapping[str, Tensor]:
        """Return all buffers, also those that the state dict leaves out."""
        return dict(self.module.named_buffers())

    def generators(self) -> Mapping[str, Tensor]:
        """Return the states of torch's generator and of the module's generators."""
        return generator_states(self.module)

    def draws(self) -> list[str]:
        """Return descriptions of the masks drawn."""
        return describe_draws(self.dropout.noted or {}) if self.dropout is not None else []

    def streams(self) -> tuple[int, list[str]]:
        """Return the number of random streams of masks, and descriptions of equal streams."""
        begun = (self.dropout.begun or {}) if self.dropout is not None else {}
        return len(begun), repeated_streams(begun)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the optimizer's state by parameter name."""
        assert self._optimizer is not None
        state = self._optimizer.state
        return {name: state[p] for name, p in self._parameters if p in state}

    def trainable(self) -> list[str]:
        """Return the names of parameters that require a gradient."""
        return [name for name, _ in self._parameters]

    def replicas(self) -> Mapping[str, float]:
        """Return no differences: there is one copy of everything."""
        return {}

    @contextmanager
    def _record_order(self) -> Iterator[None]:
        """Record, once, the order in which backward finishes the gradients."""
        order: list[str] = []
        handles = [
            p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # type: ignore
            for name, p in self._parameters
            if not self.order
        ]
        try:
            with remove_hooks_after(handles):
                yield
        finally:
            self.order = self.order or tuple(order)


def without_graph(output: Any) -> Any:
    """Return an output with its tensors detached."""
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)


def returned_loss(output: Any, batch: Batch) -> Tensor:
    """Return the loss that a model returns: a single number, or `loss` of its output."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise Refusal(no_loss_diagnostic(None, output, batch))


def count_rows(batch: Batch) -> int:
    """Return the number of samples of a batch: the most common size of dim 0."""
    sizes = [v.shape[0] for v in named_tensors(batch).values() if v.dim()]
    assert sizes, "a batch holds at least one tensor with rows"
    return max(set(sizes), key=sizes.count)


def repeat_first_rows(batch: Batch, parts: Sequence[Sequence[int]]) -> Batch | None:
    """Repeat the first row of each part in all rows of the part.

    Sums over parts, of a mask or of counts, then differ as much as single rows do. Returns None for
    a batch that is no plain dict of tensors, because its samples may share data (edges of graphs).
    """
    if not pytree.is_flat(batch):
        return None
    count, first_rows = count_rows(batch), torch.tensor([part[0] for part in parts for _ in part])

    def taken(value: Any) -> Any:
        is_batched = isinstance(value, Tensor) and value.dim() and value.shape[0] == count
        return value[first_rows.to(value.device)] if is_batched else value

    return {name: taken(value) for name, value in batch.items()}


def spread_rows(plan: Plan, batch: Batch) -> Batch | None:
    """Return a batch of all ranks made from the rows of one: each part has others, repeated.

    Neighbouring rows stay neighbours where a part has several: they may be pairs. Returns None as
    `repeat_first_rows` does, and where ranks gather rows.
    """
    if plan.row_gathers or not pytree.is_flat(batch):
        return None
    count = count_rows(batch)
    ranges = split_rows(count * plan.shares, plan.share_weights)
    sizes = [len(part) for rows in ranges for part in split_rows(len(rows), plan.micro)]
    others = max(1, count // len(sizes))  # rows that a part has
    index = [
        number * count // len(sizes) + row % others
        for number, size in enumerate(sizes)
        for row in range(size)
    ]
    return repeat_first_rows(batch, [[row] for row in index])


def tied_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return groups of names of one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Copy a module with other parameters, so that no zero bias and no unit gain hides a mistake.

    Each parameter gets noise of its own size: matrices at least 1/2 per square root of their width,
    vectors at least 1/10. A parameter's noise depends on its name and the seed alone.
    """
    twin = copy_module(module)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if not p.is_floating_point() or not p.numel():
                continue
            noise = torch.randn(
                p.shape, generator=seeded_generator(seed, name), dtype=torch.float64
            )
            size = p.double().square().mean().sqrt().item()
            if p.dim() > 1:
                size = max(size, 0.5 / math.sqrt(max(p.shape[0], p.numel() // p.shape[0])))
            else:
                size = 0.1 * max(1.0, size)
            p.add_((noise * size).to(p.device, p.dtype))
    return twin
