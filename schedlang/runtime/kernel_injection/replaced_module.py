"""Replace modules by modules of the user (`replace`); parameters keep their names and values.

The replacement uses the parameters of the module that it replaces. Either both have the same
parameter names, or the user gives a mapping from each new name to one or more old names. With a
mapping, the old names stay in the model, and the parameters are passed to the replacement at each
call, concatenated along dim 0 where there are several.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from schedlang.diagnostics.diagnostic import Refusal, quote_names
from schedlang.runtime.parameter_changes import on_same_storage
from schedlang.runtime.tracing.meta_runs import copy_with

# new name -> the old name, or names, that it is made of
ParameterMapping = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class ReplaceModules:
    """A change of a model: replace modules by what `make` gives for each.

    sites  names of the modules
    name   name of the replacement, for messages
    make   a module, copied for each site; or a function of the replaced module that returns a
           module, or a pair of a module and its `ParameterMapping`
    """

    sites: tuple[str, ...]
    name: str
    make: Any

    rewrites: ClassVar[bool] = True  # a proof compares with the original without this change

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return the changed copy, on the same storage."""
        twin = copy_with(module, lambda name, old: on_same_storage(old), lambda tensor: tensor)
        for fqn in self.sites:
            old = twin.get_submodule(fqn)
            new = fit_replacement(fqn, old, self.name, self.make)
            for holder in twin.modules():
                for local, child in list(holder._modules.items()):
                    if child is old:
                        holder._modules[local] = new
        return twin


class BareParameters(nn.Module):
    """A module tree with parameters only, under their names, and no forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in module.named_children():
            self.add_module(name, BareParameters(child))


class JoinedParameters(BareParameters):
    """A replacement whose parameters are joined from those of the replaced module, under the old
    names."""

    def __init__(self, old: nn.Module, inner: nn.Module, names: ParameterMapping) -> None:
        super().__init__(old)
        # not a child module: its own parameters have neither values nor names in the model. Last,
        # because this also empties a child taken over from `old`, whose parameters are registered
        # by now
        self.__dict__["inner"] = inner.to("meta")
        self.names = {
            name: (sources,) if isinstance(sources, str) else tuple(sources)
            for name, sources in names.items()
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement on its joined parameters."""
        held = dict(self.named_parameters(remove_duplicate=False))
        parameters = {
            key: _concatenate([held[name] for name in sources])
            for key, sources in self.names.items()
        }
        inner = self.__dict__["inner"].train(self.training)
        return functional_call(inner, parameters, args, kwargs)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def fit_replacement(fqn: str, old: nn.Module, name: str, make: Any) -> nn.Module:
    """Make the replacement of a module, with its parameters; refuse (S881) one that does not
    fit."""
    new, names = _make_replacement(fqn, old, name, make)
    _check_call(fqn, old, new, name)
    _move_buffers(new, old)
    new.train(old.training)
    if names is not None:
        return _with_mapping(fqn, old, new, names, name)
    _check_names(
        fqn, name, "parameter", _shapes(old.named_parameters), _shapes(new.named_parameters)
    )
    for key, parameter in old.named_parameters(remove_duplicate=False):
        owner, _, local = key.rpartition(".")
        new.get_submodule(owner)._parameters[local] = parameter
    _take_buffers(fqn, name, old, new)
    return new


def _make_replacement(
    fqn: str, old: nn.Module, name: str, make: Any
) -> tuple[nn.Module, ParameterMapping | None]:
    if isinstance(make, nn.Module):
        return copy.deepcopy(make), None
    try:
        with torch.random.fork_rng(devices=[]):
            result = make(old)
    except Exception as error:  # the user's own code may raise anything; the message has its words
        message = f"{type(error).__name__}: {error}".split("\n")[0]
        raise misfit_refusal(fqn, name, f"its function raised `{message}`") from error
    new, names = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(new, nn.Module):
        raise misfit_refusal(fqn, name, f"its function returns {type(new).__name__}, not a module")
    if new is old:
        raise misfit_refusal(fqn, name, "its function returns the module that it should replace")
    return new, names


def misfit_refusal(fqn: str, name: str, *notes: str, helps: Sequence[str] = ()) -> Refusal:
    """Return the refusal S881."""
    return Refusal.of("S881", f"`{name}` cannot replace `{fqn}`", notes=notes, helps=tuple(helps))


