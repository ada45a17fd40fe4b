"""A stage of a model by replay: the model's own forward, with units of other stages skipped.

The executor of a pipeline calls `Stage`; `Stub` makes the outputs of units that run elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.runtime import scope
from schedlang.runtime.adapters.torch_tensor import version_of
from schedlang.runtime.batch import loss_of, run_model
from schedlang.runtime.device import is_meta
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.mixed_precision import cast_like, imitate_autocast
from schedlang.runtime.modes import without_modes
from schedlang.runtime.rng.logical_dropout import SourceMode
from schedlang.runtime.scope import (
    capture_scope,
    current_visit,
    enter_slice,
    named_sites,
    skip_calls,
)
from schedlang.runtime.storage.saved_tensors_slot import policies
from schedlang.runtime.tracing.meta_runs import meta_batch, meta_model, on_meta, tensors_in
from schedlang.runtime.tracing.stage_graph import StageSplit, Token, refusal
from schedlang.runtime.tracing.units import CallHook, CallSwitch, call_foreign_hook, intercept_hooks

# ---- Random draws of a call that does not run here: counted, so that later calls draw as usual.


class DrawCounter:
    """Counter of random draws by call site; its masks drop nothing: only shapes are used."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """Return a mask of `shape` that drops nothing."""
        self.calls[scope.current_site()] += 1
        return torch.ones(tuple(shape), dtype=torch.bool, device=device)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros of `shape`, where the model draws numbers in [0, 1)."""
        self.calls[scope.current_site()] += 1
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


# ---- One stage of a model by replay: the model's own forward, with stubs for other units.
# A unit of an earlier stage returns what was received, and something of the right shape where
# nothing was needed; the first unit of a later stage ends the forward.


Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]
SIMPLE = (int, float, bool, str, type(None), torch.dtype)


class StageEnd(BaseException):
    """Raised by the first unit of a later stage; not an Exception, so no model catches it."""


class ForwardResult(NamedTuple):
    """The results of one forward of a stage.

    `values` are the values for other stages, detached; `edges` are the graph edges where their
    gradients enter. `output` and `loss` are those of the model, on the last stage only.
    """

    values: Mapping[Token, torch.Tensor]
    edges: Mapping[Token, GradientEdge]
    output: Any = None
    loss: torch.Tensor | None = None


class CallOrder:
    """Checks that each unit is called once, in the order of the recorded forward (S614).

    A forward that calls units in another order would use values from units that never sent them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.due = names, 0

    def check(self, unit: int) -> None:
        """Check the unit that is called now; the number of units stands for the end."""
        if unit == self.due:
            self.due += 1
            return
        if unit < self.due:
            reason = "is called again, but was not when the model was recorded"
            raise refusal("S614", self.names[unit], reason, *self.HELPS)
        reason = "is not called, but was when the model was recorded"
        raise refusal("S614", self.names[self.due], reason, *self.HELPS)

    HELPS = (
        "stages are built for one sequence of calls: let every batch make the same calls",
        "or keep it in one stage with the module that calls it: cut at another module",
    )


@dataclass(frozen=True)
class _HookCall:
    """A call of a hook inside a unit: the leaves of its output, then of its arguments."""

    name: str
    hook: int
    leaves: list[Any]
    spec: Any


# Key: unit, default dtype, autocast's dtype, training flag, signature of the arguments.
# Value: leaves of the output, their structure, draws by site, calls of hooks, indices of the output
# leaves that are arguments into which the unit has written.
_UnitOutput = tuple[list[Any], Any, Mapping[str, int], list[_HookCall], frozenset[int]]
Outputs = Mapping[Any, _UnitOutput]


def _is_transferable(output: _UnitOutput) -> bool:
    leaves, _, _, hook_calls, _ = output
    values = [*leaves, *(leaf for call in hook_calls for leaf in call.leaves)]
    return all(type(leaf) is Tensor or type(leaf) in SIMPLE for leaf in values)


def is_same_for_equal_units(output: _UnitOutput) -> bool:
    """Return whether outputs of a unit are those of any equal unit with arguments of the same
    shapes: nothing in them names the unit's modules."""
    _, _, draws, hook_calls, written = output
    return _is_transferable(output) and not (draws or hook_calls or written)


