"""Compile the kernels for an H200 without a GPU; print the resources they use as JSON."""

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
    """A driver that knows only its target: enough to compile, not to launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def resources(kernel: Any) -> dict[str, int]:
    """Read registers, stack, spills and 128-bit accesses from the machine code."""
    folder = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def tool(name: str, option: str) -> str:
            command = [os.path.join(folder, name), option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = tool("cuobjdump", "--dump-resource-usage")
        code = tool("nvdisasm", "-c")
    usage_numbers = {
        key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)
    }
    names = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9.]+)", code, re.M)

    def count(start: str, part: str = "") -> int:
        return sum(name.startswith(start) and part in name for name in names)

    return {
        "narrow": len(narrow_products(kernel.asm["ttir"])),
        "registers": usage_numbers["REG"],
        "stack": usage_numbers["STACK"],
        "spills": count("LDL") + count("STL"),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "loads": count("LDG"),
        "wide_loads": count("LDG", "128"),
    }


def narrow_products(text: str) -> list[str]:
    """32-bit products of a program id that reach an address: on large tensors they overflow.

    `text` is Triton's intermediate form; the program id along rows is the first one."""
    numbers, products, overflowing = set[str](), dict[str, str](), list[str]()
    for result, expression in re.findall(r"^\s*(%[\w#]+)(?::\d+)? = (.*)$", text, re.M):
        name, used = result.partition("#")[0], set(re.findall(r"%\w+", expression))
        is_wide = "i64" in expression.split(" loc(")[0].split(" : ")[-1].split("->")[-1]
        operand_products = [products[operand] for operand in used if operand in products]
        if "tt.get_program_id x" in expression:
            numbers.add(name)
        elif "tt.addptr" in expression:
            overflowing += operand_products
        elif operand_products:
            products[name] = operand_products[0]  # widened or not: the overflow was before
        elif used & numbers and not is_wide:
            numbers.add(name)
            if "arith.muli" in expression:
                products[name] = expression
    return overflowing


Compiled = Iterator[tuple[dict[str, Any], Any]]
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


def _norm_kernels(size: int, dtype: torch.dtype, add: bool, centred: bool, early: bool) -> Compiled:
    """Both kernels of a norm of rows of `size`; a LayerNorm has a bias."""
    x, weight = torch.zeros(16, size, dtype=dtype), torch.zeros(size, dtype=dtype)
    row, partial = torch.zeros(16), torch.zeros(16, 2 if centred else 1, size)
    options = {"ADD": add, "CENTRED": centred, "EARLY": early, **_options(size)}
    options |= {"GATE": "", "ACT": "", "SAME": True}
    labels = {"size": size, "dtype": str(dtype), "centred": centred, "early": early}
    forward = (x, x, x, weight, weight, x, x, row, row, 16, size, *[size] * 3, 1e-6, 0.0)
    compiled = norm.forward_kernel.warmup(*forward, BIAS=centred, **options)
    yield {"kernel": "forward"} | labels, compiled
    if add and dtype == torch.float32:  # as under a cast: the added tensor is bfloat16
        mixed = (x, x.bfloat16(), *forward[2:])
        compiled = norm.forward_kernel.warmup(*mixed, BIAS=centred, **options)
        yield {"kernel": "forward, two types"} | labels, compiled
    backward = (x, x, x, x, weight, row, row, x, x, partial, 16, size, *[size] * 4, 1, 0.0)
    yield {"kernel": "backward"} | labels, norm.backward_kernel.warmup(*backward, **options)


def rms_norm_kernels() -> Compiled:
    """Both kernels, from short rows to the longest."""
    for size, dtype in SIZES:
        for early in (False, True):
            yield from _norm_kernels(size, dtype, False, False, early)


def layer_norm_kernels() -> Compiled:
    """Both kernels, with a bias, from short rows to the longest."""
    for size, dtype in SIZES:
        yield from _norm_kernels(min(size, norm.MAX_ROW_WITH_EXTRAS), dtype, False, True, False)


def add_norm_kernels() -> Compiled:
    """Both kernels of both norms, from short rows to the longest."""
    for size, dtype in SIZES:
        for centred in (False, True):
            yield from _norm_kernels(
                min(size, norm.MAX_ROW_WITH_EXTRAS), dtype, True, centred, True
            )


def gated_kernels() -> Compiled:
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
            labels = {"size": size, "dtype": str(dtype), "act": act}
            forward = (x, x, x, size, 2 * size, 2 * size)
            yield {"kernel": "forward"} | labels, gated.forward_kernel.warmup(*forward, **options)
            backward = (x, x, x, x, x, size, size, *[2 * size] * 4)
            yield (
                {"kernel": "backward"} | labels,
                gated.backward_kernel.warmup(*backward, **options),
            )


