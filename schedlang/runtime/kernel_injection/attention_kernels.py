"""Attention by FlexAttention or flash_attn: which attentions they can replace, and the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels import flash_attention, flex_attention
from schedlang.kernels.flex_attention import AttentionCall, ScoreRule
from schedlang.kernels.probe import TOLERANCE, Mismatch, bare_copy
from schedlang.runtime.declined_calls import note_declined
from schedlang.runtime.float64 import Float64
from schedlang.runtime.forward import wrap
from schedlang.runtime.kernel_injection.sdpa_attention import (
    ModuleCall,
    attention_name,
    random_call,
    results_distance,
    run_with_gradients,
    set_attention_name,
    why_no_probe,
    with_position_tables,
)
from schedlang.runtime.modes import enter_modes

# -- the call --------------------------------------------------------------------------------------
# Modules of transformers look up their attention function in their config at each call; other
# modules call torch's scaled_dot_product_attention, and a mode around their forward intercepts the
# call.


ATTENTIONS: Mapping[str, Callable[[AttentionCall], Tensor]] = {
    "flex_attention": flex_attention.flex_attention,
    "flash_attention": flash_attention.flash_attention,
}
# why a kernel would not run a call; kernels that run every call are not listed
DECLINE_REASONS: Mapping[str, Callable[[AttentionCall], str]] = {
    "flash_attention": flash_attention.why_declined
}
# tensors that modules of transformers pass to any attention, and that do not affect scores; flags
# and integers (windows among them) do not either, because masks are complete
_IGNORED = frozenset(
    (
        *("position_ids", "cache_position", "labels", "shift_labels", "cu_seq_lens_q"),
        *("cu_seq_lens_k", "num_items_in_batch"),
    )
)


@dataclass(frozen=True)
class AttentionForm:
    """One form of attention: query heads per key head, head size, soft cap, whether it has sinks or
    a bias."""

    groups: int
    size: int
    cap: float
    sinks: bool
    bias: bool


class AttentionRecorder:
    """Records the forms of attention that the copy in a probe calls."""

    def __init__(self) -> None:
        self.asked: list[AttentionForm] = []
        self.dropped = False

    def add_query(self, query: AttentionCall) -> None:
        """Record a call."""
        q, k = query.q, query.k
        sinks, bias = query.sinks is not None, query.bias is not None
        groups = q.shape[1] // k.shape[1]
        self.asked.append(AttentionForm(groups, q.shape[-1], query.rule.cap, sinks, bias))
        self.dropped |= query.dropout > 0


_EAR = "_schedlang_ear"  # of a module in the probed copy


def install_attention(
    module: nn.Module,
    kernel: str,
    names: tuple[str, ...],
    recorder: AttentionRecorder | None = None,
) -> None:
    """Let a module compute attention by the kernel, in place; `ear` records the calls."""
    for name in names:
        part = module.get_submodule(name)
        set_attention_name(part, _register(kernel, attention_name(part) == "eager"))
        if recorder is not None:
            vars(part)[_EAR] = recorder
    if not names:
        wrap(module, "attend", FusedAttention(module, kernel, recorder))


def _register(kernel: str, eager: bool) -> str:
    """Register our function in transformers, and return its name; without a mask, eager hides
    nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"schedlang_{kernel}{'_eager' if eager else ''}"
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():

        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Any = None,
            **kwargs: Any,
        ) -> tuple[Tensor, None]:
            causal = kwargs.pop("is_causal", None)
            causal = getattr(module, "is_causal", True) if causal is None else causal
            causal = bool(causal) and not eager and attention_mask is None and query.shape[2] > 1
            tensors = (query, key, value)
            call = query_of_call(kernel, tensors, attention_mask, causal, kwargs)
            output = run_attention(module, kernel, call, getattr(module, _EAR, None))
            return output.transpose(1, 2).contiguous(), None

        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    return name


