"""Kernels compared with their peers: ours, eager, compiled, Liger's, and the device's lower bound.

Some kernels of Liger write into their inputs. So every implementation has its own tensors, with
equal values, and results are compared with float64 before anything is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.kernels import flex_attention, gated, grouped, linear_cross_entropy, norm, rope
from schedlang.kernels.check import Comparison, compare_tensor
from schedlang.runtime.rowwise_kernels.rowwise_operator import apply_function, declare_function
from schedlang.testing.gpu.case import Case, Setup, Skipped, Told, Wrong

Function = Callable[..., Any]  # from leaves to a tensor or several


@dataclass(frozen=True)
class Sizes:
    """Shapes, their device, and the compiler's backend."""

    device: str
    rows: int
    width: int
    middle: int
    classes: int
    heads: tuple[int, int]
    size: int  # of a head
    length: int  # of a sequence
    experts: int
    backend: str = "inductor"


FULL = Sizes("cuda", 16384, 4096, 14336, 128256, (32, 8), 128, 4096, 16)
QUICK = Sizes("cuda", 512, 1024, 2048, 8000, (8, 2), 128, 512, 4)
TINY = Sizes("cpu", 16, 64, 96, 200, (4, 2), 16, 16, 3, "eager")


def sizes_of(setup: Setup) -> Sizes:
    """Return the sizes of a setup, on its device."""
    sizes: Sizes = setup.pick(FULL, QUICK, TINY)
    return replace(sizes, device=setup.device)


