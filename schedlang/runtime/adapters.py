"""Attention by FlexAttention or flash_attn, in any module that asks for an attention by name.

Modules of transformers look up their attention function in their config at each call; others call
torch's scaled_dot_product_attention, and a mode around their forward hears it.  What a module asks
for, with all that it adds to scores, is found by running a copy; it is replaced where the same
attention by our rule gives the same result and gradients in float64.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.kernels import flash_attention, flex_attention
from schedlang.kernels.flex_attention import Rule
from schedlang.kernels.probe import TOLERANCE, Mismatch, bare_copy
from schedlang.runtime.attention import Call, implementation, random_call, results, switch
from schedlang.runtime.float64 import Float64
from schedlang.runtime.forward import wrap
from schedlang.runtime.modes import ambient

ATTENTIONS: Mapping[str, Callable[..., Tensor]] = {
    "flex_attention": flex_attention.flex_attention,
    "flash_attention": flash_attention.flash_attention,
}
# tensors that modules of transformers hand to any attention, and that say nothing of scores;
# flags and whole numbers (windows among them) do not either: masks are complete
_IDLE = frozenset(("position_ids", "cache_position", "labels", "shift_labels", "cu_seq_lens_q",
                   "cu_seq_lens_k", "num_items_in_batch"))  # fmt: skip


@dataclass(frozen=True)
class Adapted:
    """An attention that `kernel` computes alike: `modules` look theirs up, none where it calls
    torch's.  `asked` are the forms that it asked for; `error` the measured difference."""

    kernel: str
    modules: tuple[str, ...]
    asked: tuple[Asked, ...]
    error: float

    def cases(self) -> list[flex_attention.Case]:
        """Runs of the kernel in those forms."""
        one = self.asked[0]
        shape = (2, 4, 150, max(16, min(one.size, 128)))
        keys = 4 if one.groups == 1 else 2
        if self.kernel == "flash_attention":
            return [flash_attention.Case(shape, "bfloat16", keys, one.cap)]
        return [
            flex_attention.Case(shape, "bfloat16", keys, one.cap, one.sinks, padded)
            for padded in (False, True)
        ]


@dataclass(frozen=True)
class Asked:
    """One form of attention: heads of a query to one of keys, a head's size, cap and sinks."""

    groups: int
    size: int
    cap: float
    sinks: bool
    bias: bool


# -- what a module asks for ----------------------------------------------------------------------


def match_adapter(module: nn.Module, kernel: str, call: Call | None = None) -> Adapted | Mismatch:
    """Whether `kernel` (of ATTENTIONS) computes the attention of `module`, or why not."""
    if any("forward" in vars(part) for part in module.modules()):
        return Mismatch("had its forward replaced already")
    if any(buffer.is_meta for buffer in module.buffers()):
        return Mismatch("keeps buffers whose values are not known on the meta device")
    named = {n: m for n, m in module.named_modules() if implementation(m) is not None}
    now = {implementation(m) for m in named.values()}
    if not now <= {"eager", "sdpa"}:
        return Mismatch(f"attends by {', '.join(sorted(filter(None, now)))} already")
    with torch.random.fork_rng(devices=[]), ambient(Float64):
        try:
            return _probed(module, kernel, tuple(named), call)
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            said = raised.diagnostic.title if isinstance(raised, Refusal) else str(raised)
            return Mismatch(f"does not run: {type(raised).__name__}: {said}".splitlines()[0])


def _probed(
    module: nn.Module, kernel: str, names: tuple[str, ...], call: Call | None
) -> Adapted | Mismatch:
    copied = bare_copy(module, torch.float64).eval()
    for parameter in copied.parameters():
        parameter.data.sub_(1.0).mul_(0.3)  # around zero, and no score wins alone
    calls = list(_calls(copied, names, call))
    plain = [results(copied, *one) for one in calls]
    with _heard() as heard:
        put_in(copied, kernel, names)
        fused = [results(copied, *one) for one in calls]
        asked = tuple(dict.fromkeys(heard.asked))
        results(copied.train(), *calls[0])
    if not asked:
        return Mismatch("asks for no attention by a name, and does not call torch's")
    if heard.dropped:
        return Mismatch(f"drops weights in training, and `{kernel}` does not")
    if kernel == "flash_attention" and any(one.sinks or one.bias for one in asked):
        return Mismatch("adds sinks or a bias to its scores, which `flash_attention` cannot")
    error = max(map(_distance, fused, plain))
    if not error <= TOLERANCE:
        return Mismatch("differs from its own attention", error)
    return Adapted(kernel, names, asked, error)


def _distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    if len(found) != len(exact):
        return math.inf
    floor = 1e-3 * max(float(b.norm()) for b in exact)
    pairs = zip(found, exact, strict=True)
    return max(float((a - b).norm()) / (float(b.norm()) + floor) for a, b in pairs)


def _calls(module: nn.Module, names: tuple[str, ...], call: Call | None) -> Iterator[Call]:
    """Calls to try: of transformers' with a mask and without, in the forms that masks come in."""
    if call is None and not names:
        yield from _own_calls(module)
        return
    args, kwargs = random_call(module, call)
    kwargs = kwargs if call is not None else _with_tables(module, kwargs)
    yield args, kwargs
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and call is None:
        yield args, {**kwargs, "attention_mask": None}
        if all(implementation(module.get_submodule(name)) == "sdpa" for name in names):
            yield args, {**kwargs, "attention_mask": mask == 0}


