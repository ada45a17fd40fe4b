"""Kernels and training steps on a GPU: python -m tests.benchmarks.gpu [--quick] [--out FILE]

Checks every kernel against float64 by the rule of kernels/check.py, times each forward and backward
beside eager, torch.compile and Liger (where it is installed), then steps of Llama with the shapes
of 1B and of 8B (fewer layers), untouched, compiled, patched by Liger, and with our kernels.  Prints
ratios (theirs / ours: above 1 we are faster) and one line of JSON.  Without CUDA it says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.kernels import (
    add_norm,
    gated,
    held_cross_entropy,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
)
from schedlang.kernels.check import Case, run_kernel_check
from schedlang.runtime.replacing.kernel import match, replace

Work = Callable[[], object]


@dataclass(frozen=True)
class Contest:
    """One computation several ways, all from the same tensors; `flops` of one step, if known."""

    name: str
    shape: tuple[int, ...]
    works: Mapping[str, Work]
    flops: float = 0.0


def checks(quick: bool) -> list[Case]:
    """A case of each kernel in each type, of a size that fills a GPU."""
    rows = 64 if quick else 2048
    return [
        case
        for dtype in ("float32", "bfloat16", "float16")
        for case in (
            rms_norm.Case((rows, 4096), dtype, rounding="early"),
            rms_norm.Case((rows, 3000), dtype, offset=1.0),
            layer_norm.Case((rows, 4096), dtype),
            gated.Case((rows, 4096), dtype),
            gated.Case((rows, 4096), dtype, "gelu_tanh", "gate first"),
            add_norm.Case((rows, 4096), dtype),
            add_norm.Case((rows, 3000), dtype, add_norm.Form(True, rounding="early"), bias=True),
            rope.Case((2, rows // 2, 32, 8, 128), dtype),
            rope.Case((2, rows // 2, 5, 3, 96), dtype, 64, rope.Form(True, True), shared=False),
            linear_cross_entropy.Case((rows, 512), dtype, 5000, rows=rows // 3),
            held_cross_entropy.Case((rows, 512), dtype, 5000),
        )
    ]


def backward(function: Callable[..., Tensor], leaves: tuple[Tensor, ...], grad: Tensor) -> Work:
    """One forward and backward of a function."""
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def ways(
    ours: Callable[..., Tensor], eager: Callable[..., Tensor], liger: Callable[..., Tensor] | None,
    leaves: tuple[Tensor, ...],
) -> dict[str, Work]:  # fmt: skip
    """Forward and backward each way, with one gradient."""
    y = eager(*leaves).detach()
    grad = torch.randn(y.shape, device=y.device).to(y.dtype) if y.ndim else torch.ones_like(y)
    compiled = torch.compile(eager, dynamic=False)
    named = {"ours": ours, "eager": eager, "compile": compiled}
    if liger is not None:
        named["liger"] = liger
    return {name: backward(function, leaves, grad) for name, function in named.items()}


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """A leaf in bfloat16 on the GPU."""
    return (torch.randn(shape, device="cuda") * scale).bfloat16().requires_grad_()


def liger_of(name: str) -> Any:
    """Something of Liger's, or None where it is not installed."""
    try:
        import liger_kernel.transformers.functional as functional
    except ImportError:
        return None
    return getattr(functional, name, None)


