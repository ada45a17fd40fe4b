"""The fingerprint of a program: items that must be equal on all ranks before it is built."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from schedlang.passes.lower.build import Options
    from schedlang.runtime.checkpointing.holdings import Holding
    from schedlang.runtime.comm.agreement import AgreementItem

_OPTIONS = ("clip", "seed", "dropout", "local", "compare")  # options of `build`, shown by value
_NUMBERS = (bool, int, float, str)
_OWN_TO_A_RANK = ("rank", "device", "host", "node", "pid", "path", "dir", "file")


def program_items(
    plan: Plan, batch: Mapping[str, Any], build_options: Options
) -> list[AgreementItem]:
    """Return the items of which a program is built; messages name the first different item."""
    import torch

    import schedlang
    from schedlang.runtime.comm.agreement import AgreementItem

    model = plan.model.model
    versions = {
        "schedlang": schedlang.__version__,
        "torch": str(torch.__version__).partition("+")[0],
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    mesh = {
        "mesh": str(plan.mesh),
        "axes": str(dict(plan.mesh.sizes)),
        "views": str(plan.mesh.views),
    }
    options = {name: repr(getattr(build_options, name)) for name in _OPTIONS}
    options["optimizer"] = "None" if build_options.optimizer is None else "a function"
    kinds = {
        name: f"{value.dtype}, {value.dim()} dims"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for name, value in sorted(batch.items())
    }
    same_model = "build the model from the same file and config on every rank"
    seed = "use the same seed before the model is built: `torch.manual_seed(0)`"
    return [
        AgreementItem("version", versions, helps=("install the same on all nodes",)),
        AgreementItem("mesh", mesh),
        AgreementItem("model", dict(_module_items(plan)), helps=(same_model,)),
        AgreementItem(
            "code of the model",
            dict(_code_items(model)),
            readable=False,
            helps=("check that all nodes have the same files",),
        ),
        AgreementItem(
            "schedule",
            dict(_row_items(plan)),
            helps=("load the same file, with the same knobs, on every rank",),
        ),
        AgreementItem("options of `build`", options),
        AgreementItem(
            "functions",
            {"loss": code_digest(build_options.loss), "weight": code_digest(build_options.weight)},
            readable=False,
            helps=("give the same `loss` and `weight` on every rank",),
        ),
        AgreementItem("batch to build from", kinds),
        AgreementItem(
            "initial weights",
            dict(_weight_items(model, plan.model.base.model, build_options)),
            readable=False,
            helps=(seed, "or load the same checkpoint on every rank"),
        ),
    ]


def optimizer_items(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]
) -> list[AgreementItem]:
    """Return one item: the optimizer and its settings for each parameter that this rank trains.

    `names` maps ids of parameters to names. Ranks of other stages have other parameters, or none.
    """
    from schedlang.runtime.comm.agreement import AgreementItem

    if optimizer is None:
        return [AgreementItem("optimizer", {}, partial=True)]
    parts = {"class": type(optimizer).__qualname__} | _plain_settings(
        getattr(optimizer, "defaults", {})
    )
    for group in optimizer.param_groups:
        settings = _plain_settings(
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
        )
        unusual = {k: v for k, v in settings.items() if parts.get(k) != v}
        text = ", ".join(f"{k} {v}" for k, v in unusual.items()) or "as usual"
        parts |= {names[id(p)]: text for p in group["params"] if id(p) in names}
    help_ = "build it with the same settings on every rank"
    return [AgreementItem("optimizer", parts, partial=True, helps=(help_,))]


def check_optimizer_settings(
    plan: Plan, axis: str | None, holdings: Mapping[str, Holding], make: Callable[..., Any]
) -> None:
    """Refuse (S622) optimizer settings that depend on the order or the sizes of parameters.

    A stage has another list of parameters, and a rank has smaller shards. The optimizer is made
    from meta tensors: once from all full parameters, and once from the parameters of each stage of
    `axis`. An optimizer that rejects meta tensors is not checked.
    """
    from schedlang.runtime.tracing.meta_runs import meta_parameter

    model = dict(plan.model.model.named_parameters())
    trained = [n for n in holdings if n in model and model[n].requires_grad]

    def stand_in(name: str, rank: int | None) -> Any:
        if rank is None or not holdings[name].layout.splits:
            return meta_parameter(model[name])
        unsliced = replace(holdings[name], sliced=())  # slices are DTensors, which have full sizes
        return meta_parameter(model[name], unsliced.local_shape(plan.mesh, rank))

    def settings(names: Iterable[str], rank: int | None = None) -> Mapping[str, str]:
        named_parameters = [(name, stand_in(name, rank)) for name in names]
        items = optimizer_items(make(named_parameters), {id(p): n for n, p in named_parameters})
        parts: Mapping[str, str] = items[0].parts
        return parts  # the defaults are among them

    changed: dict[str, tuple[str, str]] = {}
    with suppress(Exception):  # its errors are reported when the real optimizer is made
        full = settings(trained)
        for position in range(1 if axis is None else plan.mesh.size(axis)):
            coordinates = dict.fromkeys(plan.mesh.sizes, 0) | (
                {} if axis is None else {axis: position}
            )
            stages = ((n, holdings[n].stages) for n in trained)
            local_names = [
                n for n, stage_set in stages if stage_set is None or position in stage_set
            ]
            local = settings(local_names, plan.mesh.rank(coordinates))
            changed |= {n: (full[n], text) for n, text in local.items() if full.get(n) != text}
    for name, (first, second) in changed.items():
        subject = f"settings of `{name}` follow" if name in model else f"default `{name}` follows"
        raise Refusal.of(
            "S622",
            f"the optimizer's {subject} from its index among the parameters, or from their sizes",
            notes=(f"{first} among all full parameters; {second} among the shards of a rank",),
            helps=(
                'choose groups by the names: `[p for name, p in named if "bias" in name]`',
                "take sizes from the model: `dict(model.named_parameters())[name].shape`",
            ),
        )


def _plain_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text, without functions; a tensor (a captured learning rate) by value."""
    return {name: repr(_number(value)) for name, value in settings.items() if not callable(value)}


