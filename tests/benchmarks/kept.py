"""Bytes that autograd saves for a backward: python -m tests.benchmarks.kept

As a program it prints what each `checkpoint` row saves of a GPT-2 with 24 layers, counted on the
meta device, beside the formula of Korthikanti et al. (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def saved_bytes_of(step: Callable[[], Any]) -> int:
    """Return the bytes of storages that autograd saves during a step, without parameters.

    For a step with one forward and one backward this is the peak of saved bytes.
    """
    sizes: dict[int, int] = {}
    tensors: list[torch.Tensor] = []  # so that no address is reused meanwhile
    parameters: set[int] = set()

    def keep(saved: torch.Tensor) -> torch.Tensor:
        tensor = saved._local_tensor if isinstance(saved, DTensor) else saved
        tensor = tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor
        storage = tensor.untyped_storage()
        if isinstance(saved, nn.Parameter) or isinstance(tensor, nn.Parameter):
            parameters.add(storage.data_ptr())
        sizes[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        step()
    return sum(size for place, size in sizes.items() if place not in parameters)


def _gpt2(width: int, layers: int, heads: int, length: int) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_positions=length,
        vocab_size=64,
        activation_function="gelu_pytorch_tanh",
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


# saved bytes of a layer per s*b*h and per a*s*s*b, with 2-byte elements: Korthikanti et al. (2022),
# table 2, with dropout masks of 2 bytes, as torch has them on a CPU
_FULL_LAYER = (36, 6)
POLICIES: dict[str, tuple[str, Callable[[int], tuple[float, float]]]] = {
    "nothing": ("", lambda n: (_FULL_LAYER[0] * n, _FULL_LAYER[1] * n)),
    "every layer": ("checkpoint()", lambda n: (2 * n, 0)),
    "groups of 4": ("checkpoint(group=4)", lambda n: (2 * n / 4, 0)),
    "groups of sqrt": ("checkpoint(group=sqrt)", lambda n: (2 * -(-n // 5), 0)),
    "every second": (
        "checkpoint(every=2)",
        lambda n: ((2 + _FULL_LAYER[0]) * n / 2, _FULL_LAYER[1] * n / 2),
    ),
    "matrix products": ("checkpoint(save=[linear])", lambda n: (22 * n, 2 * n)),
    "rotor": ("checkpoint(plan=rotor, memory={budget}B)", lambda n: (0, 0)),
    "pareto": ("checkpoint(plan=pareto, memory={budget}B)", lambda n: (0, 0)),
    "dtr": ("checkpoint(plan=dtr, memory={budget}B)", lambda n: (0, 0)),
    **{
        f"{bits} bits": (f"compress(activations, int{bits})", lambda n: (0, 0))
        for bits in (8, 4, 2)
    },
}


def table(layers: int = 24, width: int = 256, heads: int = 4, length: int = 128) -> None:
    """Print the saved bytes of each row for a GPT-2, counted on meta, beside the formula."""
    from tests.memory.test_activations import estimate_bytes
    from tests.proofs import make_plan

    with torch.device("meta"):
        model = _gpt2(width, layers, heads, length).bfloat16()
    ids = torch.zeros(1, length, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    unit, scores = length * width, heads * length * length
    base_bytes, _ = estimate_bytes(make_plan(_same_sizes(model, 0), ""), batch)
    print(f"GPT-2, {layers} layers of {width}, {heads} heads, {length} tokens, bfloat16")
    print(f"{'kept of a forward':20}{'counted':>12}{'formula':>12}{'ratio':>8}{'peak':>12}")
    for name, (row, formula) in POLICIES.items():
        rows = f"transformer.h.*  {row}".format(budget=12 << 20) if row else ""
        relax = "lossy" if "compress" in row else ""
        saved_bytes, peak = estimate_bytes(make_plan(model, rows, relax=relax), batch)
        a, b = formula(layers)
        expected = a * unit + b * scores
        comparison = (
            f"{expected:12.0f}{(saved_bytes - base_bytes) / expected:8.3f}"
            if expected
            else " " * 20
        )
        print(f"{name:20}{saved_bytes - base_bytes:12d}{comparison}{peak:12d}")


def _same_sizes(model: Any, layers: int) -> nn.Module:
    c = model.config
    with torch.device("meta"):
        return _gpt2(c.n_embd, layers, c.n_head, c.n_positions).bfloat16()


if __name__ == "__main__":
    table()