def _with_tables(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call with places of tokens in the form that the module takes.

    Tables of cosines and sines are as wide as a head, or half of it (gpt-oss) or a quarter, or one
    of complex numbers (Llama 4); some modules look places up by themselves.
    """
    tables = kwargs.get("position_embeddings")
    forms: list[Any] = [None]
    if tables is not None:
        half = [t.chunk(2, -1)[0] for t in tables]
        quarter = [t.chunk(4, -1)[0] for t in tables]
        forms = [tables, tuple(half), tuple(quarter), torch.complex(*half)]
    hidden = kwargs.get("hidden_states")
    places = None if hidden is None else torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    takes = inspect.signature(module.forward).parameters
    for form, told in itertools.product(forms, (False, True)):
        tried = kwargs if form is None else {**kwargs, "position_embeddings": form}
        if told and "position_ids" not in takes:
            continue
        tried = {**tried, "position_ids": places} if told else tried
        with torch.no_grad(), suppress(Exception):  # of the module's own code: the next form
            module(**tried)
            return tried
    return kwargs


def _own_calls(module: nn.Module) -> Iterator[Call]:
    """Calls of a module that has no config: random tokens, and nothing for what else it needs."""
    every = list(inspect.signature(module.forward).parameters.values())
    needed = [p for p in every if p.default is p.empty
              and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]  # fmt: skip
    width = next((p.shape[1] for p in module.parameters() if p.ndim == 2), None)
    if width is None or not needed:
        raise ValueError("what it takes is not known")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, width, generator=generator, dtype=torch.float64, device="cpu")
    yield [x.requires_grad_(), *[None] * (len(needed) - 1)], {}


# -- putting it in -------------------------------------------------------------------------------


def put_in(module: nn.Module, kernel: str, names: tuple[str, ...]) -> None:
    """Let a module attend by the kernel, in place."""
    for name in names:
        part = module.get_submodule(name)
        switch(part, _registered(kernel, implementation(part) == "eager"))
    if not names:
        wrap(module, "kernel", Hearing(kernel))


def _registered(kernel: str, eager: bool) -> str:
    """The name of our function in transformers; without a mask eager attention hides nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"schedlang_{kernel}{'_eager' if eager else ''}"
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
            attention_mask: Any = None, **more: Any,
        ) -> tuple[Tensor, None]:  # fmt: skip
            causal = more.pop("is_causal", None)
            causal = getattr(module, "is_causal", True) if causal is None else causal
            causal = bool(causal) and not eager and attention_mask is None and query.shape[2] > 1
            lines = (query, key, value)
            return asked_by_name(kernel, lines, attention_mask, causal, more), None

        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    return name


def asked_by_name(
    kernel: str, lines: tuple[Tensor, Tensor, Tensor], mask: Any, causal: bool, more: dict[str, Any]
) -> Tensor:
    """What a module of transformers asks for: [rows, length, heads, size]."""
    rule = Rule(more.pop("scaling", None), more.pop("softcap", None) or 0.0, causal)
    sinks, bias = more.pop("s_aux", None), more.pop("position_bias", None)
    dropout = more.pop("dropout", 0.0)
    unknown = [
        name for name, value in more.items()
        if not (value is None or name in _IDLE or isinstance(value, int | str))
    ]  # fmt: skip
    if unknown or not (mask is None or isinstance(mask, Tensor)):
        raise _foreign(kernel, f"`{unknown[0]}`" if unknown else "a mask that is no tensor")
    y = _attended(kernel, lines, rule, mask, bias, sinks, dropout)
    return y.transpose(1, 2).contiguous()


def _foreign(kernel: str, what: str) -> Refusal:
    title = f"an attention is asked for with {what}, which `{kernel}` does not know"
    return Refusal(Diagnostic("S877", title, helps=("leave this module as it is",)))


def _attended(
    kernel: str, lines: tuple[Tensor, Tensor, Tensor], rule: Rule, mask: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    q, k, v = lines
    ear = _EAR.get()
    if ear is not None:
        form = Asked(q.shape[1] // k.shape[1], q.shape[-1], rule.cap, sinks is not None,
                     bias is not None)  # fmt: skip
        ear.asked.append(form)
        ear.dropped |= dropout > 0
    elif dropout > 0:
        raise _foreign(kernel, "dropout")
    return ATTENTIONS[kernel](q, k, v, rule, mask, bias, sinks)


class Hearing:
    """The layer of a module that calls torch's attention: its own forward, under a mode."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module; calls of torch's attention inside are ours."""
        with _Calls(self.kernel):
            return inner(*args, **kwargs)


class _Calls(TorchFunctionMode):
    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if query.ndim != 4 or (attn_mask is not None and attn_mask.ndim > 4):
            raise _foreign(self.kernel, f"{query.ndim} dims")
        mask = attn_mask
        while mask is not None and mask.ndim < 4:
            mask = mask[None]
        lines = (query, key, value)
        return _attended(self.kernel, lines, Rule(scale, 0.0, is_causal), mask, None, None,
                         dropout_p)  # fmt: skip


class _Ear:
    """What the copy of a probe asks for."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.dropped = False


_EAR: ContextVar[_Ear | None] = ContextVar("ear", default=None)  # while a copy is probed


@contextmanager
def _heard() -> Iterator[_Ear]:
    ear = _Ear()
    token = _EAR.set(ear)
    try:
        yield ear
    finally:
        _EAR.reset(token)


def kernel_in(module: nn.Module) -> str | None:
    """Which of ATTENTIONS a module looks up in its config, if any."""
    now = (implementation(module) or "").removeprefix("schedlang_").removesuffix("_eager")
    return now if now in ATTENTIONS else None