def _hidden_write(name: str) -> Refusal:
    """Return the refusal of a write by a unit of another stage into one of its arguments: the
    recorded training forward does not write there, so no stage sends the written tensor."""
    return refusal(
        "S610",
        name,
        "changes an input in place, but did not when the model was recorded",
        "let it keep no state in evaluation: `config.use_cache = False`",
        "or keep the modules that share it in one stage: cut elsewhere",
        note="evaluation runs other code than training, and there no stage sends this tensor",
    )


class RecordedOutputs:
    """The outputs of units that a recorded forward showed, for stubs of a model in the same state.

    In another state (dtypes, training flags), units may return other outputs.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.of, self.outputs = _model_state(model), dict[Any, _UnitOutput]()
        units = [model.get_submodule(name) for name in names]
        self._training = [unit.training for unit in units]
        self._unsafe = [_drops_all(unit) for unit in units]

    def __call__(
        self, unit: int, arguments: Any, leaves: list[Any], spec: Any, written: frozenset[int]
    ) -> None:
        """Store the output of a unit for these arguments."""
        detached = [leaf.detach() if type(leaf) is Tensor else leaf for leaf in leaves]
        unit_output: _UnitOutput = detached, spec, {}, [], written
        if _is_transferable(unit_output) and not self._unsafe[unit]:
            self.outputs[_key(unit, self._training[unit], arguments, "meta")] = unit_output

    def outputs_for(self, model: nn.Module) -> Outputs:
        """Return the outputs that are valid for a model: none if the model is in another state."""
        return self.outputs if _model_state(model) == self.of else {}


def _drops_all(unit: nn.Module) -> bool:
    """Return whether a unit has dropout with p=1: torch draws no numbers, a dry run a mask."""
    rates = (getattr(module, name, 0) for module in unit.modules() for name in ("p", "dropout"))
    return any(type(p) in (int, float) and p == 1 for p in rates)


def _model_state(model: nn.Module) -> Any:
    tensors = (*model.parameters(), *model.buffers())
    return [t.dtype for t in tensors], [module.training for module in model.modules()]


def _key(unit: int, training: bool, arguments: Any, device: str) -> Any:
    casts = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if casts else None
    args, kwargs = arguments
    kwargs_signature = _signature(kwargs) if kwargs else None
    arg_signatures = [(x.shape, x.dtype) if type(x) is Tensor else _signature(x) for x in args]
    # float64 is the default while a proof computes in it
    return unit, torch.get_default_dtype(), dtype, training, kwargs_signature, *arg_signatures


def _is_observed() -> bool:
    return torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack() > 0


class Stub:
    """Returns the output of a unit that runs on another stage, for each shape of its arguments.

    An output that is not known yet is found by running the unit on the meta device. `outputs` holds
    outputs that another stub of the same preparation has found. `copied` makes the copy of
    `reference` that is run, when the first unknown output is needed; None: `reference` itself is on
    meta.
    """

    def __init__(
        self,
        reference: nn.Module,
        cut: StageSplit,
        outputs: Outputs | None = None,
        copied: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.names, self._units = cut.graph.labels, cut.graph.units
        self._copied = copied or (lambda: reference)
        self.training = tuple(reference.get_submodule(name).training for name in self._units)
        self.leaves = cut.graph.leaves
        self._known = dict(outputs or {})
        self._placeholders: dict[Any, Tensor] = {}
        # of units that return one tensor and do nothing else: its token, and its placeholder
        self._single_outputs: dict[Any, tuple[Token, Tensor | None]] = {}
        self._outside = capture_scope()  # a run on meta draws no masks and counts no calls

    @cached_property
    def units(self) -> tuple[nn.Module, ...]:
        """The units, on the meta device."""
        with without_modes():
            reference = self._copied()
        named_sites(reference)
        return tuple(reference.get_submodule(name) for name in self._units)

    def __call__(
        self,
        unit: int,
        args: Any,
        kwargs: Any,
        received: Mapping[Token, torch.Tensor],
        device: torch.device,
        module: nn.Module,
        context: AbstractContextManager[None] | None = None,
    ) -> Any:
        """Return the output of a unit: received leaves, and placeholders for all others."""
        key = _key(unit, self.training[unit], (args, kwargs), device.type)
        if key in self._single_outputs:  # as almost always
            token, blank = self._single_outputs[key]
            if token in received:
                return received[token]
            if blank is not None and blank.device == device and not _is_observed():
                return blank.detach()
        unit_output = self._known.get(key)
        if unit_output is None:
            with context or restore_global_state(module), imitate_autocast(device.type):
                unit_output = self._known[key] = self._run_on_meta(unit, args, kwargs, module)
        leaves, spec, draws, hook_calls, written = unit_output
        if written and any((unit, k) not in {**self.leaves, **received} for k in written):
            raise _hidden_write(self.names[unit])
        for site, times in draws.items():
            skip_calls(site, times)
        if hook_calls and any(source == unit and k < 0 for source, k in received):
            self._call_hooks(module, unit, hook_calls, received)
        filled = [
            received[(unit, k)] if (unit, k) in received else self._filler(unit, k, leaf, device)
            for k, leaf in enumerate(leaves)
        ]
        if type(output := pytree.tree_unflatten(filled, spec)) is Tensor:
            leaf_info = self.leaves.get(token := (unit, 0))
            if not (draws or hook_calls or written or leaf_info is None or leaf_info.mutated):
                blank = self._placeholders.get((output.dtype, output.shape, device))
                self._single_outputs[key] = token, blank
        return output

    def find_outputs(
        self, switch: CallSwitch, model: nn.Module, batch: Mapping[str, Any], last: int
    ) -> None:
        """Find the outputs of all units before `last` for one part of a batch.

        The model's own forward runs, but its units do not: the code between the units makes their
        arguments. `switch` wraps the units of `model`.
        """
        device = _batch_device(batch)

        def handle(unit: int, original: Any, args: Any, kwargs: Any) -> Any:
            if unit >= last:
                raise StageEnd
            return self(unit, args, kwargs, {}, device, switch.modules[unit], nullcontext())

        with restore_global_state(model), switch.using(handle), suppress(StageEnd):
            run_model(model, batch)

    @property
    def portable_outputs(self) -> Outputs:
        """All outputs found so far that mean the same in another process."""
        return {key: output for key, output in self._known.items() if _is_transferable(output)}

    def _call_hooks(
        self,
        owner: nn.Module,
        unit: int,
        hook_calls: list[_HookCall],
        received: Mapping[Token, torch.Tensor],
    ) -> None:
        """Call the hooks inside a unit of another stage with the values that its stage sent."""
        sides, device = count(1), next(iter(received.values())).device
        for call in hook_calls:
            values = []
            for leaf in call.leaves:
                token = (unit, -next(sides))
                arrived = token in received
                values.append(
                    received[token] if arrived else self._filler(unit, token[1], leaf, device)
                )
            output, arguments = pytree.tree_unflatten(values, call.spec)
            call_foreign_hook(owner.get_submodule(call.name), call.hook, arguments, output)

    def _filler(self, unit: int, k: int, leaf: Any, device: Any) -> Any:
        """Return a placeholder for a leaf that nothing may read: NaN without memory: a read shows.

        Placeholders are cached, except under modes that tell tensors apart by their operation.
        """
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dtype, shape = leaf.dtype, leaf.shape
        leaf_info = self.leaves.get((unit, k))
        written = leaf_info is None or leaf_info.mutated
        if is_meta(device) and dtype.is_floating_point and not written:
            # no value, and no operator: a real run shares one placeholder, and fills it once
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return torch.empty((), dtype=dtype, device=device).expand(shape)
        key, unshared = (dtype, shape, device), written or _is_observed()
        if not unshared and (blank := self._placeholders.get(key)) is not None:
            return blank.detach()
        number = math.nan if dtype.is_floating_point else 0
        placeholder = torch.full(shape if written else (), number, dtype=dtype, device=device)
        # an expanded placeholder cannot be written into, a tensor of one number can
        if not unshared and leaf.numel() > 1 and not placeholder.is_meta:
            self._placeholders[key] = placeholder.expand(shape)
        return placeholder.expand(shape)

    def _run_on_meta(self, unit: int, args: Any, kwargs: Any, module: nn.Module) -> _UnitOutput:
        counted, hook_calls = DrawCounter(), list[_HookCall]()

        def on_hook(name: str, hook: int, call: CallHook, arguments: Any, output: Any) -> None:
            hook_calls.append(_HookCall(name, hook, *pytree.tree_flatten((output, arguments))))

        try:
            part = current_visit()
            shapes = enter_slice(part.on_meta() if part is not None else None)
            with ExitStack() as stack:
                modes = (
                    torch.no_grad(),
                    self._outside(),
                    shapes,
                    torch.device("meta"),
                    on_meta((), ()),
                    cast_like(module, self.units[unit]),  # casts of modules around it
                )
                for mode in modes:
                    stack.enter_context(mode)
                # modules inside may be called again from elsewhere, and must draw the next numbers
                stack.enter_context(SourceMode(counted))
                stack.enter_context(intercept_hooks(self.units[unit], on_hook, hooked=module))
                arguments = meta_batch(args), meta_batch(kwargs)
                versions = [(t, version_of(t)) for t in tensors_in(arguments)]
                output = self.units[unit](*arguments[0], **arguments[1])
        except (RuntimeError, NotImplementedError) as error:
            name, reason = self.names[unit], "has an output whose shape depends on data"
            raise refusal("S612", name, reason, note=str(error)) from error
        leaves, spec = pytree.tree_flatten(output)
        changed = {id(t) for t, version in versions if version_of(t) != version}
        written = frozenset(k for k, leaf in enumerate(leaves) if id(leaf) in changed)
        return leaves, spec, counted.calls, hook_calls, written


class Stage:
    """A stage of a split model on this rank.

    `model` is the local module: its forward never touches the parameters of other stages, so these
    may be anything (on meta, say). `switch` wraps the units of `model`; all stages of one rank
    share it. `stub` is built from a full model on meta. `loss(output, batch)` is used where the
    model returns no loss. `split=False` lets I do the full backward and W nothing: for stages with
    recomputed or gathered weights, where each half of a backward would recompute or gather again.
    `late` names the parameters whose gradients W computes; I computes the others; None: W computes
    all. `through` runs a forward of a stage whose weights are gathered.

    `incoming` and `outgoing` are the tokens that are exchanged with other stages, by stage;
    `returned` and `awaited` are those of them whose gradients are sent back and received.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: StageSplit,
        index: int,
        *,
        switch: CallSwitch | None = None,
        stub: Stub | None = None,
        loss: Loss | None = None,
        split: bool = True,
        late: Collection[str] | None = None,
        through: Callable[[Callable[[], ForwardResult]], ForwardResult] | None = None,
    ) -> None:
        self.model, self.cut, self.index, self.loss, self.split = model, cut, index, loss, split
        self.through = through
        self._late = None if late is None else {id(p) for p in _parameters_named(model, late)}
        last = cut.stage_of[-1]
        self.whole, self.last = last == 0, index == last
        routes = {} if self.whole else cut.routes
        self.incoming = {e[0]: tokens for e, tokens in routes.items() if e[1] == index}
        self.outgoing = {e[1]: tokens for e, tokens in routes.items() if e[0] == index}
        self.returned = {end: self._with_grad(tokens) for end, tokens in self.incoming.items()}
        self.awaited = {end: self._with_grad(tokens) for end, tokens in self.outgoing.items()}
        self.sent_tokens = frozenset(t for tokens in self.outgoing.values() for t in tokens)
        # units with an output that later stages need, and units with such an argument of a hook
        self.senders = frozenset(unit for unit, _ in self.sent_tokens)
        self.hook_units = frozenset(unit for unit, k in self.sent_tokens if k < 0)
        if not self.whole:
            self.units = cut.units(index)
            self.switch = switch or CallSwitch(model, cut.graph.units)
            self.stub = stub or Stub(meta_model(model, {}), cut)

    def is_deferred(self, weight: torch.Tensor) -> bool:
        """Return whether the gradient of a weight is left to W."""
        return self._late is None or id(weight) in self._late

    def _with_grad(self, tokens: Sequence[Token]) -> tuple[Token, ...]:
        """Return the tokens that get a gradient."""
        return tuple(token for token in tokens if self.differentiable(token))

    def mutated(self, token: Token) -> bool:
        """Return whether the model writes into this value."""
        return self.cut.graph.leaves[token].mutated

    def differentiable(self, token: Token) -> bool:
        """Return whether this value gets a gradient."""
        return self.cut.graph.leaves[token].differentiable

    def forward(
        self, batch: Mapping[str, Any], received: Mapping[Token, Tensor], train: bool = True
    ) -> ForwardResult:
        """Run the forward of one microbatch; `received` holds every token of `incoming`.

        Without training the loss is not called: there may be no labels, and it may write into the
        output.
        """
        if self.whole:
            return self._last_result(run_model(self.model, batch), batch, train, {}, {})
        if self.through is None:
            return self._replay(batch, received, train)
        return self.through(lambda: self._replay(batch, received, train))

    def _last_result(
        self,
        output: Any,
        batch: Mapping[str, Any],
        train: bool,
        sent: dict[Token, torch.Tensor],
        edges: dict[Token, GradientEdge],
    ) -> ForwardResult:
        """Return the result of the last stage: the output, and in training the loss."""
        loss = loss_of(output, batch, self.loss) if train else None
        return ForwardResult(sent, edges, output, loss)

    def _replay(
        self, batch: Mapping[str, Any], received: Mapping[Token, torch.Tensor], train: bool
    ) -> ForwardResult:
        """Run the model's own forward, with only the units of this stage."""
        sent: dict[Token, torch.Tensor] = {}
        edges: dict[Token, GradientEdge] = {}
        device = _batch_device(batch)
        order, begin, end = CallOrder(self.cut.graph.labels), self.units.start, self.units.stop

        def handle(unit: int, original: Any, args: Any, kwargs: Any) -> Any:
            order.check(unit)
            if unit < begin:
                if order.due == begin:
                    policies.replayed = False
                module = self.switch.modules[unit]
                return self.stub(unit, args, kwargs, received, device, module)
            if unit >= end:
                raise StageEnd
            if unit not in self.senders:
                return original(*args, **kwargs)
            with self._catch_hooks(unit, sent, edges) if unit in self.hook_units else nullcontext():
                output = original(*args, **kwargs)
            self._capture(unit, output, sent, edges)
            return output

        previous, policies.replayed = policies.replayed, begin > 0
        try:
            with self.switch.using(handle):
                try:
                    output = run_model(self.model, batch)
                except StageEnd:
                    return ForwardResult(sent, edges)
                order.check(len(self.cut.graph.units))
                return self._last_result(output, batch, train, sent, edges)
        finally:
            policies.replayed = previous

    def _capture(
        self, unit: int, output: Any, sent: dict[Token, Tensor], edges: dict[Token, GradientEdge]
    ) -> None:
        leaves = (output,) if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        for k, leaf in enumerate(leaves):
            self._send((unit, k), leaf, sent, edges)

    def _send(
        self, token: Token, leaf: Any, sent: dict[Token, Tensor], edges: dict[Token, GradientEdge]
    ) -> None:
        if token not in self.sent_tokens:
            return
        if leaf.requires_grad:
            edges[token] = get_gradient_edge(leaf)  # taken now: the leaf may be written into later
        value = leaf.detach()
        sent[token] = value.clone() if self.cut.graph.leaves[token].mutated else value

    @contextmanager
    def _catch_hooks(
        self, unit: int, sent: dict[Token, torch.Tensor], edges: dict[Token, GradientEdge]
    ) -> Iterator[None]:
        """Capture what hooks inside a unit are given, because other stages need it."""
        sides = count(1)

        def on_hook(name: str, hook: int, call: CallHook, arguments: Any, output: Any) -> Any:
            for leaf in pytree.tree_leaves((output, arguments)):
                self._send((unit, -next(sides)), leaf, sent, edges)
            return call(arguments, output)

        with intercept_hooks(self.model.get_submodule(self.cut.graph.units[unit]), on_hook):
            yield


