"""Features on 4 and 8 simulated devices, and every order of pipelines: as the model alone trains.

`test_features_run.py` has each feature on the fewest ranks that show it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from schedlang.pipeline.schedules import ORDERS, Order
from schedlang.testing.accelerator import spawn, unavailable
from tests.accelerator.test_features_run import (
    CUT,
    EP,
    MIXED,
    PIPE,
    RING,
    STEPS,
    SUM,
    alone,
    batch,
    check,
    dropping,
    kept,
    muon,
    on_ranks,
    ranks_of,
    single,
    sized,
    words,
)
from tests.expert_models import tiny

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there"),
]

TENSOR = (
    "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    "embed  shard(vocab, over=tp)\nhead  shard(vocab, over=tp)\n"
)
ULYSSES = "blocks.*.attn  context_parallel(ulysses, over=cp)\n"
AROUND = (
    "blocks.*.attn  context_parallel(ulysses, over=c)\n"
    "blocks.*.attn  context_parallel(ring, over=r, layout=zigzag)\nzero(stage=0, over=(r, c))"
)
EVERY = 'pipeline(order="1F1B", micro=8)'
# feature -> mesh and rows by the number of ranks; the model has four heads
WIDER = {
    **{f"zero {k}": dict.fromkeys((4, 8), f"zero(stage={k}, over=dp)") for k in range(4)},
    "overlapped sums": dict.fromkeys((4, 8), SUM + "overlap(gradients)"),
    "tensor": {4: TENSOR, 8: TENSOR + SUM},
    "ring": dict.fromkeys((4, 8), RING.format("ring", "cp", "cp")),
    "zigzag": dict.fromkeys((4, 8), RING.format("ring, layout=zigzag", "cp", "cp")),
    "double ring": dict.fromkeys((4, 8), RING.format("double_ring", "(r, c)", "(r, c)")),
    "nbody": dict.fromkeys((4, 8), RING.format("nbody", "(r, c)", "(r, c)")),
    "a ring around ulysses": dict.fromkeys((4, 8), AROUND),
    "ulysses": {4: ULYSSES + "zero(stage=0, over=cp)", 8: ULYSSES + "zero(stage=0, over=(dp, cp))"},
    "checkpoint": dict.fromkeys((4, 8), SUM + "blocks.*  checkpoint()"),
    "activations on the host": dict.fromkeys((4, 8), SUM + "blocks.*  offload(activations)"),
    "activations on disk": dict.fromkeys((4, 8), SUM + "blocks.*  offload(activations, to=disk)"),
    "parameters on the host": dict.fromkeys(
        (4, 8), "zero(stage=3, over=dp)\nblocks.*  offload(parameters)"
    ),
    "optimizer on disk": dict.fromkeys(
        (4, 8), "zero(stage=2, over=dp)\noffload(optimizer, to=disk)"
    ),
    "parameters on disk": dict.fromkeys(
        (4, 8), "zero(stage=3, over=dp)\nblocks.*  offload(parameters, to=disk)"
    ),
    "gradients on the host": dict.fromkeys((4, 8), SUM + "offload(gradients)"),
    "optimizer on the host": dict.fromkeys((4, 8), "zero(stage=1, over=dp)\noffload(optimizer)"),
    "parked on the host": dict.fromkeys((4, 8), "blocks.*  offload(activations)\n" + CUT + EVERY),
    "parked on a peer": dict.fromkeys(
        (4, 8), "blocks.*  offload(activations, to=peer, over=pp)\n" + CUT + EVERY
    ),
    "optimizer on a peer": dict.fromkeys(
        (4, 8), "blocks[:2]  offload(optimizer, to=peer, over=pp)\n" + CUT + EVERY
    ),
    **{
        f"zero {stage} in stages": dict.fromkeys(
            (4, 8), CUT + f"zero(stage={stage}, over=dp)\npipeline({order}, micro=4)"
        )
        for stage, order in enumerate(
            ('order="1F1B"', 'order="Interleaved1F1B", chunks=2', 'order="ZB-V"', 'order="1F1B"')
        )
    },
    "all together": {
        8: TENSOR + "blocks.*  checkpoint()\n" + CUT + "zero(stage=2, over=dp)\n"
        'pipeline(order="Interleaved1F1B", micro=2, chunks=2)'
    },
}
MESHES = {
    ("tensor", 4): "tp=4",
    ("tensor", 8): "dp=2, tp=4",
    ("ulysses", 8): "dp=2, cp=4",
    **{
        (feature, ranks): mesh
        for feature in ("double ring", "nbody", "a ring around ulysses")
        for ranks, mesh in ((4, "r=2, c=2"), (8, "r=4, c=2"))
    },
    **{
        (f"zero {stage} in stages", ranks): mesh
        for stage in range(4)
        for ranks, mesh in ((4, "dp=2, pp=2"), (8, "dp=2, pp=4"))
    },
    ("all together", 8): "dp=2, tp=2, pp=2",
}


def mesh_of(feature: str, ranks: int) -> str:
    """The axis that the rows name, of all ranks, unless it takes two."""
    rows = WIDER[feature][ranks]
    axis = next(one for one in ("dp", "cp", "pp") if f"over={one}" in rows or one == "pp")
    return MESHES.get((feature, ranks), f"{axis}={ranks}")


DEEP = partial(words, 0.0, 8)


@pytest.mark.parametrize(
    "feature,ranks", [(feature, ranks) for feature, some in WIDER.items() for ranks in some]
)
def test_as_the_model_alone(feature: str, ranks: int) -> None:
    """Losses, norms and parameters of some steps, with no race on the way."""
    rows, mesh = WIDER[feature][ranks], mesh_of(feature, ranks)
    # 16 tokens: two pieces for each of 8 ranks, as zigzag cuts them
    found = on_ranks(DEEP, mesh, rows, "sim", bind="pp" in mesh, tokens=16)
    check(found, alone(DEEP, tokens=16))


def rows_of(known: Order, ranks: int) -> str:
    """A pipeline in an order, with the parameters that the order needs."""
    more = ", chunks=2" if known.chunks is None else ""
    more += ", slices=2" if known.sliced else ""
    micro = max(ranks, 4) if known.name != "DualPipe" else max(2 * ranks, 4)
    return CUT + f'pipeline(order="{known.name}", micro={micro}{more})'


def slow(named: Any) -> torch.optim.Optimizer:
    """Small steps: with old weights large ones lead far away."""
    return torch.optim.SGD([p for _, p in named], lr=1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("known", ORDERS, ids=lambda known: known.name)
def test_orders(known: Order, ranks: int) -> None:
    """Stages send and receive in each order; with stale weights, as on ranks of the CPU."""
    rows, make = rows_of(known, ranks), partial(words, 0.0, 2 * ranks)
    given: dict[str, Any] = {"optimizer": slow, "many": 16}
    on, bind = f"pp={ranks}", ranks > 2
    if known.relaxed:
        given["relax"] = ", ".join(sorted(known.relaxed))
        wanted = on_ranks(make, on, rows, None, **given)[0]
    else:
        wanted = alone(make, **given)
    check(on_ranks(make, on, rows, "sim", bind=bind, **given), wanted)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(
    "room", ["", ", capacity=1.0", ", capacity=1.0, dispatch=all_to_all", ", dispatch=fetch"]
)
def test_experts(room: str, ranks: int) -> None:
    """One expert a rank: rows go to all ranks and come home, all or those that have a place."""
    rows = EP.format(room)
    more = {"count": MIXED, "relax": "routing"}
    make = partial(tiny, ranks)
    wanted = on_ranks(make, f"ep={ranks}", rows, None, **more)[0]
    check(on_ranks(make, f"ep={ranks}", rows, "sim", **more), wanted)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("code", ["int8", "onebit", "powersgd"])
def test_compressed_sums(code: str, ranks: int) -> None:
    """As on ranks of the CPU: the same is left out, and added later."""
    rows = SUM + f"compress(gradients, {code}, over=dp)"
    wanted = on_ranks(DEEP, f"dp={ranks}", rows, None, optimizer=muon)[0]
    check(on_ranks(DEEP, f"dp={ranks}", rows, "sim", optimizer=muon), wanted, 1e-6)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("word", ["bf16", "fp16, params=true"])
def test_fewer_bits(word: str, ranks: int) -> None:
    """Casts, with a loss that is scaled where they are to float16."""
    given: tuple[Any, ...] = (single, f"dp={ranks}", f"cast({word})\n{SUM}")
    wanted = on_ranks(*given, None, relax="dtype")[0]
    check(on_ranks(*given, "sim", relax="dtype"), wanted, 1e-2)


DROPPED = {
    4: ("dp=2, tp=2", TENSOR + SUM + "blocks.*  checkpoint()"),
    8: ("dp=2, cp=4", RING.format("ring", "cp", "(dp, cp)")),
}


@pytest.mark.parametrize("ranks", DROPPED)
def test_dropped(ranks: int) -> None:
    """Native dropout: steps are finite, others than without, and copies stay equal."""
    found, without = on_ranks(dropping, *DROPPED[ranks], "sim"), alone(words)[0]
    for losses, _, _, where, apart in found:
        assert where.startswith("sim") and apart == 0.0 and losses == found[0][0]
        assert losses[0] != pytest.approx(without[0], rel=1e-6)
        assert losses == pytest.approx(without, rel=0.3)


@pytest.mark.parametrize("ranks", [4, 8])
def test_activations_in_fewer_bits(ranks: int) -> None:
    """Copies are equal, and training is near to that without."""
    rows = SUM + "blocks.*  compress(activations, int8)"
    for losses, _, _, where, apart in on_ranks(DEEP, f"dp={ranks}", rows, "sim"):
        assert where.startswith("sim") and apart == 0.0
        assert losses == pytest.approx(alone(DEEP)[0], rel=1e-3)


STATE = {
    "slices on 4": ("dp=4", "zero(stage=3, over=dp)"),
    "slices on 8": ("dp=8", "zero(stage=3, over=dp)"),
    "tensor on 4": ("tp=4", TENSOR),
    "context on 8": ("cp=8", RING.format("ring", "cp", "cp")),
    "state on disk on 4": ("dp=4", SUM + "offload(optimizer, to=disk)"),
    "stages on 4": ("pp=4", PIPE),
    "stages with slices on 8": (
        "dp=4, pp=2",
        CUT + 'zero(stage=2, over=dp)\npipeline(order="1F1B", micro=2)',
    ),
}


@pytest.mark.parametrize("layout", STATE)
def test_kept_and_taken_up(layout: str, tmp_path: Path) -> None:
    """A checkpoint and weights on disk go on as before."""
    mesh, rows = STATE[layout]
    model = sized(mesh)()
    model.load_state_dict(alone(sized(mesh))[2])
    after = float(model(**batch(STEPS))["loss"])
    folder = str(tmp_path / "k")
    for _, ahead, again, told, *_ in spawn(kept, mesh, rows, folder, ranks=ranks_of(mesh)):
        assert ahead == pytest.approx(after, rel=1e-9) and again == pytest.approx(after, rel=1e-9)
        assert told[0] == pytest.approx(told[1], rel=1e-9)
