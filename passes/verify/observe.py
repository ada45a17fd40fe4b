"""Run training conditions on a subject and record everything that can be compared.

Both sides of a proof are observed here: the original in this process, the program on its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.ir.pytree import tree_flatten_with_path
from schedlang.passes.verify.mapped_tensors import MappedTensors, release_memory
from schedlang.runtime.batch import dotted_path
from schedlang.runtime.device import generators_restored
from schedlang.runtime.launch.forkserver import report_progress

DISTINCT_DRAWS = "distinct draws"  # on one side: no two streams are equal
NATIVE_DRAWS = "native draws"  # in training: equal on replicas, distinct elsewhere
HIDDEN_BUFFERS = "hidden buffers"  # buffers that a state dict leaves out
Batch = Mapping[str, Any]
Loss = Callable[[Any, Batch], "Tensor"]
MakeOptimizer = Callable[[Sequence[tuple[str, "nn.Parameter"]]], "Optimizer"]


@runtime_checkable
class Subject(Protocol):
    """Something that trains: the original, or a program whose ranks all make the same calls.

    Names are the original's; a tied weight has its name in `named_parameters`.
    """

    grad_norm: Tensor | float | None  # of the last step, before clipping

    @property
    def output(self) -> Any:
        """The output of the last training step, structured as the model's own."""

    def train_step(self, batch: Batch) -> Tensor:
        """Do one optimizer step in training mode; return the loss of the full batch."""

    def eval_step(self, batch: Batch) -> Any:
        """Return the model's output for the full batch in eval mode, the same on every rank."""

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Return full gradients of trainable parameters as the last step left them (clipped)."""

    def input_gradients(self) -> Mapping[str, Tensor | None] | None:
        """Return gradients of the batch's float tensors by key; None if not available."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return full parameters and buffers."""

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Return full optimizer state, by parameter and slot."""

    def trainable(self) -> Iterable[str]:
        """Return the names of the parameters that the optimizer updates."""

    def replicas(self) -> Mapping[str, float] | None:
        """Return the largest relative difference between copies of each tensor; None if unknown."""


@dataclass(frozen=True)
class Condition:
    """One training run: fresh parameters, an optimizer, a clip norm, and a batch for each step.

    scale     factor of the loss
    evaluate  train in eval mode: no dropout, fixed statistics
    follow    float inputs require gradients; otherwise they stay as training gives them
    final     also record the state after the last step
    case      the case to run, if it differs from the proof's (some parameters frozen)
    """

    name: str
    optimizer: MakeOptimizer
    batches: tuple[Batch, ...]
    clip: float | None = None
    scale: float = 1.0
    evaluate: bool = False
    follow: bool = True
    final: bool = True
    case: Any = None


def standard_conditions(
    batches: Sequence[Batch], norm: float, varied: Sequence[Batch] = ()
) -> tuple[Condition, ...]:
    """Return the standard conditions: SGD without effective clipping, and AdamW with clipping.

    SGD shows the scale of gradients; AdamW shows counts and the gradient norm. `norm` is the
    original's gradient norm for the first batch. AdamW runs on `varied` if given, with inputs as
    training gives them: an input without a gradient takes other code paths (recomputed regions,
    hooks on inputs, stages that send no gradient back).
    """
    return (
        Condition("SGD", _sgd, tuple(batches), 1e6 * norm),
        Condition("AdamW, clipped", _adamw, tuple(varied or batches), norm / 4, follow=False),
    )


def _sgd(named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    return torch.optim.SGD(_groups(named), lr=0.01, momentum=0.9)


def _adamw(named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    # with torch's default eps, roundings of a zero gradient would be magnified
    return torch.optim.AdamW(_groups(named), lr=0.003, eps=1e-5)


def _groups(named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Make two parameter groups, with and without weight decay, by name: layouts do not matter."""
    halves: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in named:
        halves[sum(name.encode()) % 2].append((name, parameter))
    groups: list[dict[str, Any]] = [
        {"params": members, "weight_decay": decay} for members, decay in zip(halves, (0.0, 0.1))
    ]
    return [group for group in groups if group["params"]]


class Key(NamedTuple):
    """Key of a tensor: condition, kind, name, and the step after which it was observed."""

    condition: str
    kind: str
    step: int
    name: str


@dataclass(frozen=True)
class Observation:
    """Everything that was observed. A tensor that should exist but does not is None."""

    tensors: MutableMapping[Key, Tensor | None] = field(default_factory=dict)
    sets: dict[Key, frozenset[str]] = field(default_factory=dict)
    replicas: dict[Key, float] = field(default_factory=dict)
    # the number of random streams of masks, and their faults, if known
    streams: dict[Key, tuple[int, list[str]]] = field(default_factory=dict)
    # parameters in the order in which backward finished their gradients
    order: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    missing: set[str] = field(default_factory=set)  # kinds that the subject does not offer
    unread: set[str] = field(default_factory=set)  # non-tensor types in the output
    left_out: dict[str, str] = field(default_factory=dict)  # place in the output -> why
    # of discrete operators, if recorded
    choices: Mapping[Any, Tensor] = field(default_factory=dict)
    # codes of activations midway between two codes, if recorded
    tipped: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def observe(
    make: Callable[[Condition], Subject],
    conditions: Iterable[Condition],
    *,
    keep: bool = True,
    folder: str | None = None,
    brief: bool = False,
) -> Observation:
    """Run each condition on a fresh subject and return the observation.

      keep    record; False on ranks other than the first, which only take part
      brief   record computed tensors, parameters and buffers, no other state
      folder  write large tensors to files there, and read them on access
    The caller enters the function modes of the comparison (float64, logical dropout).
    """
    observed = Observation(MappedTensors(folder)) if folder is not None else Observation()
    order: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    for condition in conditions:
        with generators_restored():
            torch.manual_seed(0)  # so that draws from torch's generator show in its state
            subject = make(condition)
            recorder = _Recorder(observed, condition.name, condition.follow, keep, brief)
            for step, batch in enumerate(condition.batches):
                recorder.step(subject, step, batch)
                report_progress({"condition": condition.name, "step": step})
            if condition.final:
                recorder.end(subject, len(condition.batches) - 1, condition.batches[0])
        order = order or tuple(getattr(subject, "order", ()))
        ties = ties or tuple(getattr(subject, "ties", ()))
        del subject, recorder  # before another is made
        if folder is not None:
            release_memory()
    return replace(observed, order=order, ties=ties)


