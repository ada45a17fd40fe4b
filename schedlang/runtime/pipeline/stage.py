"""One stage of a model by replay: the model's own forward, units of other stages skipped."""

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

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.runtime import scope
from schedlang.runtime.batch import called, loss_of
from schedlang.runtime.kept_outside import kept_outside
from schedlang.runtime.mixed_precision import as_in, imitated
from schedlang.runtime.modes import outside
from schedlang.runtime.rng.logical_dropout import Alone
from schedlang.runtime.scope import capture, named_sites, skip_calls, visit, visiting
from schedlang.runtime.storage.saved import policies
from schedlang.runtime.tracing.graph import Cut, Token, refusal
from schedlang.runtime.tracing.meta import meta_batch, meta_model, on_meta, tensors_in
from schedlang.runtime.tracing.units import Switch, Tell, overheard, tell

# ---- Random draws of a call that is not made here: counted, so that later calls draw their own.


class Counted:
    """Counts draws by site; what they give has a shape and no meaning."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """A mask of `shape` that drops nothing."""
        self.calls[scope.site()] += 1
        return torch.ones(tuple(shape), dtype=torch.bool, device=device)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Numbers of `shape` in [0, 1)."""
        self.calls[scope.site()] += 1
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


# ---- One stage of a model by replay: the model's own forward, with the units of other stages
# stubbed.
# A unit of an earlier stage returns what was received, and something of the right shape where
# nothing was needed; the first unit of a later stage ends the forward.


Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]


SIMPLE = (int, float, bool, str, type(None), torch.dtype)


class StageEnd(BaseException):
    """Raised by the first unit of a later stage; not an Exception, so no model catches it."""


class Forwarded(NamedTuple):
    """The results of one forward of a stage.

    `made` are the values for other stages, without history; `edges` where their gradients enter.
    `output` and `loss` are those of the model, on the last stage only.
    """

    made: Mapping[Token, torch.Tensor]
    edges: Mapping[Token, GradientEdge]
    output: Any = None
    loss: torch.Tensor | None = None


class Order:
    """Watches that units are called once each, in the order of the record (S614).

    A forward that goes another way would take values from units that never sent them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.due = names, 0

    def next(self, unit: int) -> None:
        """The unit that is called; the number of units where the forward ends."""
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
class _Told:
    """The arguments of one hook inside of a unit: the leaves of an output and of its arguments."""

    name: str
    hook: int
    leaves: list[Any]
    spec: Any
    given: list[Any]
    given_spec: Any


# by unit, default and autocast's dtype, training flag, signature of the arguments: leaves of the
# output, their structure, draws by site, what hooks are told, the leaves that are arguments it has
# written into
_Made = tuple[list[Any], Any, Mapping[str, int], list[_Told], frozenset[int]]
Outputs = Mapping[Any, _Made]


def _travels(made: _Made) -> bool:
    leaves, _, _, told, _ = made
    every = [*leaves, *(leaf for one in told for leaf in (*one.leaves, *one.given))]
    return all(type(leaf) is Tensor or type(leaf) in SIMPLE for leaf in every)


def _hidden(name: str) -> Refusal:
    """A unit of another stage has written into what it was given, which the recorded forward, that
    of training, does not do: nobody has sent it."""
    return refusal(
        "S610",
        name,
        "writes into a tensor that it is given, and did not when the model was recorded",
        "let it keep no state in evaluation: `config.use_cache = False`",
        "or keep the modules that share it in one stage: cut elsewhere",
        note="evaluation takes another way than training, on which no stage sends this tensor",
    )


class Recorded:
    """The outputs of units that a recorded forward showed, for stand-ins of a model in that state.

    In another state, with other dtypes or training flags, units may give something else.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.of, self.outputs = _state(model), dict[Any, _Made]()
        units = [model.get_submodule(name) for name in names]
        self._training = [unit.training for unit in units]
        self._drops = [_drops_all(unit) for unit in units]

    def __call__(
        self, unit: int, given: Any, leaves: list[Any], spec: Any, written: frozenset[int]
    ) -> None:
        """Note what a unit gives for these arguments."""
        made = [leaf.detach() if type(leaf) is Tensor else leaf for leaf in leaves]
        found: _Made = made, spec, {}, [], written
        if _travels(found) and not self._drops[unit]:
            self.outputs[_key(unit, self._training[unit], given, "meta")] = found

    def known_of(self, model: nn.Module) -> Outputs:
        """Return what holds for a model: nothing if it is in another state."""
        return self.outputs if _state(model) == self.of else {}


