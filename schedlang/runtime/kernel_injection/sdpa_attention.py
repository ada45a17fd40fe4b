"""Attention of transformers by torch's fused kernel (`replace_kernel(sdpa)`), for one module at a
time."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.kernels.probe import TOLERANCE, Mismatch, bare_copy, distinct_gradient
from schedlang.runtime.float64 import Float64
from schedlang.runtime.kernel_injection.blind_queries import (
    add_blind_key_gradients,
    find_hidden_keys,
    replace_blind_queries,
)
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import draws_weights

# -- positions, in the form that a module accepts --------------------------------------------------


def with_position_tables(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the call with positions of tokens in the form that the module accepts.

    Tables of cosines and sines are as wide as a head, half of it (gpt-oss) or a quarter, or one
    table of complex numbers (Llama 4); some modules look positions up themselves.
    """
    tables = kwargs.get("position_embeddings")
    forms: list[Any] = [None]
    if tables is not None:
        half = [t.chunk(2, -1)[0] for t in tables]
        quarter = [t.chunk(4, -1)[0] for t in tables]
        forms = [tables, tuple(half), tuple(quarter), torch.complex(*half)]
    hidden = kwargs.get("hidden_states")
    positions = None if hidden is None else torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    parameters = inspect.signature(module.forward).parameters
    for tables_form, with_positions in itertools.product(forms, (False, True)):
        tried = kwargs if tables_form is None else {**kwargs, "position_embeddings": tables_form}
        if with_positions and "position_ids" not in parameters:
            continue
        tried = {**tried, "position_ids": positions} if with_positions else tried
        # the module's own code may raise: try the next form
        with torch.no_grad(), suppress(Exception):
            module(**tried)
            return tried
    return kwargs


# -- the fused kernel ------------------------------------------------------------------------------
# These modules look up their attention function by name in their config at each call: one module
# gets a config of its own, whose function accepts masks in the form of eager attention.


_SDPA = "schedlang_sdpa"
_FIELD = "_attn_implementation_internal"


@dataclass(frozen=True)
class SdpaAttention:
    """An attention that torch's fused kernel can compute; `modules` are those that attend.

    identity  the module uses the kernel already, there is nothing to replace
    error     the measured relative difference in float64
    """

    modules: tuple[str, ...]
    identity: bool
    error: float


ModuleCall = tuple[Sequence[Any], Mapping[str, Any]]


def _register() -> Callable[..., Any]:
    """Register our attention function in transformers, once, and return it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if _SDPA not in ALL_ATTENTION_FUNCTIONS.valid_keys():

        def attend(
            module: nn.Module,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            attention_mask: Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            mask = attention_mask  # some models pass it by this name
            # masks are complete, in eager's form: without one nothing is masked, also if the module
            # calls itself causal
            kwargs["is_causal"] = False
            bias = kwargs.get("position_bias")
            if mask is None or not _is_additive(mask) or kwargs.get("dropout") and draws_weights():
                return sdpa_attention_forward(module, q, k, v, mask, **kwargs)
            if bias is not None:
                mask, kwargs["position_bias"] = bias + mask, None
            hidden_keys = find_hidden_keys(mask)
            queries = replace_blind_queries(q, hidden_keys)
            out, _ = sdpa_attention_forward(module, queries, k, v, hidden_keys.mask, **kwargs)
            return add_blind_key_gradients(out, (q, k, v), hidden_keys, kwargs.get("scaling")), None

        ALL_ATTENTION_FUNCTIONS.register(_SDPA, attend)
    registered: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[_SDPA]
    return registered


def _is_additive(mask: Tensor) -> bool:
    """Return whether a mask is added to scores; fused kernels are correct for boolean masks."""
    return type(mask) is Tensor and mask.is_floating_point()


def why_no_probe(module: nn.Module) -> Mismatch | None:
    """Return why no copy of an attention can be run; None if it can."""
    if any("forward" in vars(part) for part in module.modules()):
        return Mismatch("has a replaced forward already")
    if any(buffer.is_meta for buffer in module.buffers()):
        return Mismatch("keeps buffers whose values are not known on the meta device")
    return None


def attention_name(module: nn.Module) -> str | None:
    """Return the name of the attention function in a module's config; None if there is none."""
    name = getattr(getattr(module, "config", None), _FIELD, None)
    return name if isinstance(name, str) else None


def set_attention_name(module: nn.Module, name: str) -> None:
    """Give this module a config of its own that names another attention function."""
    config = copy.copy(module.config)
    # not through the property, which would change shared configs
    config.__dict__[_FIELD] = name
    module.config = config


def match_attention(module: nn.Module, call: ModuleCall | None = None) -> SdpaAttention | Mismatch:
    """Match torch's fused attention against the attention of `module`; return why if it differs."""
    attending = {n: m for n, m in module.named_modules() if attention_name(m) is not None}
    if not attending:
        kind = type(module).__name__
        return Mismatch(
            f"`{kind}` has no attention whose function is named in a config, as in transformers:"
            " it cannot be replaced"
        )
    implementations = {attention_name(m) for m in attending.values()}
    if implementations <= {"sdpa", _SDPA}:
        return SdpaAttention(tuple(attending), True, 0.0)
    if implementations != {"eager"}:
        return Mismatch(
            f"its masks are made for {', '.join(sorted(filter(None, implementations)))}, not sdpa"
        )
    refused = why_no_probe(module)
    if refused:
        return refused
    with torch.random.fork_rng(devices=[]), enter_modes(Float64):
        try:
            return _probe_attention(module, tuple(attending), call)
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            return Mismatch.raised("does not run on random input", raised)


