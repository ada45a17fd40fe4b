"""A module of a built program has at most one wrapper of ours, whatever rows are about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from schedlang.passes.lower.build import build
from schedlang.runtime.forward import ORDER, layers_of
from tests import models
from tests.engine import Threads
from tests.proofs import planned

OWN = ("schedlang", "primitives", "passes")
SPLIT = """transformer.h.*.attn.c_attn shard(col, blocks=3, over=tp)
transformer.h.*.attn.c_proj shard(row, over=tp)
transformer.h.*.mlp.c_fc shard(col, over=tp)
transformer.h.*.mlp.c_proj shard(row, over=tp)
"""
CAST = "cast(bf16)\n"
AGAIN = "transformer.h.* checkpoint()\n"
AWAY = "transformer.h.* offload(activations)\n"
CODED = "transformer.h.* compress(activations, int8)\n"
KERNEL = "transformer.h.*.ln_1 replace_kernel(layer_norm)\n"
PIPE = 'transformer.h[1] pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
CASES = {
    "nothing": ("", ""),
    "tp": (SPLIT, "tp=2"),
    "all of one block": (CAST + SPLIT + AGAIN + AWAY, "tp=2"),
    "coded": (CAST + CODED, ""),
    "zero": (AGAIN + "zero(stage=3, over=dp)\n", "dp=2"),
    "stages": (CAST + AGAIN + PIPE, "pp=2"),
    "accumulated": (KERNEL + AGAIN + 'pipeline(order="GPipe", micro=2)\n', ""),
    "context": ("context_parallel(ring, over=cp)\n" + AGAIN, "cp=2"),
}


def _ours(value: Any) -> bool:
    """Does a function, or what it is a method or a part of, come from the library?"""
    inner = getattr(value, "func", value)
    inner = getattr(inner, "__func__", inner)
    home = str(getattr(inner, "__module__", None) or type(inner).__module__)
    return home.split(".")[0] in OWN


def wrappers(module: nn.Module) -> list[str]:
    """What of ours stands around the forward of one module, by where it is put."""
    found = []
    if _ours(vars(module).get("forward")):
        found.append("forward")
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    for kind in (*hooks, module._backward_pre_hooks):
        found += ["hook" for hook in kind.values() if _ours(hook)]
    return found


def _found(rows: str, mesh: str) -> Iterator[tuple[str, list[str], list[str], bool]]:
    relaxed = {"cast": "dtype", "compress": "lossy"}
    relax = ", ".join(name for word, name in relaxed.items() if word in rows)
    plan = planned(models.gpt2(2, 0.1), rows, mesh, *([relax] if relax else []))
    program = build(plan, models.tokens(rows=4))
    program.train_step(models.tokens(rows=4))
    for name, module in program.assembly.module.named_modules():
        layers = layers_of(module)
        kinds = [] if layers is None else list(layers.kinds)
        around = layers is not None and (layers.original is not None or _ours(layers.plain))
        yield name, wrappers(module), kinds, around


def _all(rows: str, mesh: str) -> list[tuple[str, list[str], list[str], bool]]:
    return list(_found(rows, mesh))


@pytest.mark.parametrize("case", CASES)
def test_a_module_has_one_wrapper(threads: Threads, case: str) -> None:
    """One function in the place of its forward, with its layers in their order; no hook of ours."""
    rows, mesh = CASES[case]
    seen = set()
    for found in threads.run(_all, 2 if mesh else 1, rows, mesh):
        for name, put, kinds, around in found:
            assert put in ([], ["forward"]), (name, put)
            assert bool(kinds) == bool(put) and not around, (name, kinds)
            assert len(kinds) == len(set(kinds)) and set(kinds) <= set(ORDER), (name, kinds)
            seen.update(kinds)
    assert bool(seen) == bool(rows), "the rows put nothing around any module"


def test_two_wrappers_are_seen() -> None:
    """Forwards around forwards, and hooks beside them, would be counted."""
    from schedlang.runtime.forward import wrap
    from schedlang.runtime.scope import named_sites

    module = nn.Linear(2, 2)
    wrap(module, "fuse", lambda inner, x: inner(x))
    assert wrappers(module) == ["forward"]
    named_sites(module)
    assert wrappers(module) == ["forward", "hook", "hook"]
