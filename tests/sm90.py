"""Compile the kernels for an H200 without a GPU; print what their machine code uses, as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from schedlang.kernels import cross_entropy, gated, norm, rope
from schedlang.kernels.kernel_device import MAX_ROW, tile
from schedlang.runtime.rowwise_kernels import launch
from schedlang.runtime.rowwise_kernels.rowwise_operator import TensorSignature, make_pair
from tests.chains import CHAINS


class Sm90Driver:
    """A driver that knows its target and nothing else: enough to compile, not to launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def resources(kernel: Any) -> dict[str, int]:
    """Registers, stack, spills and 128-bit accesses, read out of the machine code."""
    folder = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def tool(name: str, option: str) -> str:
            command = [os.path.join(folder, name), option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = tool("cuobjdump", "--dump-resource-usage")
        code = tool("nvdisasm", "-c")
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    names = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9.]+)", code, re.M)

    def count(start: str, part: str = "") -> int:
        return sum(name.startswith(start) and part in name for name in names)

    return {
        "narrow": len(narrow(kernel.asm["ttir"])),
        "registers": found["REG"],
        "stack": found["STACK"],
        "spills": count("LDL") + count("STL"),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "loads": count("LDG"),
        "wide_loads": count("LDG", "128"),
    }


def narrow(text: str) -> list[str]:
    """Products in 32 bits of a program's number that reach an address: on large tensors they
    overflow.  `text` is Triton's own intermediate form; the number along rows is the first."""
    numbers, products, wrong = set[str](), dict[str, str](), list[str]()
    for made, how in re.findall(r"^\s*(%[\w#]+)(?::\d+)? = (.*)$", text, re.M):
        name, used = made.partition("#")[0], set(re.findall(r"%\w+", how))
        wide = "i64" in how.split(" loc(")[0].split(" : ")[-1].split("->")[-1]
        inside = [products[each] for each in used if each in products]
        if "tt.get_program_id x" in how:
            numbers.add(name)
        elif "tt.addptr" in how:
            wrong += inside
        elif inside:
            products[name] = inside[0]  # wider or not: it has overflowed before
        elif used & numbers and not wide:
            numbers.add(name)
            if "arith.muli" in how:
                products[name] = how
    return wrong


Made = Iterator[tuple[dict[str, Any], Any]]
SIZES = [
    (128, torch.bfloat16),
    (4096, torch.bfloat16),
    (4096, torch.float32),
    (MAX_ROW, torch.bfloat16),
    (MAX_ROW, torch.float32),
]


def _options(size: int) -> dict[str, Any]:
    rows, block, warps = tile(size)
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps, "grid": (1,)}


def _norm_kernels(size: int, dtype: torch.dtype, add: bool, centred: bool, early: bool) -> Made:
    """Both kernels of a norm of rows of `size`; a LayerNorm has a bias."""
    x, weight = torch.zeros(16, size, dtype=dtype), torch.zeros(size, dtype=dtype)
    row, partial = torch.zeros(16), torch.zeros(16, 2 if centred else 1, size)
    options = {"ADD": add, "CENTRED": centred, "EARLY": early, **_options(size)}
    options |= {"GATE": "", "ACT": "", "SAME": True}
    named = {"size": size, "dtype": str(dtype), "centred": centred, "early": early}
    forward = (x, x, x, weight, weight, x, x, row, row, 16, size, *[size] * 3, 1e-6, 0.0)
    made = norm.forward_kernel.warmup(*forward, BIAS=centred, **options)
    yield {"kernel": "forward"} | named, made
    if add and dtype == torch.float32:  # as under a cast: what is added is bfloat16
        mixed = (x, x.bfloat16(), *forward[2:])
        made = norm.forward_kernel.warmup(*mixed, BIAS=centred, **options)
        yield {"kernel": "forward, two types"} | named, made
    back = (x, x, x, x, weight, row, row, x, x, partial, 16, size, *[size] * 4, 1, 0.0)
    yield {"kernel": "backward"} | named, norm.backward_kernel.warmup(*back, **options)