@dataclass
class _Recorder:
    """Recorder of one condition."""

    seen: Observation
    condition: str
    follow: bool
    keep: bool
    brief: bool = False

    def step(self, subject: Subject, step: int, batch: Batch) -> None:
        """Train one step and record it.

        The first step also records the output before it, and names and state after it.
        """
        if step == 0:
            self.outputs("outputs", step, subject, subject.eval_step(batch))
        self.tensor("loss", step, "loss", subject.train_step(batch))
        self.outputs("training outputs", step, subject, getattr(subject, "output", None))
        norm = subject.grad_norm
        if norm is None:
            self.seen.missing.add("gradient norm")
        else:
            self.tensor("gradient norm", step, "norm", norm)
        self.tensors("gradients", step, subject.gradients())
        input_gradients = subject.input_gradients() if self.follow else {}
        if input_gradients is None:
            self.seen.missing.add("input gradients")
        else:
            self.tensors("input gradients", step, input_gradients)
        if step == 0:
            self.state(subject, step)

    def end(self, subject: Subject, step: int, batch: Batch) -> None:
        """Record the state after the last step: output, parameters, optimizer, random draws.

        State is read after an evaluation, because an evaluation may change it (an embedding with
        `max_norm`).
        """
        self.outputs("outputs", step + 1, subject, subject.eval_step(batch))
        if step or not self.brief:
            self.state(subject, step)
        if not self.brief:
            for name, slots in subject.optimizer_state().items():
                for slot, value in slots.items():
                    self.tensor(f"optimizer {slot}", step, name, value)
        if self.brief:
            return
        self.tensors("generator state", step, self.asked(subject, "generators", "generator state"))
        if draws := self.asked(subject, "draws", "dropout draws"):
            self.names("dropout draws", draws)
        if self.keep and hasattr(subject, "streams") and (streams := subject.streams())[0]:
            self.seen.streams[Key(self.condition, DISTINCT_DRAWS, step, "")] = streams

    def state(self, subject: Subject, step: int) -> None:
        """Record parameters, buffers, and differences between copies on ranks."""
        trainable = set(subject.trainable())
        state = subject.state_dict()
        if step == 0 and not self.brief:
            self.names("trainable set", trainable)
            self.names("state_dict keys", state)
        for name, value in state.items():
            self.tensor("parameters" if name in trainable else "other state", step, name, value)
        hidden = self.asked(subject, "buffers", HIDDEN_BUFFERS)
        self.tensors(HIDDEN_BUFFERS, step, {k: v for k, v in hidden.items() if k not in state})
        copies = subject.replicas() if not self.brief else {}
        if copies is None:
            self.seen.missing.add("replicas")
        elif self.keep:
            for name, error in copies.items():
                self.seen.replicas[Key(self.condition, "replicas", step, name)] = error

    def asked(self, subject: Any, question: str, kind: str) -> Any:
        """Call an optional method of a subject; without it, mark the kind as missing."""
        if hasattr(subject, question):
            return getattr(subject, question)()
        self.seen.missing.add(kind)
        return {}

    def outputs(self, kind: str, step: int, subject: Subject, output: Any) -> None:
        """Record the tensors and numbers of an output, and what the output leaves out."""
        self.tensors(kind, step, dict(flatten_output(output, self.seen.unread)))
        self.seen.left_out.update(getattr(subject, "left_out", {}))

    def tensors(self, kind: str, step: int, values: Mapping[str, Tensor | None]) -> None:
        """Record several tensors of one kind, by name."""
        for name, value in values.items():
            self.tensor(kind, step, name, value)

    def tensor(self, kind: str, step: int, name: str, value: Any) -> None:
        """Record a copy of one tensor or number, or None."""
        if not self.keep:
            return
        if value is not None:
            # a copy: the next step, or the other side, may change the tensor
            if isinstance(value, float):
                value = torch.tensor(value, dtype=torch.float64)
            value = torch.as_tensor(value).detach().to("cpu", copy=True)
        self.seen.tensors[Key(self.condition, kind, step, name)] = value

    def names(self, kind: str, names: Iterable[str]) -> None:
        """Record a set of names."""
        if self.keep:
            self.seen.sets[Key(self.condition, kind, 0, "")] = frozenset(names)


def flatten_output(value: Any, unread: set[str]) -> Iterable[tuple[str, Any]]:
    """Yield the tensors and numbers of an output by path; name other types in `unread`."""
    for path, leaf in tree_flatten_with_path(value)[0]:
        if isinstance(leaf, (Tensor, int, float)):
            yield dotted_path(path) or "output", leaf
        elif leaf is not None and not isinstance(leaf, str):
            unread.add(type(leaf).__name__)