def query_of_call(
    kernel: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    causal: bool,
    kwargs: dict[str, Any],
) -> AttentionCall:
    """Read a call of transformers as a query; refuse (S877) arguments that no kernel supports."""
    rule = ScoreRule(kwargs.pop("scaling", None), kwargs.pop("softcap", None) or 0.0, causal)
    sinks, bias = kwargs.pop("s_aux", None), kwargs.pop("position_bias", None)
    dropout = kwargs.pop("dropout", 0.0)
    unknown = [
        name
        for name, value in kwargs.items()
        if not (value is None or name in _IGNORED or isinstance(value, int | str))
    ]
    if unknown or not (mask is None or isinstance(mask, Tensor)):
        raise _unsupported(kernel, f"`{unknown[0]}`" if unknown else "a mask that is not a tensor")
    return AttentionCall(*tensors, rule, mask, bias, sinks, dropout)


def _unsupported(kernel: str, feature: str) -> Refusal:
    message = f"an attention is called with {feature}, which `{kernel}` does not support"
    return Refusal.of("S877", message, helps=("leave this module as it is",))


def run_attention(
    module: nn.Module, kernel: str, query: AttentionCall, recorder: AttentionRecorder | None = None
) -> Tensor:
    """Run the kernel for a query; refuse (S877) dropout of attention weights.

    A query that the kernel declines, and computes by plain products, is recorded at `module`.
    """
    if recorder is not None:
        recorder.add_query(query)
    elif query.dropout > 0:
        raise _unsupported(kernel, "dropout")
    if recorder is None and kernel in DECLINE_REASONS and not torch.compiler.is_compiling():
        reason = DECLINE_REASONS[kernel](query)
        if reason:
            note_declined(module, kernel, reason, q=query.q, k=query.k, mask=query.mask)
    return ATTENTIONS[kernel](query)


class FusedAttention:
    """A layer of a module that calls torch's attention: its own forward, under a mode."""

    def __init__(
        self, module: nn.Module, kernel: str, recorder: AttentionRecorder | None = None
    ) -> None:
        self.module, self.kernel, self.ear = module, kernel, recorder

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module; its calls of torch's attention run the kernel."""
        with _InterceptAttention(self.module, self.kernel, self.ear):
            return inner(*args, **kwargs)


class _InterceptAttention(TorchFunctionMode):
    def __init__(self, module: nn.Module, kernel: str, recorder: AttentionRecorder | None) -> None:
        super().__init__()
        self.module, self.kernel, self.ear = module, kernel, recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.ndim != 4 or (attn_mask is not None and attn_mask.ndim > 4):
            raise _unsupported(self.kernel, f"{query.ndim} dims")
        mask = attn_mask
        while mask is not None and mask.ndim < 4:
            mask = mask[None]
        call = AttentionCall(
            query, key, value, ScoreRule(scale, 0.0, is_causal), mask, dropout=dropout_p
        )
        return run_attention(self.module, self.kernel, call, self.ear)


# -- the probe -------------------------------------------------------------------------------------
# The probe records the attention that a module calls, with all that it adds to scores. The kernel
# replaces it if the same attention by our rule gives the same result and gradients in float64.


@dataclass(frozen=True)
class KernelAttention:
    """An attention that `kernel` can compute.

    modules  those that look up their attention; empty where the module calls torch's
    forms    the forms of attention that it calls
    error    the measured difference
    """

    kernel: str
    modules: tuple[str, ...]
    forms: tuple[AttentionForm, ...]
    error: float

    def cases(self) -> list[flex_attention.Case]:
        """Return test cases of the kernel in these forms."""
        form = self.forms[0]
        shape = (2, 4, 150, max(16, min(form.size, 128)))
        keys = 4 if form.groups == 1 else 2
        if self.kernel == "flash_attention":
            return [flash_attention.Case(shape, "bfloat16", keys, form.cap)]
        return [
            flex_attention.Case(shape, "bfloat16", keys, form.cap, form.sinks, padded)
            for padded in (False, True)
        ]


# arguments with other tokens to attend to
OTHER_TOKENS = ("encoder_hidden_states", "key_value_states", "context")