def _shapes(named_tensors: Callable[..., Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(remove_duplicate=False)}


def _check_names(
    fqn: str, name: str, kind: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    missing, extra = [n for n in old if n not in new], [n for n in new if n not in old]
    reshaped = [n for n in old if n in new and old[n] != new[n]]
    notes = []
    if missing:
        notes.append(f"it has no {kind} {quote_names(missing, 4)}")
    if extra:
        notes.append(f"it has a {kind} {quote_names(extra, 4)}, which the model does not have")
    notes += [
        f"`{n}` is {list(old[n])} in the model and {list(new[n])} in it" for n in reshaped[:3]
    ]
    if notes:
        pair = f'{{"{(extra or ["its_name"])[0]}": "{(missing or ["name"])[0]}"}}'
        helps = ("use the same names", f"or return a mapping of names: `return module, {pair}`")
        raise misfit_refusal(fqn, name, *notes, helps=helps if kind == "parameter" else ())


def _with_mapping(
    fqn: str, old: nn.Module, new: nn.Module, names: ParameterMapping, name: str
) -> nn.Module:
    """Return the replacement with a mapping of names; each old parameter must be used once."""
    old_parameters = dict(old.named_parameters(remove_duplicate=False))
    mapping = {
        alias: (sources,) if isinstance(sources, str) else tuple(sources)
        for alias, sources in names.items()
    }
    for key in old_parameters:
        if not any(key in sources for sources in mapping.values()) and key in dict(
            new.named_parameters()
        ):
            mapping.setdefault(key, (key,))
    used = [key for sources in mapping.values() for key in sources]
    unknown = [key for key in used if key not in old_parameters]
    if unknown:
        raise misfit_refusal(
            fqn, name, f"its mapping names {quote_names(unknown, 4)}, which the model does not have"
        )
    used_names = dict.fromkeys(used)
    new_shapes = {
        alias: _joined_shape([tuple(old_parameters[k].shape) for k in sources])
        for alias, sources in mapping.items()
    }
    _check_names(fqn, name, "parameter", {k: 0 for k in old_parameters}, {k: 0 for k in used_names})
    _check_names(fqn, name, "parameter", new_shapes, _shapes(new.named_parameters))
    if any(True for _ in new.buffers()) or any(True for _ in old.buffers()):
        raise misfit_refusal(
            fqn, name, "buffers cannot be renamed", helps=("use the same names for parameters",)
        )
    return JoinedParameters(old, new, mapping).train(old.training)


def _joined_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    first = shapes[0]
    if any(shape[1:] != first[1:] for shape in shapes):
        return (-1,)
    return (sum(shape[0] for shape in shapes), *first[1:]) if first else first


def _take_buffers(fqn: str, name: str, old: nn.Module, new: nn.Module) -> None:
    """Move buffers of the state dict to the replacement; its other buffers stay."""
    keys = [set(module.state_dict()) for module in (old, new)]
    shapes = [_shapes(module.named_buffers) for module in (old, new)]
    saved_shapes = [{k: v for k, v in b.items() if k in s} for b, s in zip(shapes, keys)]
    _check_names(fqn, name, "buffer of the state dict", *saved_shapes)
    values = dict(old.named_buffers(remove_duplicate=False))
    for key in saved_shapes[0]:
        owner, _, local = key.rpartition(".")
        new.get_submodule(owner)._buffers[local] = values[key]


def _move_buffers(new: nn.Module, old: nn.Module) -> None:
    """Move the replacement's buffers to the parameters' device, and to float64 if the parameters
    are."""
    first_param = next(old.parameters(), None)
    if first_param is None or first_param.is_meta:
        return
    is_float64 = first_param.dtype == torch.float64
    for module in new.modules():
        for local, buffer in module._buffers.items():
            if buffer is not None:
                kind = torch.float64 if is_float64 and buffer.is_floating_point() else buffer.dtype
                module._buffers[local] = buffer.to(first_param.device, kind)


def _check_call(fqn: str, old: nn.Module, new: nn.Module, name: str) -> None:
    """Refuse a replacement whose forward cannot be called with the old one's arguments."""
    old_params, new_params = _arguments(old), _arguments(new)
    kinds = inspect.Parameter
    param_kinds = {p.kind for p in new_params.values()}
    free = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    notes = []
    names = [n for n, p in new_params.items() if p.kind not in free]
    for index, (key, parameter) in enumerate(old_params.items()):
        if parameter.kind in free:
            continue
        if key not in new_params and kinds.VAR_KEYWORD not in param_kinds:
            notes.append(f"its forward takes no `{key}`")
        elif (
            key in names and parameter.kind is not kinds.KEYWORD_ONLY and names.index(key) != index
        ):
            notes.append(
                f"`{key}` is argument {names.index(key) + 1} of its forward, not {index + 1}"
            )
    for key in names:
        if key not in old_params and new_params[key].default is kinds.empty:
            notes.append(f"its forward needs `{key}`, which the model does not pass")
    if notes:
        signature = ", ".join(str(p) for p in old_params.values())
        raise misfit_refusal(
            fqn, name, *notes, helps=(f"take the same arguments: `def forward(self, {signature})`",)
        )


def _arguments(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(module.forward).parameters)
