"""`fuse` with each combination of the matrix: compiled in training, or declined with a reason.

Everything before inductor decides whether a region is compiled: hooks on its calls, dynamo's
single graph, and the graphs of forward and backward. These run here as in production, but their
operators run eagerly: compiling all would take hours, and `test_fuse.py` compiles a few.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.runtime.declined_calls import declined_in
from schedlang.runtime.fusion.fuse import FusedForward, why_unavailable
from schedlang.runtime.launch.pool import Pool
from schedlang.schedule import Schedule
from tests.proofs import sgd
from tests.support import page
from tests.support.cells import VERIFIED
from tests.support.features import Combination, layer_count, model_for, schedule_text
from tests.support.matrix_models import LLAMA, MIXTRAL, PICTURES, WHISPER, build_model

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

# the fused region of each model: an MLP or a norm inside a block, or the whole block
REGIONS = {
    LLAMA.name: "{trunk}.*.mlp fuse()",
    MIXTRAL.name: "{trunk}.*.post_attention_layernorm fuse()",
    PICTURES.name: "{trunk}.* fuse()",
    WHISPER.name: "{trunk}.* fuse()",
}
# where regions run eagerly: hooks in training, or collectives that no graph can contain
EAGER = {"ring", "ulysses", "grid"}
NO_GRAPH = "S833"
QUICK_COMBINATIONS = (("tensor", "1F1B"), ("grid",), ("channels", "spatial"))


def plan_combination(names: Combination, fused: bool) -> tuple[Plan, tuple[Mapping[str, Any], ...]]:
    """The plan of a combination in float32, with or without the fused region, and its batches."""
    model = model_for(names)
    assert model is not None
    text = schedule_text(names)
    if fused:
        head, brace, rows = text.partition("{\n")
        text = f"{head}{brace}  {REGIONS[model.name].format(trunk=model.trunk)}\n{rows}"
    module = copy.deepcopy(build_model(model, layer_count(names))).float()
    return Schedule(module, parse(Source("fused.sched", text)), Settings()).plan(), tuple(
        {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
        for batch in model.batches()
    )


def train_rank(plan: Plan, batches: Any) -> tuple[list[bool], list[str], list[float]]:
    """Train on one rank; return which regions compiled, why others were declined, and the
    losses."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    called: dict[int, FusedForward] = {}
    call = FusedForward.__call__

    def noted(self: FusedForward, *args: Any, **kwargs: Any) -> Any:
        called[id(self)] = self
        return call(self, *args, **kwargs)

    program = build(plan, batches[0], optimizer=sgd)
    eagerly = mock.patch.object(compile_fx, "compile_fx", aot_eager)
    with eagerly, mock.patch.object(FusedForward, "__call__", noted):
        losses = [float(program.train_step(item)) for item in batches]
    declined = declined_in(program.assembly.module)
    compiled = [item.compiled is not None for item in called.values()]
    return compiled, [item.reason for item in declined if item.kernel == "fuse"], losses


def check_compiled(names: Combination, pool: Pool) -> None:
    """Check that each region is compiled on each of its ranks, or declined with a reason."""
    plan, batches = plan_combination(names, True)
    original, _ = plan_combination(names, False)
    ranks = plan.mesh.world
    expected = pool.run(train_rank, ranks, original, batches, timeout=300)
    results = pool.run(train_rank, ranks, plan, batches, timeout=300)
    for (compiled, declined, losses), (no_regions, _, losses_without) in zip(
        results, expected, strict=True
    ):
        assert not no_regions and losses == pytest.approx(losses_without, rel=1e-4)
        assert compiled and (declined or all(compiled)), (compiled, declined)
        assert not declined or EAGER & set(names), declined


VERIFIED_NAMES = [names for names, cell in page.read_cells().items() if cell.status == VERIFIED]


def _joined_names(names: Combination) -> str:
    return " x ".join(names)


@pytest.mark.parametrize("names", QUICK_COMBINATIONS, ids=_joined_names)
def test_some(names: Combination, pool: Pool) -> None:
    """Sharded products in stages, a grid, and halos of convolutions."""
    check_compiled(names, pool)


@pytest.mark.deep
@pytest.mark.parametrize("names", VERIFIED_NAMES, ids=_joined_names)
def test_every_combination(names: Combination, pool: Pool) -> None:
    """All verified combinations; a region that is impossible there is refused."""
    try:
        check_compiled(names, pool)
    except Refusal as refusal:
        assert refusal.diagnostics[0].code != NO_GRAPH and refusal.diagnostics[0].helps