def rms_norm_kernels() -> Made:
    """Both kernels, from short rows to the longest."""
    for size, dtype in SIZES:
        for early in (False, True):
            yield from _norm_kernels(size, dtype, False, False, early)


def layer_norm_kernels() -> Made:
    """Both kernels, with a bias, from short rows to the longest."""
    for size, dtype in SIZES:
        yield from _norm_kernels(min(size, norm.MAX_ROW_WITH_EXTRAS), dtype, False, True, False)


def add_norm_kernels() -> Made:
    """Both kernels of both norms, from short rows to the longest."""
    for size, dtype in SIZES:
        for centred in (False, True):
            yield from _norm_kernels(
                min(size, norm.MAX_ROW_WITH_EXTRAS), dtype, True, centred, True
            )


def gated_kernels() -> Made:
    """Both kernels for each activation, split and packed."""
    for dtype in (torch.bfloat16, torch.float32):
        for act in gated.ACTIVATIONS:
            x, size = torch.zeros(16, 2 * 14336, dtype=dtype), 14336
            block, warps = gated.tile(size)
            options: dict[str, Any] = {
                "ACT": act,
                "BLOCK": block,
                "num_warps": warps,
                "grid": (1, 1),
            }
            named = {"size": size, "dtype": str(dtype), "act": act}
            forward = (x, x, x, size, 2 * size, 2 * size)
            yield {"kernel": "forward"} | named, gated.forward_kernel.warmup(*forward, **options)
            back = (x, x, x, x, x, size, size, *[2 * size] * 4)
            yield {"kernel": "backward"} | named, gated.backward_kernel.warmup(*back, **options)


def cross_entropy_kernels() -> Made:
    """Both row kernels for a large vocabulary, with and without a soft cap."""
    for dtype in (torch.bfloat16, torch.float32):
        z, row = torch.zeros(16, 32000, dtype=dtype), torch.zeros(16)
        target = torch.zeros(16, dtype=torch.int64)
        block, warps = cross_entropy._tile(z)
        for capped in (False, True):
            options: dict[str, Any] = {
                "CAPPED": capped,
                "BLOCK": block,
                "num_warps": warps,
                "grid": (1,),
            }
            named = {"size": 32000, "dtype": str(dtype), "capped": capped}
            forward = (z, target, row, row, row, 32000, 32000, 0.5, 3.0)
            made = cross_entropy.statistics_kernel.warmup(*forward, **options)
            yield {"kernel": "statistics"} | named, made
            back = (z, target, row, row, row, row, 32000, 32000, 0.5, 3.0)
            made = cross_entropy.gradient_kernel.warmup(*back, **options)
            yield {"kernel": "gradient"} | named, made