@dataclass(frozen=True)
class Contest:
    """One computation in several implementations (`ways`).

    `shapes` and `scale` are those of its leaves, `flops` the operations of a step, if known.
    """

    name: str
    ways: Mapping[str, Function]
    shapes: tuple[tuple[int, ...], ...]
    scale: tuple[float, ...] = ()
    flops: float = 0.0

    def leaves(self, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
        """Return the leaves: equal values at every call."""
        scales = self.scale or (1.0,) * len(self.shapes)
        return tuple(
            (_random_tensor(shape, index, device) * scale).to(dtype)
            for index, (shape, scale) in enumerate(zip(self.shapes, scales, strict=True))
        )


def _random_tensor(shape: Sequence[int], seed: int, device: torch.device | str) -> Tensor:
    """Return normal random numbers, drawn on the device."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _random_grads(results: Sequence[Tensor]) -> list[Tensor]:
    """Return a gradient for each result, equal for every implementation and dtype."""
    grads = []
    for index, y in enumerate(results):
        grad = _random_tensor(y.shape, 10 + index, y.device)
        grads.append(grad.bfloat16().to(y.dtype) if y.ndim else torch.ones_like(y))
    return grads


def work_of(contest: Contest, way: str, device: str) -> Work:
    """Return a function that runs one forward and backward, on its own tensors."""
    function = contest.ways[way]
    leaves = [leaf.requires_grad_() for leaf in contest.leaves(device)]
    grads = _random_grads([y.detach() for y in _as_tuple(function(*leaves))])
    return lambda: torch.autograd.grad(_as_tuple(function(*leaves)), leaves, grads)


def results_of(function: Function, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return results and gradients of one run."""
    copies = [leaf.clone().requires_grad_() for leaf in leaves]
    results = _as_tuple(function(*copies))
    grads = torch.autograd.grad(results, copies, _random_grads(results))
    return [y.detach() for y in results] + list(grads)


def judged(contest: Contest, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Comparison]:
    """Compare our results with float64, by the rule of kernels/check.py."""
    leaves = contest.leaves(device, dtype)
    ours, eager = (results_of(contest.ways[way], leaves) for way in ("ours", "eager"))
    exact = results_of(contest.ways["eager"], [leaf.double() for leaf in leaves])
    names = [f"{contest.name} {index}" for index in range(len(ours))]
    return [compare_tensor(*tensors) for tensors in zip(names, ours, eager, exact, strict=True)]


def cases(setup: Setup) -> list[Case]:
    """Return a case for each computation, with all implementations available here."""
    return [
        Case(contest.name, partial(contested, contest, setup))
        for contest in contests(sizes_of(setup))
    ]


def contested(contest: Contest, setup: Setup) -> Told:
    """Compare ours with float64, then time all implementations; raise if ours fails or is wrong."""
    if not (setup.timed or setup.device == "cpu"):
        raise Skipped("neither Triton nor inductor compiles for this device")
    comparisons = judged(contest, setup.device)
    share = max(comparison.error / comparison.allowed for comparison in comparisons)
    if bad := [comparison for comparison in comparisons if not comparison.ok]:
        raise Wrong(f"{bad[0].name} is {bad[0].error:.2g} off, allowed {bad[0].allowed:.2g}")
    cleared(setup.device)
    seconds: dict[str, float] = {}
    peak: dict[str, int] = {}
    failed: dict[str, str] = {}
    for way in contest.ways:
        try:
            if (measured := _measure(contest, way, setup)) is not None:
                seconds[way], peak[way] = measured
        except Exception as error:  # a peer may fail here; an error of ours is raised
            if way == "ours":
                raise
            failed[way] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
        cleared(setup.device)
    numbers: dict[str, Any] = {"shapes": contest.shapes, "share": share, "seconds": seconds}
    numbers |= {"peak": peak, "failed": failed}
    notes = [f"ran {', '.join(way for way in contest.ways if way not in failed)}"]
    if setup.timed:
        numbers["floor"] = floor = floor_of(contest, setup)
        ours = seconds["ours"]
        notes = [f"{ours * 1e6:.0f} us, floor {floor * 1e6:.0f} us"]
        notes += [
            f"{way} {time / ours:.2f} times as long"
            for way, time in seconds.items()
            if way != "ours"
        ]
    notes += [f"{way} failed: {reason}" for way, reason in failed.items()]
    return Told("; ".join(notes), numbers)


def _measure(contest: Contest, way: str, setup: Setup) -> tuple[float, int] | None:
    """Return seconds and bytes; None where nothing is timed, after one run."""
    work = work_of(contest, way, setup.device)
    if not setup.timed:
        work()
        return None
    return median(work, setup.pick(20, 5, 1)), (peak_of(work) - torch.cuda.memory_allocated())


def floor_of(contest: Contest, setup: Setup) -> float:
    """Return the minimal seconds of any implementation: for its bytes, or for its multiplications.

    Bytes are those of inputs, results, and the gradients of both, moved once.
    """
    results = results_of(contest.ways["eager"], contest.leaves(setup.device))
    count = len(results) - len(contest.shapes)
    nbytes = 2 * sum(result.nbytes for result in results[:count])
    nbytes += 2 * sum(grad.nbytes for grad in results[count:])
    del results
    cleared(setup.device)
    copied, multiplied = rates(setup.size == "quick")
    return max(nbytes / copied, contest.flops / multiplied)


def contest(
    sizes: Sizes,
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    ours: Function,
    eager: Function,
    scale: tuple[float, ...] = (),
    flops: float = 0.0,
    **peers: Function | None,
) -> Contest:
    """Make a contest of all installed implementations; the eager one is also compiled."""
    compiled = torch.compile(eager, dynamic=False, backend=sizes.backend)
    implementations = {"ours": ours, "eager": eager, "compile": compiled} | peers
    ways = {way: function for way, function in implementations.items() if function is not None}
    return Contest(name, ways, shapes, scale, flops)


def liger_of(name: str) -> Any:
    """Return a function of Liger, or None if Liger is not installed."""
    try:
        import liger_kernel.transformers.functional as functional
    except ImportError:
        return None
    return getattr(functional, name, None)


def contests(sizes: Sizes) -> Iterator[Contest]:
    """Yield every kernel in bfloat16; those of FULL in the shapes of Llama-3-8B."""
    yield from _norms(sizes)
    line = (sizes.rows, sizes.middle)
    yield contest(
        sizes,
        "swiglu",
        (line, line),
        lambda a, b: gated.gated_product(a, b, "silu"),
        lambda a, b: F.silu(a) * b,
        liger=liger_of("liger_swiglu"),
    )
    yield _rotation(sizes)
    yield chain(sizes, sizes.rows, sizes.width)
    yield _head(sizes, sizes.rows // 2, held=False)
    yield _head(sizes, sizes.rows // 4, held=True)
    yield _attention(sizes)
    yield _experts(sizes)


def _norms(sizes: Sizes) -> Iterator[Contest]:
    line, row = (sizes.rows, sizes.width), (sizes.width,)
    rms, centred = liger_of("liger_rms_norm"), liger_of("liger_layer_norm")
    fused = liger_of("liger_fused_add_rms_norm")
    form, layer = norm.Form(eps=1e-5, rounding="early"), norm.Form(True, 1e-5)
    lever = norm.Form(eps=1e-5, rounding="early", act="silu", first=True)
    yield contest(
        sizes,
        "rms_norm",
        (line, row),
        lambda x, w: norm.norm(x, w, None, form),
        lambda x, w: norm.reference(x, w, None, form),
        liger=rms and (lambda x, w: rms(x, w, 1e-5)),
    )
    yield contest(
        sizes,
        "layer_norm",
        (line, row, row),
        lambda x, w, b: norm.norm(x, w, b, layer),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        liger=centred and (lambda x, w, b: centred(x, w, b, 1e-5)),
    )
    yield contest(
        sizes,
        "rms_norm with a gate",
        (line, line, row),
        lambda x, z, w: norm.norm(x, w, None, lever, z),
        lambda x, z, w: norm.reference(x, w, None, lever, z),
    )
    yield contest(
        sizes,
        "add_norm",
        (line, line, row),
        lambda a, b, w: norm.add_norm(a, b, w, None, form),
        lambda a, b, w: norm.add_reference(a, b, w, None, form),
        liger=fused and (lambda a, b, w: fused(a, b, w, 1e-5)[::-1]),
    )


def _rotation(sizes: Sizes) -> Contest:
    """Return the contest of rope, on queries and keys as projections return them."""
    tokens, width = sizes.rows, sizes.size
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand((1, tokens, width // 2), generator=generator).repeat(1, 1, 2)
    cos, sin = (t.to(sizes.device, torch.bfloat16) for t in (angle.cos(), angle.sin()))
    form = rope.Form(heads=2)
    liger_rope = liger_of("liger_rope")

    def liger(q: Tensor, k: Tensor) -> list[Tensor]:
        # Liger rotates its inputs in place: it has its own leaves, whose norms do not change
        rotated = liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return [y.transpose(1, 2) for y in rotated]

    return contest(
        sizes,
        "rope",
        tuple((1, tokens, n, width) for n in sizes.heads),
        lambda q, k: rope.rotate(q, k, cos, sin, width, form),
        lambda q, k: [rope.reference(x, cos, sin, width, form) for x in (q, k)],
        liger=liger_rope and liger,
    )


def chain(sizes: Sizes, rows: int, width: int) -> Contest:
    """Return a contest of bias, GELU and residual, as `fuse(backend=rowwise)` generates their
    kernel."""

    def plain(x: Tensor, r: Tensor, b: Tensor) -> Tensor:
        return r + F.gelu(x + b, approximate="tanh")

    declare_function("schedlang.testing.gpu.chain", plain, "fp32")
    line = (rows, width)
    ours = lambda *args: apply_function("schedlang.testing.gpu.chain", args, 1)[0]  # noqa: E731
    return contest(sizes, "rowwise bias-gelu-residual", (line, line, (width,)), ours, plain)


def _head(sizes: Sizes, rows: int, held: bool) -> Contest:
    """Return the contest of the head with the loss, in chunks or with its logits stored."""
    width, classes = sizes.width, sizes.classes
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(classes, (rows,), generator=generator).to(sizes.device)
    by = torch.full((rows,), 1 / rows, device=sizes.device)
    form = linear_cross_entropy.Form(held=held)
    fused = liger_of("liger_fused_linear_cross_entropy")

    def kept(x: Tensor, w: Tensor) -> Tensor:
        lse, picked, _ = linear_cross_entropy.statistics(x, w, None, target, form)
        return (lse - picked).mean()

    def chunked(x: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy.weighted_loss(x, w, None, target, by, 0.0, form)

    def eager(x: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(x, w)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)

    name = "cross_entropy" if held else "linear_cross_entropy"
    return contest(
        sizes,
        name,
        ((rows, width), (classes, width)),
        kept if held else chunked,
        eager,
        (1.0, 0.02),
        6.0 * rows * width * classes,
        liger=fused and (lambda x, w: fused(x, w, target)),
    )


def _attention(sizes: Sizes) -> Contest:
    """Return the contest of causal grouped-query attention: FlexAttention, and torch's fused
    kernel."""
    rule = flex_attention.ScoreRule(causal=True)
    heads, keys = sizes.heads
    shapes = tuple((2, n, sizes.length, sizes.size) for n in (heads, keys, keys))

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flops = 3.5 * 2 * 2 * heads * sizes.length**2 * sizes.size  # 2 products forward, 5 backward
    return contest(
        sizes,
        "flex_attention",
        shapes,
        lambda q, k, v: flex_attention.flex_attention(flex_attention.AttentionCall(q, k, v, rule)),
        lambda q, k, v: flex_attention.reference(flex_attention.AttentionCall(q, k, v, rule)),
        flops=flops,
        sdpa=fused,
    )


def _experts(sizes: Sizes) -> Contest:
    """Return the contest of one product of rows sorted by expert."""
    rows, width, experts = sizes.rows, sizes.width, sizes.experts
    ends = torch.linspace(0, rows, experts + 1)[1:].int().to(sizes.device)
    return contest(
        sizes,
        "grouped",
        ((rows, width), (experts, width, width)),
        lambda x, w: grouped.grouped_product(x, w, ends, False),
        lambda x, w: grouped.reference(x, w, ends, False),
        (1.0, width**-0.5),
        6.0 * rows * width**2,
    )


# -- times and bytes of work on a GPU --------------------------------------------------------------


Work = Callable[[], object]
# multiplications and additions of bfloat16 in a second, dense, by a part of the device's name
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


def median(work: Work, times: int) -> float:
    """Return the seconds of the median run, by GPU events, with cold caches."""
    cold = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        work()
    spans: list[float] = []
    for _ in range(times):
        cold.zero_()
        start, end = _event(), _event()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(end) / 1e3)
    return sorted(spans)[times // 2]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def rates(quick: bool = False) -> tuple[float, float]:
    """Return the bytes per second of this device, and its operations per second in bfloat16.

    Measured with a copy (counted twice) and a square product.
    """
    if quick not in _rates:
        a = torch.empty(2**28 if quick else 2**30, dtype=torch.int8, device="cuda")
        b = torch.empty_like(a)
        copied = 2 * a.nbytes / median(lambda: b.copy_(a), 10)
        size = 4096 if quick else 8192
        x, y = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
        _rates[quick] = copied, 2 * size**3 / median(lambda: x @ y, 10)
    return _rates[quick]


_rates: dict[bool, tuple[float, float]] = {}


def peak_of(work: Work) -> int:
    """Return the peak bytes of a run, with the bytes allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def cleared(device: str) -> None:
    """Free memory: modules with kernels are in reference cycles, compiled ones are cached."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def peak_flops() -> float | None:
    """Return the peak rate of this device, if it is known."""
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)