def match_kernel_attention(
    module: nn.Module, kernel: str, call: ModuleCall | None = None
) -> KernelAttention | Mismatch:
    """Match `kernel` (of ATTENTIONS) against the attention of `module`; return why if it
    differs."""
    refused = why_no_probe(module)
    if refused:
        return refused
    attentions = {n: m for n, m in module.named_modules() if attention_name(m) is not None}
    implementations = {attention_name(m) for m in attentions.values()}
    if not implementations <= {"eager", "sdpa"}:
        return Mismatch(
            f"uses the attention {', '.join(sorted(filter(None, implementations)))} already"
        )
    with torch.random.fork_rng(devices=[]), enter_modes(Float64):
        try:
            return _probe(module, kernel, tuple(attentions), call)
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            first_line = str(raised).partition("\n")[0]
            reason = raised.diagnostic.title if isinstance(raised, Refusal) else first_line
            return Mismatch(f"does not run: {type(raised).__name__}: {reason}")


def _probe(
    module: nn.Module, kernel: str, names: tuple[str, ...], call: ModuleCall | None
) -> KernelAttention | Mismatch:
    # values around zero, so that no score dominates
    copied = bare_copy(module, torch.float64, spread=lambda shape: 0.3).eval()
    runs = list(_run_calls(copied, _calls_to_try(copied, names, call)))
    calls, plain_results = [item for item, _ in runs], [result for _, result in runs]
    recorder = AttentionRecorder()
    install_attention(copied, kernel, names, recorder)
    fused = [run_with_gradients(copied, *item) for item in calls]
    forms = tuple(dict.fromkeys(recorder.asked))
    run_with_gradients(copied.train(), *calls[0])
    if not forms:
        return Mismatch("calls neither an attention function by name nor torch's")
    if recorder.dropped:
        return Mismatch(f"has dropout in training, which `{kernel}` does not support")
    if kernel == "flash_attention" and any(item.sinks or item.bias for item in forms):
        return Mismatch(
            "adds sinks or a bias to its scores, which `flash_attention` does not support"
        )
    error = max(map(results_distance, fused, plain_results))
    if not error <= TOLERANCE:
        return Mismatch("differs from its own attention", error)
    return KernelAttention(kernel, names, forms, error)


def _run_calls(
    module: nn.Module, calls: Iterator[ModuleCall]
) -> Iterator[tuple[ModuleCall, list[Tensor]]]:
    """Yield calls and the module's results; calls after the first that the module rejects are
    skipped."""
    first_call = next(calls)
    yield first_call, run_with_gradients(module, *first_call)
    for call in calls:
        with suppress(Exception):  # the module's own code may need a mask, or another kind of mask
            yield call, run_with_gradients(module, *call)


def _calls_to_try(
    module: nn.Module, names: tuple[str, ...], call: ModuleCall | None
) -> Iterator[ModuleCall]:
    """Yield calls to try: for transformers with and without a mask, and in each form of masks."""
    if call is None and not names:
        yield from _own_calls(module)
        return
    args, kwargs = random_call(module, call)
    kwargs = kwargs if call is not None else with_position_tables(module, kwargs)
    yield args, kwargs
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and call is None:
        yield args, {**kwargs, "attention_mask": None}
        if all(attention_name(module.get_submodule(name)) == "sdpa" for name in names):
            yield args, {**kwargs, "attention_mask": mask == 0}


def _own_calls(module: nn.Module) -> Iterator[ModuleCall]:
    """Yield a call of a module without config: random tokens, and None for other required
    arguments.

    If it attends to other tokens of another width, these are given too.
    """
    params = list(inspect.signature(module.forward).parameters.values())
    needed = [
        p
        for p in params
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    widths = list(dict.fromkeys(p.shape[1] for p in module.parameters() if p.ndim == 2))
    if not widths or not needed:
        raise ValueError("its arguments are not known")
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int, width: int) -> Tensor:
        value = torch.randn(2, count, width, generator=generator, dtype=torch.float64, device="cpu")
        return value.requires_grad_()

    tokens_and_none = [tokens(6, widths[0]), *[None] * (len(needed) - 1)]
    other_tokens = next((p.name for p in params if p.name in OTHER_TOKENS), None)
    yield (
        tokens_and_none,
        {other_tokens: tokens(5, widths[1])} if other_tokens and len(widths) > 1 else {},
    )