def _probe_attention(
    module: nn.Module, names: tuple[str, ...], call: ModuleCall | None
) -> SdpaAttention | Mismatch:
    # values around zero, so that no score dominates
    copied = bare_copy(module, torch.float64, spread=lambda shape: 0.3).eval()
    args, kwargs = random_call(module, call)
    kwargs = kwargs if call is not None else with_position_tables(copied, kwargs)
    for name, value in kwargs.items():
        if "mask" in name and isinstance(value, Tensor) and value.dim() == 4:
            # a query of the last row sees no key, like a left padding token
            value[-1, :, :, 0] = torch.finfo(value.dtype).min
    exact = run_with_gradients(copied, args, kwargs)
    with _record_calls() as calls:
        for name in names:
            set_attention_name(copied.get_submodule(name), _SDPA)
        fused = run_with_gradients(copied, args, kwargs)
    if not calls:
        return Mismatch("does not call the attention function that its config names")
    if len(exact) != len(fused):
        return Mismatch("its gradients are of other parameters")
    error = results_distance(fused, exact)
    if not error <= TOLERANCE:
        return Mismatch("differs from its eager form", error)
    return SdpaAttention(names, False, error)


def results_distance(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative difference of two runs' `run_with_gradients`; infinite if
    lengths differ.

    The gradient of a key's bias is zero up to rounding: the largest tensor sets a floor.
    """
    if len(actual) != len(exact):
        return math.inf
    floor = 1e-3 * max(float(b.norm()) for b in exact)
    pairs = zip(actual, exact, strict=True)
    return max(float((a - b).norm()) / (float(b.norm()) + floor) for a, b in pairs)


@contextmanager
def _record_calls() -> Iterator[list[int]]:
    """Record the calls of our attention function within the block."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend, calls = _register(), list[int]()

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return attend(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_SDPA, counting)
    try:
        yield calls
    finally:
        ALL_ATTENTION_FUNCTIONS.register(_SDPA, attend)


def run_with_gradients(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the first output, and the gradients of parameters and inputs that it reaches."""
    output = module(*args, **kwargs)
    y = output if isinstance(output, Tensor) else output[0]
    leaves: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    leaves += [t for t in [*args, *kwargs.values()] if isinstance(t, Tensor) and t.requires_grad]
    grads = torch.autograd.grad((y * distinct_gradient(y)).sum(), leaves, allow_unused=True)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def random_call(module: nn.Module, call: ModuleCall | None) -> tuple[list[Any], dict[str, Any]]:
    """Return random arguments in float64: shaped like an example call, or by common names."""
    generator = torch.Generator().manual_seed(0)
    if call is None:
        return [], common_call(module, generator)
    args = [_random_like(value, "", generator) for value in call[0]]
    return args, {name: _random_like(value, name, generator) for name, value in call[1].items()}


def _random_like(value: Any, name: str, generator: torch.Generator) -> Any:
    """Return an argument like `value` with random contents; masks are causal and additive."""
    if isinstance(value, (tuple, list)):
        return type(value)(_random_like(item, name, generator) for item in value)
    if not isinstance(value, Tensor):
        return None if _is_cache(value) else value
    if "mask" in name and value.dim() == 4:
        return _causal_mask(value.shape[0], value.shape[-2], value.shape[-1])
    if value.is_floating_point():
        sample = torch.randn(value.shape, generator=generator, dtype=torch.float64, device="cpu")
        return sample.requires_grad_(name != "position_embeddings")
    if value.is_meta:
        return torch.arange(value.numel(), device="cpu").view(value.shape).to(value.dtype)
    return value.detach().cpu()


def _is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers, which a call modifies."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def _causal_mask(rows: int, queries: int, keys: int) -> Tensor:
    """Return a causal additive mask as eager attention uses it; row 0's first key is padding."""
    allowed = torch.ones(rows, 1, queries, keys, dtype=torch.bool, device="cpu")
    allowed = allowed.tril(keys - queries)
    allowed[0, :, 1:, 0] = False
    lowest = torch.finfo(torch.float64).min
    return torch.where(allowed, 0.0, lowest).double()


def common_call(module: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    """Return arguments under the names that attention modules of transformers share."""
    rows, length = 2, 6
    config = next(m.config for m in module.modules() if attention_name(m) is not None)
    parameters = inspect.signature(module.forward).parameters

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    hidden = getattr(config, "hidden_size", None)
    assert isinstance(hidden, int), "its width is not known; give an example of its arguments"
    call: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name == "hidden_states":
            call[name] = draw(rows, length, hidden).requires_grad_()
        elif name == "attention_mask":
            call[name] = _causal_mask(rows, length, length)
        elif name == "position_embeddings":
            heads = getattr(config, "num_attention_heads", 1)
            size = _head_size(module, config) or hidden // heads
            call[name] = (draw(rows, length, size), draw(rows, length, size))
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            call[name] = None
    return call


def _head_size(module: nn.Module, config: Any) -> int | None:
    """Return the size of a head, from the config, or from the module if layers differ."""
    try:
        return getattr(config, "head_dim", None)
    except Exception:  # a config may raise if its layers differ
        return getattr(module, "head_dim", None)


def replace_attention(module: nn.Module, attention: SdpaAttention) -> None:
    """Let a built module attend by the fused kernel, in place, unless it does already."""
    if not attention.identity:
        _register()
        for name in attention.modules:
            set_attention_name(module.get_submodule(name), _SDPA)
