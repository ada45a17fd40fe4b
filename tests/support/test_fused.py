"""`fuse` beside each combination of the page of support: compiled in training, or it says why not.

What decides whether a region is compiled is everything up to inductor: what watches its calls,
dynamo's one graph, and the two graphs of forward and backward.  Here these run as they are, and
their operators eagerly: compiling all would take hours, and `test_fuse.py` compiles a few.
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
from tests.support.features import Combination, layers, schedule, subject
from tests.support.subjects import LLAMA, MIXTRAL, PICTURES, WHISPER, made

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

# of each model what is fused: an MLP or a norm inside of a block, or all of it
REGIONS = {
    LLAMA.name: "{trunk}.*.mlp fuse()",
    MIXTRAL.name: "{trunk}.*.post_attention_layernorm fuse()",
    PICTURES.name: "{trunk}.* fuse()",
    WHISPER.name: "{trunk}.* fuse()",
}
# where calls are watched in training, or sent by what no graph holds, as the page of fuse says
EAGER = {"ring", "ulysses", "grid"}
NO_GRAPH = "S833"
ALWAYS = (("tensor", "1F1B"), ("grid",), ("channels", "spatial"))


def plan_of(names: Combination, fused: bool) -> tuple[Plan, tuple[Mapping[str, Any], ...]]:
    """The plan of a combination on its model in float32, with the region or without it."""
    model = subject(names)
    assert model is not None
    text = schedule(names)
    if fused:
        head, brace, rest = text.partition("{\n")
        text = f"{head}{brace}  {REGIONS[model.name].format(trunk=model.trunk)}\n{rest}"
    module = copy.deepcopy(made(model, layers(names))).float()
    return Schedule(module, parse(Source("fused.sched", text)), Settings()).plan(), tuple(
        {k: v.float() if v.is_floating_point() else v for k, v in one.items()}
        for one in model.batches()
    )


def trained(plan: Plan, batches: Any) -> tuple[list[bool], list[str], list[float]]:
    """On a rank: graphs of each region that runs here, what ran eagerly and why, and losses."""
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
        losses = [float(program.train_step(one)) for one in batches]
    left = declined_in(program.assembly.module)
    ran = [one.compiled is not None for one in called.values()]
    return ran, [one.reason for one in left if one.kernel == "fuse"], losses


def judged(names: Combination, pool: Pool) -> None:
    """Each region is compiled on each rank that has it; where it is not, a reason is told."""
    plan, batches = plan_of(names, True)
    bare, _ = plan_of(names, False)
    ranks = plan.mesh.world
    wanted = pool.run(trained, ranks, bare, batches, timeout=300)
    found = pool.run(trained, ranks, plan, batches, timeout=300)
    for (ran, left, losses), (none, _, without) in zip(found, wanted, strict=True):
        assert not none and losses == pytest.approx(without, rel=1e-4)
        assert ran and (left or all(ran)), (ran, left)
        assert not left or EAGER & set(names), left


VERIFIED_ONES = [names for names, cell in page.read().items() if cell.status == VERIFIED]


def _named(names: Combination) -> str:
    return " x ".join(names)


@pytest.mark.parametrize("names", ALWAYS, ids=_named)
def test_some(names: Combination, pool: Pool) -> None:
    """Split products in stages, broadcasts along lines, and halos of convolutions."""
    judged(names, pool)


@pytest.mark.deep
@pytest.mark.parametrize("names", VERIFIED_ONES, ids=_named)
def test_every_combination(names: Combination, pool: Pool) -> None:
    """All that the page says to be verified; a region that cannot stand there is refused."""
    try:
        judged(names, pool)
    except Refusal as refusal:
        assert refusal.diagnostics[0].code != NO_GRAPH and refusal.diagnostics[0].helps
