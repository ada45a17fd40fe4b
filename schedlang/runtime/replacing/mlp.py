"""A gated MLP whose middle is one kernel: its projections stay modules and are called as ever.

Which child is what, and which activation stands between them, is found by running a bare float64
copy; so it works for modules of any class, and sharded or quantised projections stay theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.kernels.gated import ACTIVATIONS, Case, gated, packed, reference
from schedlang.kernels.probe import TOLERANCE, Mismatch, bare_copy, one_input, relative
from schedlang.runtime.float64 import Float64
from schedlang.runtime.forward import the_input
from schedlang.runtime.modes import ambient

_WIDE = 2**22  # numbers of a weight from which on its gradient is not computed to be compared


@dataclass(frozen=True)
class Gated:
    """down(act(gate(x)) * up(x)); one projection for both is `gate`, and `up` then None.

    `size` is the width of the middle; `gate_first` the order in a packed one.  `between` is a child
    that the product goes through before down: a dropout, or a norm.
    """

    gate: str
    up: str | None
    down: str
    act: str
    size: int
    gate_first: bool = True
    between: str | None = None

    def cases(self) -> list[Case]:
        """Runs of the kernel in the form that was found."""
        pack = "" if self.up else "gate first" if self.gate_first else "up first"
        size = min(self.size, 4096)
        return [
            Case((rows, size), dtype, self.act, pack)
            for dtype, rows in (("float32", 5), ("bfloat16", 5), ("float32", 1))
        ]


def probe_gated(module: nn.Module) -> Gated | Mismatch:
    """The gated MLP that a module is, or the measured reason why it is none."""
    linear = {n: m for n, m in module.named_children() if _shape(m) is not None}
    refused = _structure(module, linear)
    if refused:
        return Mismatch(refused)
    more = one_input(module)
    if more:
        return more
    copied = bare_copy(module, torch.float64)
    for parameter in copied.parameters():  # around zero: activations must show
        parameter.data.sub_(1.0).mul_(3.0 / parameter.shape[-1] ** 0.5)
    with torch.random.fork_rng(devices=[]), ambient(Float64):
        try:
            plain = list(_forms(copied, list(linear)))
            return _nearest(copied, [
                replace(form, between=name) for name in _between(copied, linear) for form in plain
            ])  # fmt: skip
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            said = f"{type(raised).__name__}: {raised}".splitlines()[0]
            return Mismatch(f"does not run on rows alone: {said}")


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a projection; None for anything else."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = module._parameters.get("weight")
    if type(module).__name__ == "Conv1D" and weight is not None and weight.ndim == 2:
        return weight.shape[0], weight.shape[1]
    return None


def _structure(module: nn.Module, linear: dict[str, nn.Module]) -> str | None:
    held = {name for name, _ in module.named_parameters()}
    own = {f"{n}.{p}" for n, m in linear.items() for p, _ in m.named_parameters(recurse=False)}
    for name in _between(module, linear):
        own |= {n for n in held if name is not None and n.startswith(f"{name}.")}
    if len(linear) not in (2, 3):
        return f"has {len(linear)} projections, and a gated MLP has three, or two with one packed"
    if held - own:
        return f"has other parameters than those of its projections: {min(held - own)}"
    if next(module.buffers(), None) is not None:
        return "keeps buffers, and a gated MLP keeps none"
    if "forward" in vars(module):
        return "had its forward replaced already"
    return None


def _between(module: nn.Module, linear: dict[str, nn.Module]) -> list[str | None]:
    """Children that the product may go through before the last projection: a dropout, if any, or
    the one child that has parameters and is no projection."""
    others = {n: m for n, m in module.named_children() if n not in linear}
    whole = [n for n, m in others.items() if next(m.parameters(), None) is not None]
    drops = [n for n, m in others.items() if isinstance(m, nn.Dropout)]
    return [*whole] if len(whole) == 1 else [*drops, None]


def _forms(module: nn.Module, names: list[str]) -> Iterator[Gated]:
    """Every gated MLP that the shapes of these projections allow."""
    shapes = {name: _shape(module.get_submodule(name)) or (0, 0) for name in names}
    for gate, *rest, down in itertools.permutations(names):
        middle = shapes[down][0]
        for act in ACTIVATIONS:
            if rest and shapes[gate] == shapes[rest[0]] == (shapes[gate][0], middle):
                yield Gated(gate, rest[0], down, act, middle)
            if not rest and shapes[gate][1] == 2 * middle:
                yield Gated(gate, None, down, act, middle)
                yield Gated(gate, None, down, act, middle, gate_first=False)


def _nearest(module: nn.Module, forms: list[Gated]) -> Gated | Mismatch:
    if not forms:
        return Mismatch("has projections whose shapes are not those of a gated MLP")
    width = _shape(module.get_submodule(forms[0].gate)) or (0, 0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, width[0], generator=generator, dtype=torch.float64, device="cpu")
    errors = dict.fromkeys(forms, 0.0)
    computed: dict[Gated, Tensor] = {}
    for training in (True, False):
        with torch.no_grad():
            y = _seeded(module.train(training), x)
            if not isinstance(y, Tensor):
                return Mismatch(f"gives {type(y).__name__}, not a tensor")
            if not computed or any(form.between for form in forms):
                computed = _all_computed(module, forms, x)
        errors = {form: max(errors[form], _apart(y, computed[form])) for form in forms}
    best = min(forms, key=lambda form: errors[form])
    if not errors[best] <= TOLERANCE:
        return Mismatch(f"differs from a gated MLP (nearest: {best.act})", errors[best])
    error = _gradient_distance(module.train(), best, x)
    if not error <= TOLERANCE:
        return Mismatch(f"equals a gated MLP by {best.act}, but its gradients differ", error)
    return best


def _seeded(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    """What is given for x, with the same random numbers each time."""
    torch.manual_seed(0)
    return call(x)


def _apart(y: Tensor, expected: Tensor) -> float:
    error = relative(y, expected)
    return error if error == error else float("inf")


def _all_computed(module: nn.Module, forms: list[Gated], x: Tensor) -> dict[Gated, Tensor]:
    """Each of several forms; a projection reads its weights once, for wide ones take seconds."""
    made: dict[Gated, Tensor] = {}
    for down in {form.down: None for form in forms}:
        some = [form for form in forms if form.down == down]
        known = {name: module.get_submodule(name)(x) for name in _before(some)}
        middles = [
            _passed(module, _middle(known[f.gate], known.get(f.up or ""), f), f) for f in some
        ]
        made.update(zip(some, module.get_submodule(down)(torch.stack(middles))))
    return made


def _before(forms: list[Gated]) -> set[str]:
    return {name for form in forms for name in (form.gate, form.up) if name is not None}


def _computed(module: nn.Module, form: Gated, x: Tensor, kernel: bool = False) -> Tensor:
    """down(act(gate) * up) by the module's own projections."""
    first = module.get_submodule(form.gate)(x)
    second = None if form.up is None else module.get_submodule(form.up)(x)
    middle = _middle(first, second, form, kernel)
    if form.between is not None:
        middle = module.get_submodule(form.between)(middle)
    made: Tensor = module.get_submodule(form.down)(middle)
    return made


