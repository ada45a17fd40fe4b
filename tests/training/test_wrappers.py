"""A module of a built program has at most one wrapper of schedlang's, under any rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from schedlang.passes.lower.build import build
from schedlang.runtime.forward import ORDER, layers_of
from tests import models
from tests.engine import Threads
from tests.proofs import make_plan

OWN = ("schedlang", "primitives", "passes")
SPLIT = """transformer.h.*.attn.c_attn shard(col, blocks=3, over=tp)
transformer.h.*.attn.c_proj shard(row, over=tp)
transformer.h.*.mlp.c_fc shard(col, over=tp)
transformer.h.*.mlp.c_proj shard(row, over=tp)
"""
CAST = "cast(bf16)\n"
CHECKPOINT = "transformer.h.* checkpoint()\n"
OFFLOAD = "transformer.h.* offload(activations)\n"
COMPRESS = "transformer.h.* compress(activations, int8)\n"
KERNEL = "transformer.h.*.ln_1 replace_kernel(layer_norm)\n"
STAGES = 'transformer.h[1] pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
CASES = {
    "nothing": ("", ""),
    "tp": (SPLIT, "tp=2"),
    "all of one block": (CAST + SPLIT + CHECKPOINT + OFFLOAD, "tp=2"),
    "coded": (CAST + COMPRESS, ""),
    "zero": (CHECKPOINT + "zero(stage=3, over=dp)\n", "dp=2"),
    "stages": (CAST + CHECKPOINT + STAGES, "pp=2"),
    "accumulated": (KERNEL + CHECKPOINT + 'pipeline(order="GPipe", micro=2)\n', ""),
    "context": ("context_parallel(ring, over=cp)\n" + CHECKPOINT, "cp=2"),
}


def is_own(value: Any) -> bool:
    """Tell whether a function, or the one that it is a method or part of, is the library's."""
    inner = getattr(value, "func", value)
    inner = getattr(inner, "__func__", inner)
    module_name = str(getattr(inner, "__module__", None) or type(inner).__module__)
    return module_name.split(".")[0] in OWN


def wrappers(module: nn.Module) -> list[str]:
    """Return schedlang's wrappers around the forward of one module, by their kind."""
    names = []
    if is_own(vars(module).get("forward")):
        names.append("forward")
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    for kind in (*hooks, module._backward_pre_hooks):
        names += ["hook" for hook in kind.values() if is_own(hook)]
    return names


def module_wrappers(rows: str, mesh: str) -> Iterator[tuple[str, list[str], list[str], bool]]:
    relaxed = {"cast": "dtype", "compress": "lossy"}
    relax = ", ".join(name for row_name, name in relaxed.items() if row_name in rows)
    plan = make_plan(models.gpt2(2, 0.1), rows, mesh, *([relax] if relax else []))
    program = build(plan, models.tokens(rows=4))
    program.train_step(models.tokens(rows=4))
    for name, module in program.assembly.module.named_modules():
        layers = layers_of(module)
        kinds = [] if layers is None else list(layers.kinds)
        rewrapped = layers is not None and (layers.original is not None or is_own(layers.plain))
        yield name, wrappers(module), kinds, rewrapped


def list_wrappers(rows: str, mesh: str) -> list[tuple[str, list[str], list[str], bool]]:
    return list(module_wrappers(rows, mesh))


@pytest.mark.parametrize("case", CASES)
def test_a_module_has_one_wrapper(threads: Threads, case: str) -> None:
    """One function replaces its forward, with layers in their order; no hooks."""
    rows, mesh = CASES[case]
    all_kinds = set()
    for modules in threads.run(list_wrappers, 2 if mesh else 1, rows, mesh):
        for name, placed, kinds, rewrapped in modules:
            assert placed in ([], ["forward"]), (name, placed)
            assert bool(kinds) == bool(placed) and not rewrapped, (name, kinds)
            assert len(kinds) == len(set(kinds)) and set(kinds) <= set(ORDER), (name, kinds)
            all_kinds.update(kinds)
    assert bool(all_kinds) == bool(rows), "the rows put nothing around any module"


def test_two_wrappers_are_seen() -> None:
    """Nested forwards, and hooks beside them, would be counted."""
    from schedlang.runtime.forward import wrap
    from schedlang.runtime.scope import named_sites

    module = nn.Linear(2, 2)
    wrap(module, "fuse", lambda inner, x: inner(x))
    assert wrappers(module) == ["forward"]
    named_sites(module)
    assert wrappers(module) == ["forward", "hook", "hook"]
