"""Bytes that autograd keeps for a backward, whoever computes: python -m tests.benchmarks.kept

Run by itself: a table of what each row of `checkpoint` keeps of a GPT-2 with 24 layers, counted on
the meta device, beside the formula of Korthikanti et al. (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def kept_bytes(step: Callable[[], Any]) -> int:
    """The storages that autograd saved during a step, each once, parameters left out.

    Of a step with one forward before one backward, this is the most that is kept at once.
    """
    sizes: dict[int, int] = {}
    held: list[torch.Tensor] = []  # no storage is freed and its address used again meanwhile
    weights: set[int] = set()

    def keep(saved: torch.Tensor) -> torch.Tensor:
        tensor = saved._local_tensor if isinstance(saved, DTensor) else saved
        tensor = tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor
        storage = tensor.untyped_storage()
        if isinstance(saved, nn.Parameter) or isinstance(tensor, nn.Parameter):
            weights.add(storage.data_ptr())
        sizes[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        step()
    return sum(size for place, size in sizes.items() if place not in weights)


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


# what a row keeps of a layer, in bytes for each element of 2: Korthikanti et al. (2022), table 2,
# with masks of dropout in 2 bytes, as torch has them on a CPU; s*b*h and a*s*s*b
_WHOLE = (36, 6)
POLICIES: dict[str, tuple[str, Callable[[int], tuple[float, float]]]] = {
    "nothing": ("", lambda n: (_WHOLE[0] * n, _WHOLE[1] * n)),
    "every layer": ("checkpoint()", lambda n: (2 * n, 0)),
    "groups of 4": ("checkpoint(group=4)", lambda n: (2 * n / 4, 0)),
    "groups of sqrt": ("checkpoint(group=sqrt)", lambda n: (2 * -(-n // 5), 0)),
    "every second": ("checkpoint(every=2)", lambda n: ((2 + _WHOLE[0]) * n / 2, _WHOLE[1] * n / 2)),
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
    """Print what each row keeps of a GPT-2, counted on meta, beside the formula."""
    from tests.memory.test_activations import told
    from tests.proofs import planned

    with torch.device("meta"):
        model = _gpt2(width, layers, heads, length).bfloat16()
    ids = torch.zeros(1, length, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    unit, scores = length * width, heads * length * length
    rest, _ = told(planned(_like(model, 0), ""), batch)
    print(f"GPT-2, {layers} layers of {width}, {heads} heads, {length} tokens, bfloat16")
    print(f"{'kept of a forward':20}{'counted':>12}{'formula':>12}{'ratio':>8}{'peak':>12}")
    for name, (row, formula) in POLICIES.items():
        rows = f"transformer.h.*  {row}".format(budget=12 << 20) if row else ""
        relax = "lossy" if "compress" in row else ""
        kept, most = told(planned(model, rows, relax=relax), batch)
        a, b = formula(layers)
        expected = a * unit + b * scores
        beside = f"{expected:12.0f}{(kept - rest) / expected:8.3f}" if expected else " " * 20
        print(f"{name:20}{kept - rest:12d}{beside}{most:12d}")


def _like(model: Any, layers: int) -> nn.Module:
    c = model.config
    with torch.device("meta"):
        return _gpt2(c.n_embd, layers, c.n_head, c.n_positions).bfloat16()


if __name__ == "__main__":
    table()