def cross_entropy_kernels() -> Compiled:
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
            labels = {"size": 32000, "dtype": str(dtype), "capped": capped}
            forward = (z, target, row, row, row, 32000, 32000, 0.5, 3.0)
            compiled = cross_entropy.statistics_kernel.warmup(*forward, **options)
            yield {"kernel": "statistics"} | labels, compiled
            backward = (z, target, row, row, row, row, 32000, 32000, 0.5, 3.0)
            compiled = cross_entropy.gradient_kernel.warmup(*backward, **options)
            yield {"kernel": "gradient"} | labels, compiled


def gated_norm_kernels() -> Compiled:
    """Both kernels, a gate before groups of channels and after whole rows, of all lengths."""
    for size, dtype in ((min(size, norm.MAX_ROW_WITH_EXTRAS), dtype) for size, dtype in SIZES):
        for gate_first in (False, True):
            width = 8 * size if gate_first else size
            x, weight = torch.zeros(16, width, dtype=dtype), torch.zeros(width, dtype=dtype)
            rstd, partial = torch.zeros(16, 8), torch.zeros(16, width)
            options = {"ADD": False, "CENTRED": False, "EARLY": True, "SAME": True, "ACT": "silu"}
            options |= _options(size) | {"grid": (1, width // size)}
            options["GATE"] = "before" if gate_first else "after"
            labels = {"size": size, "dtype": str(dtype), "first": gate_first}
            forward = (x, x, x, weight, x, x, x, rstd, rstd, 16, size, *[width] * 3, 1e-6, 0.0)
            compiled = norm.forward_kernel.warmup(*forward, BIAS=False, **options)
            yield {"kernel": "forward"} | labels, compiled
            tensors = (x, x, x, x, weight, rstd, rstd, x, x, partial)
            backward = (*tensors, 16, size, *[width] * 4, 1, 0.0)
            compiled = norm.backward_kernel.warmup(*backward, **options)
            yield {"kernel": "backward"} | labels, compiled


def rope_kernels() -> Compiled:
    """Halves and pairs, whole heads and parts of them, both ways."""
    heads, tokens, size = (32, 8), 4096, 128
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(16, dtype=dtype)
        for pairs, width in ((False, size), (True, size), (True, size // 2)):
            half = width // 2
            # the heads of a token are adjacent, as projections return them
            strides = [s for n in heads * 2 for s in (tokens * n * size, n * size, size)]
            arguments = (*[x] * 6, tokens, *heads, half, size, *strides, 0, width, 0, width)
            for is_backward in (False, True):
                options: dict[str, Any] = {
                    "SOURCE": pairs,
                    "TARGET": pairs,
                    "OWN": True,
                    "PAIRED": pairs,
                    "EARLY": True,
                    "BACK": is_backward,
                    "KEYS": True,
                    "HALF": half,
                    "num_warps": 4,
                    "grid": (1,),
                    "Q_LINES": rope.heads_per_program(heads[0], half),
                    "K_LINES": rope.heads_per_program(heads[1], half),
                    "REST": size - width,
                }
                labels = {"pairs": pairs, "width": width, "dtype": str(dtype)}
                compiled = rope.turn_kernel.warmup(*arguments, **options)
                yield {"kernel": "back" if is_backward else "forward"} | labels, compiled


def rowwise_kernels() -> Compiled:
    """Both generated kernels of each chain: of rows that fit a program, and of longer ones."""
    sizes = ((4096, torch.bfloat16), (launch.MAX_ROW, torch.float32), (20480, torch.bfloat16))
    for size, dtype in sizes:
        for name, (function, kinds) in CHAINS.items():
            signatures = tuple(
                TensorSignature((64, size) if k == "m" else (size,), dtype, "cpu", True)
                for k in kinds
            )
            pair = make_pair(function, signatures, "eager")
            for direction, kernel in zip(("forward", "backward"), pair.kernels):
                yield (
                    {"kernel": direction, "chain": name, "size": size, "dtype": str(dtype)},
                    _compile(kernel),
                )


def _compile(kernel: launch.RowwiseKernel) -> Any:
    """Compile a generated kernel for tensors with the shapes of its graph."""
    chain = kernel.chain
    places = [n.meta["val"] for n in kernel.graph.nodes if n.op == "placeholder"]
    shape = launch.launch_shape(kernel, torch.zeros(1))
    inputs = [torch.zeros(places[v.place].shape, dtype=v.dtype) for v in chain.inputs]
    stored = [torch.zeros(s.shape, dtype=s.dtype) for s in chain.stored]
    sums = [torch.zeros(shape.programs, chain.grid.size) for _ in chain.sums]
    strides = [chain.grid.size for v in chain.inputs if v.rows and v.cols]
    numbers = [chain.grid.rows, chain.grid.size, *strides, shape.tiles]
    return launch.compile_source(kernel.text).warmup(
        *inputs,
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
    """Compile the named groups of kernels, or all, and print their resources."""
    triton.runtime.driver.set_active(Sm90Driver())
    kernels = (pair for name in sys.argv[1:] or KERNELS for pair in KERNELS[name]())
    print(json.dumps([labels | resources(kernel) for labels, kernel in kernels]))


if __name__ == "__main__":
    main()