def _drops_all(unit: nn.Module) -> bool:
    """Return whether a mask may be counted in a unit for which torch draws no numbers: with p=1."""
    found = (getattr(module, name, 0) for module in unit.modules() for name in ("p", "dropout"))
    return any(type(p) in (int, float) and p == 1 for p in found)


def _state(model: nn.Module) -> Any:
    tensors = (*model.parameters(), *model.buffers())
    return [t.dtype for t in tensors], [module.training for module in model.modules()]


def _key(unit: int, training: bool, given: Any, device: str) -> Any:
    casts = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if casts else None
    args, kwargs = given
    named = _signature(kwargs) if kwargs else None
    each = [(x.shape, x.dtype) if type(x) is Tensor else _signature(x) for x in args]
    # float64 is the default while a proof computes in it
    return unit, torch.get_default_dtype(), dtype, training, named, *each


def _watched() -> bool:
    return torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack() > 0


class Stub:
    """Knows the output of every unit for every shape of its arguments, by running it on meta.

    `known` is what another one of the same preparation has found. `copied` makes, once something is
    not known, the copy of `reference` that is run; None: it is on meta itself.
    """

    def __init__(
        self,
        reference: nn.Module,
        cut: Cut,
        known: Outputs | None = None,
        copied: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.names, self._units = cut.graph.labels, cut.graph.units
        self._copied = copied or (lambda: reference)
        self.training = tuple(reference.get_submodule(name).training for name in self._units)
        self.leaves = cut.graph.leaves
        self._known = dict(known or {})
        self._blank: dict[Any, Tensor] = {}
        # of units that give one tensor and do nothing else: its token, and what stands in for it
        self._alone: dict[Any, tuple[Token, Tensor | None]] = {}
        self._outside = capture()  # a run for shapes draws no masks and counts no calls

    @cached_property
    def units(self) -> tuple[nn.Module, ...]:
        """The units, without values."""
        with outside():
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
        kept: AbstractContextManager[None] | None = None,
    ) -> Any:
        """The unit's output: the received leaves, something of their shape for the others."""
        key = _key(unit, self.training[unit], (args, kwargs), device.type)
        if key in self._alone:  # as almost always
            token, blank = self._alone[key]
            if token in received:
                return received[token]
            if blank is not None and blank.device == device and not _watched():
                return blank.detach()
        known = self._known.get(key)
        if known is None:
            with kept or kept_outside(module), imitated(device.type):
                known = self._known[key] = self._shapes(unit, args, kwargs, module)
        leaves, spec, draws, told, written = known
        if written and any((unit, k) not in {**self.leaves, **received} for k in written):
            raise _hidden(self.names[unit])
        for site, times in draws.items():
            skip_calls(site, times)
        if told and any(source == unit and k < 0 for source, k in received):
            self._tell(module, unit, told, received)
        made = [
            received[(unit, k)] if (unit, k) in received else self._unknown(unit, k, leaf, device)
            for k, leaf in enumerate(leaves)
        ]
        if type(output := pytree.tree_unflatten(made, spec)) is Tensor:
            own = self.leaves.get(token := (unit, 0))
            if not (draws or told or written or own is None or own.mutated):
                blank = self._blank.get((output.dtype, output.shape, device))
                self._alone[key] = token, blank
        return output

    def meet(self, switch: Switch, model: nn.Module, batch: Mapping[str, Any], last: int) -> None:
        """Find the outputs of all units before `last` for this part of a batch.

        The model's own forward runs, its units do not: what lies between them makes their
        arguments. `switch` stands before the units of `model`.
        """
        device = _device(batch)

        def handle(unit: int, original: Any, args: Any, kwargs: Any) -> Any:
            if unit >= last:
                raise StageEnd
            return self(unit, args, kwargs, {}, device, switch.modules[unit], nullcontext())

        with kept_outside(model), switch.using(handle), suppress(StageEnd):
            called(model, batch)

    @property
    def found(self) -> Outputs:
        """All that was found and means the same in another process."""
        return {key: made for key, made in self._known.items() if _travels(made)}

    def _tell(
        self, owner: nn.Module, unit: int, told: list[_Told], received: Mapping[Token, torch.Tensor]
    ) -> None:
        """Call the hooks inside of a unit that runs elsewhere with what its stage has sent."""
        place, device = -1, next(iter(received.values())).device
        for one in told:
            made = []
            for leaf in one.leaves:
                token = (unit, place)
                known = token in received
                made.append(received[token] if known else self._unknown(unit, place, leaf, device))
                place -= 1
            given = [self._unknown(unit, None, leaf, device) for leaf in one.given]
            module = owner.get_submodule(one.name)
            output = pytree.tree_unflatten(made, one.spec)
            tell(module, one.hook, pytree.tree_unflatten(given, one.given_spec), output)

    def _unknown(self, unit: int, k: int | None, leaf: Any, device: Any) -> Any:
        """Return a stand-in for a leaf that nothing reads: NaN, so that a reader is seen; no
        memory.  It is made once, but for modes that know tensors by who made them."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dtype, shape = leaf.dtype, leaf.shape
        known = self.leaves.get((unit, k)) if k is not None else None
        written = k is not None and (known is None or known.mutated)
        key, alone = (dtype, shape, device), written or _watched()
        if not alone and (blank := self._blank.get(key)) is not None:
            return blank.detach()
        number = math.nan if dtype.is_floating_point else 0
        made = torch.full(shape if written else (), number, dtype=dtype, device=device)
        # what stands for many cannot be written into, unlike one number
        if not alone and leaf.numel() > 1 and not made.is_meta:
            self._blank[key] = made.expand(shape)
        return made.expand(shape)

    def _shapes(self, unit: int, args: Any, kwargs: Any, module: nn.Module) -> _Made:
        counted, told = Counted(), list[_Told]()

        def heard(name: str, hook: int, call: Tell, given: Any, output: Any) -> None:
            told.append(
                _Told(name, hook, *pytree.tree_flatten(output), *pytree.tree_flatten(given))
            )

        try:
            part = visit()
            shapes = visiting(part.on_meta() if part is not None else None)
            with ExitStack() as stack:
                modes = (
                    torch.no_grad(),
                    self._outside(),
                    shapes,
                    torch.device("meta"),
                    on_meta((), ()),
                    as_in(module, self.units[unit]),  # casts of modules around it
                )
                for mode in modes:
                    stack.enter_context(mode)
                # what is inside may be called again from elsewhere, and draws what comes after
                stack.enter_context(Alone(counted))
                stack.enter_context(overheard(self.units[unit], heard, hooked=module))
                given = meta_batch(args), meta_batch(kwargs)
                before = [(t, t._version) for t in tensors_in(given)]
                output = self.units[unit](*given[0], **given[1])
        except (RuntimeError, NotImplementedError) as error:
            name, reason = self.names[unit], "has an output whose shape depends on data"
            raise refusal("S612", name, reason, note=str(error)) from error
        leaves, spec = pytree.tree_flatten(output)
        changed = {id(t) for t, version in before if t._version != version}
        written = frozenset(k for k, leaf in enumerate(leaves) if id(leaf) in changed)
        return leaves, spec, counted.calls, told, written


class Stage:
    """A stage of a cut model on this rank.

    `model` is the local module: parameters of other stages may be anything (meta, say), they are
    never touched. `switch` stands before the units of `model`; the stages of one rank share it.
    `stub` comes from a whole model on meta. `loss(output, batch)` where the model gives none.
    `split=False` lets I do the whole backward and W nothing: for stages with recomputed or
    gathered weights, where every part of a backward would recompute or gather again. `late` names
    the parameters whose gradients W computes, the others are done by I; None: all are late.
    `through` runs a forward of a stage whose weights are gathered.

    `incoming` and `outgoing` are the values that are exchanged with other stages, by stage;
    `returned` and `awaited` those of them whose gradients go back and come back.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        index: int,
        *,
        switch: Switch | None = None,
        stub: Stub | None = None,
        loss: Loss | None = None,
        split: bool = True,
        late: Collection[str] | None = None,
        through: Callable[[Callable[[], Forwarded]], Forwarded] | None = None,
    ) -> None:
        self.model, self.cut, self.index, self.loss, self.split = model, cut, index, loss, split
        self.through = through
        self._late = None if late is None else {id(p) for p in _named(model, late)}
        last = cut.stage_of[-1]
        self.whole, self.last = last == 0, index == last
        routes = {} if self.whole else cut.routes
        self.incoming = {e[0]: tokens for e, tokens in routes.items() if e[1] == index}
        self.outgoing = {e[1]: tokens for e, tokens in routes.items() if e[0] == index}
        self.returned = {end: self._back(tokens) for end, tokens in self.incoming.items()}
        self.awaited = {end: self._back(tokens) for end, tokens in self.outgoing.items()}
        self.wanted = frozenset(t for tokens in self.outgoing.values() for t in tokens)
        # units that later stages need something of; and those, from what hooks inside are told
        self.giving = frozenset(unit for unit, _ in self.wanted)
        self.telling = frozenset(unit for unit, k in self.wanted if k < 0)
        if not self.whole:
            self.units = cut.units(index)
            self.switch = switch or Switch(model, cut.graph.units)
            self.stub = stub or Stub(meta_model(model, {}), cut)

    def waits(self, weight: torch.Tensor) -> bool:
        """Return whether the gradient of a weight is left to W."""
        return self._late is None or id(weight) in self._late

    def _back(self, tokens: Sequence[Token]) -> tuple[Token, ...]:
        """Return those values for which gradients come back."""
        return tuple(token for token in tokens if self.differentiable(token))

    def mutated(self, token: Token) -> bool:
        """Return whether the model writes into this value."""
        return self.cut.graph.leaves[token].mutated

    def differentiable(self, token: Token) -> bool:
        """Return whether gradients come back for this value."""
        return self.cut.graph.leaves[token].differentiable

    def forward(
        self,
        batch: Mapping[str, Any],
        received: Mapping[Token, torch.Tensor],
        train: bool = True,
    ) -> Forwarded:
        """Forward of one microbatch; `received` holds every token of `incoming`.

        Where nothing is trained the loss function is not called: there may be no labels, and it
        may write into the output.
        """
        if self.whole:
            return self._ended(called(self.model, batch), batch, train, {}, {})
        if self.through is None:
            return self._replayed(batch, received, train)
        return self.through(lambda: self._replayed(batch, received, train))

    def _ended(
        self,
        output: Any,
        batch: Mapping[str, Any],
        train: bool,
        made: dict[Token, torch.Tensor],
        edges: dict[Token, GradientEdge],
    ) -> Forwarded:
        """The result of the last stage: the output, and in training the loss."""
        loss = loss_of(output, batch, self.loss) if train else None
        return Forwarded(made, edges, output, loss)

    def _replayed(
        self, batch: Mapping[str, Any], received: Mapping[Token, torch.Tensor], train: bool
    ) -> Forwarded:
        """The model's own forward, of which the units of this stage are run."""
        made: dict[Token, torch.Tensor] = {}
        edges: dict[Token, GradientEdge] = {}
        device = _device(batch)
        order, first, end = Order(self.cut.graph.labels), self.units.start, self.units.stop

        def handle(unit: int, original: Any, args: Any, kwargs: Any) -> Any:
            order.next(unit)
            if unit < first:
                if order.due == first:
                    policies.replayed = False
                module = self.switch.modules[unit]
                return self.stub(unit, args, kwargs, received, device, module)
            if unit >= end:
                raise StageEnd
            if unit not in self.giving:
                return original(*args, **kwargs)
            with self._heard(unit, made, edges) if unit in self.telling else nullcontext():
                output = original(*args, **kwargs)
            self._capture(unit, output, made, edges)
            return output

        before, policies.replayed = policies.replayed, first > 0
        try:
            with self.switch.using(handle):
                try:
                    output = called(self.model, batch)
                except StageEnd:
                    return Forwarded(made, edges)
                order.next(len(self.cut.graph.units))
                return self._ended(output, batch, train, made, edges)
        finally:
            policies.replayed = before

    def _capture(
        self,
        unit: int,
        output: Any,
        made: dict[Token, torch.Tensor],
        edges: dict[Token, GradientEdge],
    ) -> None:
        leaves = (output,) if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        for k, leaf in enumerate(leaves):
            self._send((unit, k), leaf, made, edges)

    def _send(
        self,
        token: Token,
        leaf: Any,
        made: dict[Token, torch.Tensor],
        edges: dict[Token, GradientEdge],
    ) -> None:
        if token not in self.wanted:
            return
        if leaf.requires_grad:
            edges[token] = get_gradient_edge(leaf)  # as it is now: it may be written into
        value = leaf.detach()
        made[token] = value.clone() if self.cut.graph.leaves[token].mutated else value

    @contextmanager
    def _heard(
        self, unit: int, made: dict[Token, torch.Tensor], edges: dict[Token, GradientEdge]
    ) -> Iterator[None]:
        """Listen to what hooks inside of a unit are told, as other stages need it."""
        sides = count(1)

        def heard(name: str, hook: int, call: Tell, given: Any, output: Any) -> Any:
            for leaf in pytree.tree_leaves(output):
                self._send((unit, -next(sides)), leaf, made, edges)
            return call(given, output)

        with overheard(self.model.get_submodule(self.cut.graph.units[unit]), heard):
            yield