def _number(value: Any) -> Any:
    """Return a tensor of one element, or a number of numpy, as a plain number."""
    single = hasattr(value, "item") and math.prod(value.shape) == 1
    return value.item() if single else value


# -- items -------------------------------------------------------------------------------------


def _module_items(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield class and plain settings of each module, then dtype and shape of each parameter.

    Settings whose names suggest that they differ by rank are left out.
    """
    for name, module in plan.model.model.named_modules():
        text = f"{type(module).__qualname__}({module.extra_repr()})"
        attributes = (
            f"{key}={value!r}"
            for key, value in sorted(vars(module).items())
            if type(value) in _NUMBERS
            and key[0] != "_"
            and key != "training"
            and not any(rank_word in key for rank_word in _OWN_TO_A_RANK)
        )
        yield name or "the model", " ".join((text, *attributes))
    for name, param in plan.model.unique_parameters.items():
        frozen = "" if param.requires_grad else ", frozen"
        tied = f", also {', '.join(param.names[1:])}" if len(param.names) > 1 else ""
        yield name, f"{param.dtype} {tuple(param.shape)}{frozen}{tied}"


def _row_items(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "knobs", str(dict(plan.decisions))
    for number, action in enumerate(plan.actions, 1):
        location = next(iter(action.sites), "") or "the model"
        if len(action.sites) > 1:
            sites = hashlib.blake2b(repr(action.sites).encode(), digest_size=4).hexdigest()
            location += f" and {len(action.sites) - 1} more ({sites})"
        yield f"row {number}", f"{action.primitive} at {location}"
    yield "relaxed", str(sorted(plan.relaxed))


def _weight_items(model: nn.Module, base: nn.Module, options: Options) -> Iterator[tuple[str, str]]:
    """Yield a checksum of each tensor of the state dict, and a digest of the source of values.

    `base` is the user's model; `model` may be a changed copy of it.
    """
    from schedlang.runtime.comm.agreement import checksum
    from schedlang.runtime.initial.sources import source_of

    for name, parameter in model.named_parameters():
        yield name, checksum(parameter)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, checksum(buffer)
    if options.weights is not None or any(p.is_meta for p in model.parameters()):
        yield "their source", source_of(base, options.weights).digest()


# -- code --------------------------------------------------------------------------------------


def _code_items(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Return a digest of the code of each class of a model, without torch's classes."""
    classes = dict.fromkeys(  # in the model's order: a class and its subclass may share a name
        base
        for module in model.modules()
        for base in type(module).__mro__
        if base is not object and not base.__module__.startswith("torch.")
    )
    digests: dict[str, list[str]] = {}
    for class_ in sorted(classes, key=lambda c: (c.__module__, c.__qualname__)):
        members = [(name, code_digest(value)) for name, value in sorted(vars(class_).items())]
        class_digests = digests.setdefault(class_.__qualname__, [])
        class_digests.extend(f"{name} {digest}" for name, digest in members if digest)
    return ((name, " ".join(digest)) for name, digest in digests.items())


def code_digest(function: Callable[..., Any] | Any) -> str:
    """Return a digest of a function's code, without file names and line numbers; "" for others."""
    inner = getattr(function, "__func__", function)
    inner = getattr(inner, "__wrapped__", inner)
    code = getattr(inner, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    return _digest(code)


@lru_cache(maxsize=1 << 12)  # the programs of one proof have the same code
def _digest(code: CodeType) -> str:
    return hashlib.blake2b(repr(_plain_constant(code)).encode(), digest_size=8).hexdigest()


def _plain_constant(value: object) -> object:
    if isinstance(value, CodeType):
        constants = [_plain_constant(constant) for constant in value.co_consts]
        return (value.co_code, value.co_names, value.co_varnames, value.co_freevars, constants)
    if isinstance(value, frozenset):  # its order is another in every process
        return sorted(map(repr, value))
    if isinstance(value, tuple):
        return [_plain_constant(constant) for constant in value]
    return repr(value)
