"""Parameters of which other ranks hold other parts, in loops of a user: who holds the same, norms.

A norm of gradients is that of the full ones on every rank, if all ranks take it together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.comm import world
from schedlang.runtime.loop_terms import name_of_gradient
from schedlang.runtime.storage.offloaded_gradients import local_tensor

_PLACE = "_schedlang_place"
_held: WeakSet[nn.Parameter] = WeakSet()  # parameters of which other ranks hold other parts


@dataclass
class _Place:
    """The assembly and name of a parameter; a file of the parameter lacks them.

    The parameter does not keep the groups of a program that ended.
    """

    assembly: ref[Assembly]
    name: str

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # `torch.load` takes it also with `weights_only`


def note_parts(a: Assembly) -> bool:
    """Note the parameters of which other ranks hold other parts; return whether there are any."""
    found = False
    for name, parameter in a.parameters.items():
        if a.holdings[name].layout.splits or a.holdings[name].sliced:
            found = True
            if _PLACE not in vars(parameter):  # a WeakSet compares what is added again
                setattr(parameter, _PLACE, _Place(ref(a), name))
                _held.add(parameter)
    return found


def held_with(is_same: Callable[[Tensor], bool]) -> nn.Parameter | None:
    """Return the first such parameter of which it, or its gradient, is a tensor; None for none."""
    for parameter in [*_held]:
        values = (value for value in (parameter, parameter.grad) if value is not None)
        if vars(parameter)[_PLACE].assembly() is not None and any(map(is_same, values)):
            return parameter
    return None


def hold_alike(parameter: nn.Parameter, ranks: Iterable[int]) -> bool:
    """Return whether ranks hold the same part of a parameter as this one."""
    place = vars(parameter)[_PLACE]
    a: Any = place.assembly()  # of `held_with`: it lives
    mesh, holding = a.ranks.mesh, a.holdings[place.name]
    own = holding.segments(mesh, a.ranks.rank)
    return all(holding.segments(mesh, rank) == own for rank in ranks if rank < mesh.world)


def full_norm(
    norm: Callable[..., Tensor], gradients: Sequence[Tensor], kind: Any = 2.0, *options: Any
) -> Tensor:
    """Return the norm of the full gradients of which some are a rank's parts.

    Each element of a part counts once, though several ranks hold it. All ranks call it together.
    norm  that of tensors which a rank has in full
    """
    places = {id(p.grad): vars(p)[_PLACE] for p in [*_held] if p.grad is not None}
    places = {key: place for key, place in places.items() if place.assembly() is not None}
    parts = [gradient for gradient in gradients if id(gradient) in places]
    power = float(kind)
    if not parts:
        return norm(gradients, kind, *options)
    a: Any = places[id(parts[0])].assembly()
    counted = [p for p in parts if places[id(p)].name in a.primary_parameters]
    own = norm([local_tensor(p).as_subclass(Tensor) for p in counted], kind)
    first = local_tensor(parts[0])
    own = own.to(device=first.device, dtype=torch.promote_types(first.dtype, torch.float32))
    largest = power == torch.inf
    total = own if largest else own**power
    world.all_reduce(total, a.ranks.world.group, largest=largest)
    whole = [g for g in gradients if id(g) not in places]
    whole.append((total if largest else total ** (1 / power)).to(first.dtype))
    return norm(whole, kind, *options)


def checked_norm(
    norm: Callable[..., Tensor], gradients: Sequence[Tensor], kind: Any = 2.0, *options: Any
) -> Tensor:
    """Return the norm of full gradients, in a loop that has the module; all ranks take it together.

    Raises Refusal S622 elsewhere, where the norm would be that of this rank's shards only: hooks of
    steps do not run on ranks that train nothing; and for kinds that are no norms (0, -inf).
    """
    name, own = name_of_gradient(gradients), {*map(id, gradients)}
    if not float(kind) > 0:
        if name is None:
            return norm(gradients, kind, *options)
    elif name is None or held_with(lambda value: id(value) in own) is not None:
        return full_norm(norm, gradients, kind, *options)
    raise Refusal.of(
        "S622",
        "the norm would be that of this rank's gradients only",
        notes=(f"this rank has a shard of `{name}`; other ranks have other shards and norms",),
        helps=(
            "`build(clip=1.0)`: a step clips by the norm of all gradients",
            "`program.grad_norm` is that norm, after a step",
        ),
    ).at(python_span())
