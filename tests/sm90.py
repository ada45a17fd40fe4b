"""Compile the kernels for an H200 without a GPU; print what their machine code uses, as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget


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
        "registers": found["REG"],
        "stack": found["STACK"],
        "spills": count("LDL") + count("STL"),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "loads": count("LDG"),
        "wide_loads": count("LDG", "128"),
    }


def main() -> None:
    """Both kernels of RMSNorm, in bfloat16 and float32, from short rows to the longest."""
    triton.runtime.driver.set_active(Sm90Driver())
    from schedlang.kernels.rms_norm import LONGEST, backward_kernel, forward_kernel, tile

    results = []
    for size, dtype in [
        (128, torch.bfloat16),
        (4096, torch.bfloat16),
        (4096, torch.float32),
        (LONGEST, torch.bfloat16),
        (LONGEST, torch.float32),
    ]:
        x, weight = torch.zeros(16, size, dtype=dtype), torch.zeros(size, dtype=dtype)
        rstd, partial = torch.zeros(16), torch.zeros(16, size)
        rows, block, warps = tile(size)
        options: dict[str, Any] = {"ROWS": rows, "BLOCK": block, "num_warps": warps, "grid": (1,)}
        for early in (False, True):
            kernels = {
                "forward": forward_kernel.warmup(
                    x, weight, x, rstd, 16, size, size, 1e-6, 0.0, EARLY=early, **options
                ),
                "backward": backward_kernel.warmup(
                    *(x, x, weight, rstd, x, partial, 16, size, size, size, 1, 0.0),
                    EARLY=early,
                    **options,
                ),
            }
            for name, kernel in kernels.items():
                row = {"kernel": name, "size": size, "dtype": str(dtype), "early": early}
                results.append(row | resources(kernel))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