def kernels(quick: bool) -> Iterator[Contest]:
    """Every kernel in bfloat16, in the shapes of Llama-3-8B."""
    rows, width, middle, classes = (
        (512, 1024, 2048, 8000) if quick else (16384, 4096, 14336, 128256)
    )
    x, weight, bias = random(rows, width), random(width), random(width)
    theirs = liger_of("liger_rms_norm")
    yield Contest("rms_norm", (rows, width), ways(
        lambda x, w: rms_norm.rms_norm(x, w, 1e-5, 0.0, "early"),
        lambda x, w: rms_norm.reference(x, w, 1e-5, 0.0, "early"),
        None if theirs is None else lambda x, w: theirs(x, w, 1e-5), (x, weight)))  # fmt: skip
    normed = liger_of("liger_layer_norm")
    yield Contest("layer_norm", (rows, width), ways(
        lambda x, w, b: layer_norm.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        None if normed is None else lambda x, w, b: normed(x, w, b, 1e-5),
        (x, weight, bias)))  # fmt: skip
    swiglu = liger_of("liger_swiglu")
    yield Contest("swiglu", (rows, middle), ways(
        lambda a, b: gated.gated(a, b, "silu"), lambda a, b: F.silu(a) * b, swiglu,
        (random(rows, middle), random(rows, middle))))  # fmt: skip
    form = add_norm.Form(eps=1e-5, rounding="early")
    added = liger_of("liger_fused_add_rms_norm")
    yield Contest("add_norm", (rows, width), ways(
        lambda a, b, w: torch.stack(add_norm.add_norm(a, b, w, None, form)),
        lambda a, b, w: torch.stack(add_norm.reference(a, b, w, None, form)),
        None if added is None else lambda a, b, w: torch.stack(added(a, b, w, 1e-5)),
        (random(rows, width), random(rows, width), random(width))))  # fmt: skip
    yield rotation(rows)
    yield head(rows // 2, width, classes)
    yield head(rows // 4, width, classes, held=True)


def rotation(tokens: int) -> Contest:
    """Queries of 32 heads and keys of 8, as projections give them."""
    q, k = (random(1, tokens, heads, 128) for heads in (32, 8))
    angle = torch.rand((1, tokens, 64), device="cuda").repeat(1, 1, 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    form = rope.Form(heads=2)
    theirs = liger_of("liger_rope")
    return Contest("rope", (tokens, 40, 128), ways(
        lambda q, k: torch.cat(rope.rope(q, k, cos, sin, 128, form), 2),
        lambda q, k: torch.cat([rope.reference(x, cos, sin, 128, form) for x in (q, k)], 2),
        None if theirs is None else lambda q, k: torch.cat(
            theirs(q.transpose(1, 2), k.transpose(1, 2), cos, sin), 1).transpose(1, 2),
        (q, k)))  # fmt: skip


def head(rows: int, width: int, classes: int, held: bool = False) -> Contest:
    """The head and the loss, in chunks or with its logits held."""
    target = torch.randint(classes, (rows,), device="cuda")
    by = torch.full((rows,), 1 / rows, device="cuda")
    form = linear_cross_entropy.Form()
    fused = liger_of("liger_fused_linear_cross_entropy")

    def kept(x: Tensor, w: Tensor) -> Tensor:
        lse, picked, _ = held_cross_entropy.held_statistics(x, w, None, target, form)
        return (lse - picked).mean()

    def chunked(x: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy.weighed(x, w, None, target, by, 0.0, form)

    return Contest(
        "cross_entropy" if held else "linear_cross_entropy", (rows, width, classes),
        ways(
            kept if held else chunked,
            lambda x, w: F.cross_entropy(F.linear(x, w).float(), target),
            None if fused is None else lambda x, w: fused(x, w, target),
            (random(rows, width), random(classes, width, scale=0.02)),
        ),
        6.0 * rows * width * classes,
    )  # fmt: skip


# -- training steps ------------------------------------------------------------------------------

SIZES = {  # hidden, middle, heads, keys, layers, layers run here, tied
    "llama-3-1B": (2048, 8192, 32, 8, 16, 16, True),
    "llama-3-8B": (4096, 14336, 32, 8, 32, 4, False),
}


def llama(name: str, quick: bool) -> nn.Module:
    """Llama with the shapes of a size, its weights random, in bfloat16."""
    import transformers

    hidden, middle, heads, keys, _, layers, tied = SIZES[name]
    small = {"hidden_size": 256, "intermediate_size": 512} if quick else {}
    config = transformers.LlamaConfig(**{
        "hidden_size": hidden, "intermediate_size": middle, "num_attention_heads": heads,
        "num_key_value_heads": keys, "num_hidden_layers": 2 if quick else layers,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied, "use_cache": False, "attn_implementation": "sdpa", **small,
    })  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).bfloat16().train()


def with_kernels(model: nn.Module) -> nn.Module:
    """The model with every kernel of ours that fits."""
    for module in [*model.modules()]:
        kind = type(module).__name__
        wanted = {
            "LlamaRMSNorm": "rms_norm", "LlamaMLP": "gated", "LlamaAttention": "rope",
        }.get(kind)  # fmt: skip
        if module is model.lm_head:
            wanted = "linear_cross_entropy"
        if wanted is not None:
            found = match(module, wanted)
            assert not hasattr(found, "reason"), found
            replace(module, found)  # type: ignore[arg-type]
    return model


def with_liger(model: nn.Module) -> nn.Module:
    """The model patched by Liger; ImportError where it is not installed."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    return model


def compiled(model: nn.Module) -> nn.Module:
    """The model with each layer compiled."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile()
    return model


WAYS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "ours": with_kernels,
    "ours, compiled": lambda model: compiled(with_kernels(model)),
    "eager": lambda model: model,
    "compile": compiled,
    "liger": with_liger,
}


def steps(name: str, quick: bool) -> dict[str, dict[str, float]]:
    """Seconds, peak bytes and loss of a training step, each way on a model of its own."""
    found: dict[str, dict[str, float]] = {}
    rows, length = (1, 256) if quick else (2, 4096)
    ids = torch.randint(128256, (rows, length), device="cuda")
    for way, make in WAYS.items():
        try:
            model = make(llama(name, quick))
        except ImportError:
            continue
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        first = float(step())
        seconds = median(step, 3 if quick else 10)
        torch.cuda.reset_peak_memory_stats()
        step()
        count = sum(p.numel() for p in model.parameters())
        rate = rows * length / seconds
        found[way] = {
            "seconds": seconds, "tokens_per_second": rate, "loss": first,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "flops": 6.0 * count * rate,
        }  # fmt: skip
        del model, optimizer, step
        torch.cuda.empty_cache()
    return found


# -- measuring -----------------------------------------------------------------------------------


def median(work: Work, times: int) -> float:
    """Seconds of the median run, by events on the GPU; caches of it are cold."""
    cold = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        work()
    spans = []
    for _ in range(times):
        cold.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(end) / 1e3)
    return sorted(spans)[times // 2]


def contest(one: Contest, times: int) -> dict[str, Any]:
    """Seconds and peak bytes of each way, and the ratios to ours."""
    seconds, peak = {}, {}
    for name, work in one.works.items():
        seconds[name] = median(work, times)
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        peak[name] = torch.cuda.max_memory_allocated() - base
    ratios = {name: value / seconds["ours"] for name, value in seconds.items() if name != "ours"}
    return {"kernel": one.name, "shape": one.shape, "seconds": seconds, "peak": peak,
            "ratios": ratios, "flops": one.flops / seconds["ours"]}  # fmt: skip


def main() -> int:
    """Check, time, print; 1 where a check fails, 3 where there is no CUDA."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes: does it run at all?")
    parser.add_argument("--out", help="write the JSON there as well")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked and nothing was timed")
        return 3
    wrong = [one for one in run_kernel_check(checks(asked.quick), device="cuda") if not one.ok]
    for one in wrong:
        print(f"WRONG  {one}")
    found = [contest(one, 5 if asked.quick else 30) for one in kernels(asked.quick)]
    for each in found:
        said = "  ".join(f"{name} {ratio:.2f}" for name, ratio in each["ratios"].items())
        print(f"{each['kernel']:22} {each['seconds']['ours'] * 1e6:10.1f} us   {said}")
    trained = {name: steps(name, asked.quick) for name in SIZES}
    for name, each in trained.items():
        for way, seen in each.items():
            ratio = seen["seconds"] / each["ours"]["seconds"]
            print(f"{name:12} {way:16} {seen['tokens_per_second']:10.0f} tokens/s  "
                  f"{seen['peak_gib']:6.1f} GiB  {ratio:.2f}")  # fmt: skip
    made = json.dumps({
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "checks_failed": len(wrong), "kernels": found, "steps": trained,
    })  # fmt: skip
    print(made)
    if asked.out:
        with open(asked.out, "w") as file:
            file.write(made + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