class _Enter(torch.autograd.Function):
    """A received tensor as a value of the graph: no leaf and no view, so it may be written into."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def enter(leaf: torch.Tensor) -> torch.Tensor:
    """Return what the model gets for a received leaf."""
    if not leaf.requires_grad:
        return leaf
    entered: torch.Tensor = _Enter.apply(leaf)  # type: ignore[no-untyped-call]
    return entered


def _named(model: nn.Module, names: Collection[str]) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name in names]


def _device(batch: Mapping[str, Any]) -> torch.device:
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            return value.device
    for value in pytree.tree_leaves(dict(batch)):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def signature(batch: Mapping[str, Any]) -> Any:
    """Return what shapes depend on: shapes and dtypes of tensors, other values as they are."""
    return _signature(dict(batch))


def _signature(tree: Any) -> Any:
    """Return the signature: plain nests by hand, many times faster than a flattening by pytree."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return (tree.shape, tree.dtype)
    if kind is tuple or kind is list:
        # most are nests of tensors: these without a call for each
        return (kind, *[(x.shape, x.dtype) if type(x) is Tensor else _signature(x) for x in tree])
    if kind is dict:
        return (kind, *tree, *_signature([*tree.values()]))
    if kind in SIMPLE:
        return (kind, tree)
    leaves, spec = pytree.tree_flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return kind
    return (str(spec), *map(_signature, leaves))