def gated_norm_kernels() -> Made:
    """Both kernels, a gate before groups of channels and after whole rows, of all lengths."""
    for size, dtype in ((min(size, norm.MAX_ROW_WITH_EXTRAS), dtype) for size, dtype in SIZES):
        for first in (False, True):
            width = 8 * size if first else size
            x, weight = torch.zeros(16, width, dtype=dtype), torch.zeros(width, dtype=dtype)
            rstd, partial = torch.zeros(16, 8), torch.zeros(16, width)
            options = {"ADD": False, "CENTRED": False, "EARLY": True, "SAME": True, "ACT": "silu"}
            options |= _options(size) | {"grid": (1, width // size)}
            options["GATE"] = "before" if first else "after"
            named = {"size": size, "dtype": str(dtype), "first": first}
            forward = (x, x, x, weight, x, x, x, rstd, rstd, 16, size, *[width] * 3, 1e-6, 0.0)
            made = norm.forward_kernel.warmup(*forward, BIAS=False, **options)
            yield {"kernel": "forward"} | named, made
            given = (x, x, x, x, weight, rstd, rstd, x, x, partial)
            back = (*given, 16, size, *[width] * 4, 1, 0.0)
            made = norm.backward_kernel.warmup(*back, **options)
            yield {"kernel": "backward"} | named, made


def rope_kernels() -> Made:
    """Halves and pairs, whole heads and parts of them, both ways."""
    heads, tokens, size = (32, 8), 4096, 128
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(16, dtype=dtype)
        for pairs, width in ((False, size), (True, size), (True, size // 2)):
            half = width // 2
            # heads of a token lie side by side, as projections give them
            strides = [s for n in heads * 2 for s in (tokens * n * size, n * size, size)]
            given = (*[x] * 6, tokens, *heads, half, size, *strides, 0, width, 0, width)
            for back in (False, True):
                options: dict[str, Any] = {
                    "SOURCE": pairs,
                    "TARGET": pairs,
                    "OWN": True,
                    "PAIRED": pairs,
                    "EARLY": True,
                    "BACK": back,
                    "KEYS": True,
                    "HALF": half,
                    "num_warps": 4,
                    "grid": (1,),
                    "Q_LINES": rope.heads_per_program(heads[0], half),
                    "K_LINES": rope.heads_per_program(heads[1], half),
                    "REST": size - width,
                }
                named = {"pairs": pairs, "width": width, "dtype": str(dtype)}
                made = rope.turn_kernel.warmup(*given, **options)
                yield {"kernel": "back" if back else "forward"} | named, made


def rowwise_kernels() -> Made:
    """Both generated kernels of each chain: of rows that fit a program, and of longer ones."""
    sizes = ((4096, torch.bfloat16), (launch.MAX_ROW, torch.float32), (20480, torch.bfloat16))
    for size, dtype in sizes:
        for name, (function, kinds) in CHAINS.items():
            sorts = tuple(
                TensorSignature((64, size) if k == "m" else (size,), dtype, "cpu", True)
                for k in kinds
            )
            pair = make_pair(function, sorts, "eager")
            for way, made in zip(("forward", "backward"), pair.kernels):
                yield {"kernel": way, "chain": name, "size": size, "dtype": str(dtype)}, _warm(made)


def _warm(made: launch.RowwiseKernel) -> Any:
    """A generated kernel, compiled for tensors as its graph takes them."""
    chain = made.chain
    places = [n.meta["val"] for n in made.graph.nodes if n.op == "placeholder"]
    shape = launch.launch_shape(made, torch.zeros(1))
    given = [torch.zeros(places[v.place].shape, dtype=v.dtype) for v in chain.inputs]
    stored = [torch.zeros(s.shape, dtype=s.dtype) for s in chain.stored]
    sums = [torch.zeros(shape.programs, chain.grid.size) for _ in chain.sums]
    strides = [chain.grid.size for v in chain.inputs if v.rows and v.cols]
    numbers = [chain.grid.rows, chain.grid.size, *strides, shape.tiles]
    return launch.compile_source(made.text).warmup(
        *given,
        *stored,
        *sums,
        *numbers,
        ROWS=shape.rows,
        BLOCK=shape.block,
        num_warps=shape.warps,
        grid=(1,),
    )


KERNELS = {
    "rms_norm": rms_norm_kernels,
    "layer_norm": layer_norm_kernels,
    "gated": gated_kernels,
    "cross_entropy": cross_entropy_kernels,
    "add_norm": add_norm_kernels,
    "rope": rope_kernels,
    "rowwise": rowwise_kernels,
    "gated_norm": gated_norm_kernels,
}


def main() -> None:
    """The kernels of the files that are named, in bfloat16 and float32."""
    triton.runtime.driver.set_active(Sm90Driver())
    made = (pair for name in sys.argv[1:] or KERNELS for pair in KERNELS[name]())
    print(json.dumps([named | resources(kernel) for named, kernel in made]))


if __name__ == "__main__":
    main()