def _passed(module: nn.Module, middle: Tensor, form: Gated) -> Tensor:
    """The product, through what stands between, with the same random numbers each time."""
    between = form.between
    return middle if between is None else _seeded(module.get_submodule(between), middle)


def _middle(first: Tensor, second: Tensor | None, form: Gated, kernel: bool = False) -> Tensor:
    """act(gate) * up, of the two or of what holds both."""
    if second is not None:
        return (gated if kernel else reference)(first, second, form.act)
    if kernel:
        return packed(first, form.act, form.gate_first)
    left, right = first.chunk(2, -1)
    gate, up = (left, right) if form.gate_first else (right, left)
    return reference(gate, up, form.act)


def _gradient_distance(module: nn.Module, form: Gated, x: Tensor) -> float:
    """How far gradients differ: of the input, and of all parameters, or of what decides of them.

    Where both call each projection once, the gradient of its weight is that of what it gave times
    what it was given: of wide MLPs, whose weights take seconds, these are compared.
    """
    leaf = x.clone().requires_grad_()
    called: list[_Called] = [{}, {}]
    both = []
    runs: list[Callable[[Tensor], Tensor]] = [module, partial(_computed, module, form)]
    for calls, run in zip(called, runs):
        with _calls(module, calls):
            both.append(_seeded(run, leaf))
    if not both[0].requires_grad:
        return float("inf")
    once = [len(some) == 1 for calls in called for some in calls.values()]
    alike = called[0].keys() == called[1].keys() == _before([form]) | {form.down}
    wide = max(p.numel() for p in module.parameters()) > _WIDE
    if wide and alike and all(once):
        order = sorted(called[0])
        inner = [] if form.between is None else [*module.get_submodule(form.between).parameters()]
        leaves = [[leaf, *inner, *(calls[n][0][1] for n in order)] for calls in called]
        given = [[calls[n][0][0].detach() for n in order] for calls in called]
    else:
        leaves, given = [[leaf, *module.parameters()]] * 2, [[], []]
    grad = torch.linspace(-1, 1, both[0].numel(), dtype=x.dtype).view(both[0].shape)
    found, exact = (
        torch.autograd.grad(y, some, grad, allow_unused=True) for y, some in zip(both, leaves)
    )
    return max(
        float("inf") if a is None or b is None else relative(a, b)
        for a, b in zip((*found, *given[0]), (*exact, *given[1]), strict=True)
    )


_Called = dict[str, list[tuple[Tensor, Tensor]]]  # by child what it was given, and what it gave


@contextmanager
def _calls(module: nn.Module, into: _Called) -> Iterator[None]:
    """Note the calls of a module's children."""

    def note(name: str, child: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        if _shape(child) is not None:
            into.setdefault(name, []).append((given[0], made))

    hooks = [c.register_forward_hook(partial(note, n)) for n, c in module.named_children()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class GatedMlp:
    """The layer that computes a gated MLP from the module's own projections and one kernel."""

    kernel = "gated"

    def __init__(self, module: nn.Module, form: Gated) -> None:
        self.module, self.form = module, form

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute for the one input; `inner` is not called."""
        return _computed(self.module, self.form, the_input(self.module, args, kwargs), kernel=True)
