"""Which attentions FlexAttention or flash_attn can take over: told by running a copy.

What a module asks for, with all that it adds to scores, is heard (attended.py); it is replaced
where the same attention by our rule gives the same result and gradients in float64.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from schedlang.diagnostic import Refusal
from schedlang.kernels import flash_attention, flex_attention
from schedlang.kernels.probe import TOLERANCE, Mismatch, bare_copy
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient
from schedlang.runtime.replacing.attended import Asked, Ear, put_in
from schedlang.runtime.replacing.attention import Call, implementation, random_call, results
from schedlang.runtime.replacing.tables import with_tables


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


def match_adapter(module: nn.Module, kernel: str, call: Call | None = None) -> Adapted | Mismatch:
    """Whether `kernel` (of ATTENTIONS) computes the attention of `module`, or why not."""
    if any("forward" in vars(part) for part in module.modules()):
        return Mismatch("has a replaced forward already")
    if any(buffer.is_meta for buffer in module.buffers()):
        return Mismatch("keeps buffers whose values are not known on the meta device")
    named = {n: m for n, m in module.named_modules() if implementation(m) is not None}
    now = {implementation(m) for m in named.values()}
    if not now <= {"eager", "sdpa"}:
        return Mismatch(f"uses the attention {', '.join(sorted(filter(None, now)))} already")
    with torch.random.fork_rng(devices=[]), ambient(Float64):
        try:
            return _probed(module, kernel, tuple(named), call)
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            said = raised.diagnostic.title if isinstance(raised, Refusal) else str(raised)
            return Mismatch(f"does not run: {type(raised).__name__}: {said}".splitlines()[0])


def _probed(
    module: nn.Module, kernel: str, names: tuple[str, ...], call: Call | None
) -> Adapted | Mismatch:
    # around zero, and no score wins alone
    copied = bare_copy(module, torch.float64, spread=lambda shape: 0.3).eval()
    ran = list(_ran(copied, _calls(copied, names, call)))
    calls, plain = [one for one, _ in ran], [seen for _, seen in ran]
    ear = Ear()
    put_in(copied, kernel, names, ear)
    fused = [results(copied, *one) for one in calls]
    asked = tuple(dict.fromkeys(ear.asked))
    results(copied.train(), *calls[0])
    if not asked:
        return Mismatch("calls neither an attention function by name nor torch's")
    if ear.dropped:
        return Mismatch(f"has dropout in training, which `{kernel}` does not support")
    if kernel == "flash_attention" and any(one.sinks or one.bias for one in asked):
        return Mismatch(
            "adds sinks or a bias to its scores, which `flash_attention` does not support"
        )
    error = max(map(_distance, fused, plain))
    if not error <= TOLERANCE:
        return Mismatch("differs from its own attention", error)
    return Adapted(kernel, names, asked, error)


def _ran(module: nn.Module, calls: Iterator[Call]) -> Iterator[tuple[Call, list[Tensor]]]:
    """Calls, and what the module gives; of the others those that it does not take are left out."""
    first = next(calls)
    yield first, results(module, *first)
    for call in calls:
        with suppress(Exception):  # of the module's own code: it needs a mask, or of another kind
            yield call, results(module, *call)


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
    kwargs = kwargs if call is not None else with_tables(module, kwargs)
    yield args, kwargs
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and call is None:
        yield args, {**kwargs, "attention_mask": None}
        if all(implementation(module.get_submodule(name)) == "sdpa" for name in names):
            yield args, {**kwargs, "attention_mask": mask == 0}


def _own_calls(module: nn.Module) -> Iterator[Call]:
    """Calls of a module that has no config: random tokens, and nothing for what else it needs."""
    every = list(inspect.signature(module.forward).parameters.values())
    needed = [p for p in every if p.default is p.empty
              and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]  # fmt: skip
    width = next((p.shape[1] for p in module.parameters() if p.ndim == 2), None)
    if width is None or not needed:
        raise ValueError("its arguments are not known")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, width, generator=generator, dtype=torch.float64, device="cpu")
    yield [x.requires_grad_(), *[None] * (len(needed) - 1)], {}