class _GraphInput(torch.autograd.Function):
    """A received tensor as a value of the graph: no leaf and no view, so it may be written into."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def as_graph_input(leaf: torch.Tensor) -> torch.Tensor:
    """Return the tensor that the model gets for a received leaf."""
    if not leaf.requires_grad:
        return leaf
    entered: torch.Tensor = _GraphInput.apply(leaf)  # type: ignore[no-untyped-call]
    return entered


def _parameters_named(model: nn.Module, names: Collection[str]) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name in names]


def _batch_device(batch: Mapping[str, Any]) -> torch.device:
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            return value.device
    for value in pytree.tree_leaves(dict(batch)):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def signature(batch: Mapping[str, Any]) -> Any:
    """Return all that shapes depend on: shapes and dtypes of tensors, other values themselves."""
    return _signature(dict(batch))


def _signature(tree: Any) -> Any:
    """Return the signature: plain nests by hand, many times faster than a flattening by pytree."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return (tree.shape, tree.dtype)
    if kind is tuple or kind is list:
        # most nests hold tensors only: no call for each
        return (kind, *[(x.shape, x.dtype) if type(x) is Tensor else _signature(x) for x in tree])
    if kind is dict:
        return (kind, *tree, *_signature([*tree.values()]))
    if kind in SIMPLE:
        return (kind, tree)
    leaves, spec = pytree.tree_flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return kind
    return (str(spec), *map(_signature, leaves))
