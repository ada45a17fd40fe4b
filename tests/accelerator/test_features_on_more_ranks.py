"""Features on 4 and 8 simulated devices, and every pipeline order, train as the original model.

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
    EP,
    MIXED,
    PIPELINE,
    RING,
    STAGE_SPLIT,
    STEPS,
    ZERO_0,
    batch,
    check_training,
    dropout_model,
    float32_model,
    language_model,
    model_for,
    muon,
    ranks_of,
    save_and_load,
    single_process,
    train_on_ranks,
)
from tests.expert_models import tiny_model

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there"),
]

TENSOR = (
    "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    "embed  shard(vocab, over=tp)\nhead  shard(vocab, over=tp)\n"
)
ULYSSES = "blocks.*.attn  context_parallel(ulysses, over=cp)\n"
RING_ULYSSES = (
    "blocks.*.attn  context_parallel(ulysses, over=c)\n"
    "blocks.*.attn  context_parallel(ring, over=r, layout=zigzag)\nzero(stage=0, over=(r, c))"
)
EIGHT_MICRO = 'pipeline(order="1F1B", micro=8)'
# feature -> mesh and rows by the number of ranks; the model has four heads
FEATURES = {
    **{f"zero {k}": dict.fromkeys((4, 8), f"zero(stage={k}, over=dp)") for k in range(4)},
    "overlapped sums": dict.fromkeys((4, 8), ZERO_0 + "overlap(gradients)"),
    "tensor": {4: TENSOR, 8: TENSOR + ZERO_0},
    "ring": dict.fromkeys((4, 8), RING.format("ring", "cp", "cp")),
    "zigzag": dict.fromkeys((4, 8), RING.format("ring, layout=zigzag", "cp", "cp")),
    "double ring": dict.fromkeys((4, 8), RING.format("double_ring", "(r, c)", "(r, c)")),
    "nbody": dict.fromkeys((4, 8), RING.format("nbody", "(r, c)", "(r, c)")),
    "a ring around ulysses": dict.fromkeys((4, 8), RING_ULYSSES),
    "ulysses": {4: ULYSSES + "zero(stage=0, over=cp)", 8: ULYSSES + "zero(stage=0, over=(dp, cp))"},
    "checkpoint": dict.fromkeys((4, 8), ZERO_0 + "blocks.*  checkpoint()"),
    "activations on the host": dict.fromkeys((4, 8), ZERO_0 + "blocks.*  offload(activations)"),
    "activations on disk": dict.fromkeys(
        (4, 8), ZERO_0 + "blocks.*  offload(activations, to=disk)"
    ),
    "parameters on the host": dict.fromkeys(
        (4, 8), "zero(stage=3, over=dp)\nblocks.*  offload(parameters)"
    ),
    "optimizer on disk": dict.fromkeys(
        (4, 8), "zero(stage=2, over=dp)\noffload(optimizer, to=disk)"
    ),
    "parameters on disk": dict.fromkeys(
        (4, 8), "zero(stage=3, over=dp)\nblocks.*  offload(parameters, to=disk)"
    ),
    "gradients on the host": dict.fromkeys((4, 8), ZERO_0 + "offload(gradients)"),
    "optimizer on the host": dict.fromkeys((4, 8), "zero(stage=1, over=dp)\noffload(optimizer)"),
    "parked on the host": dict.fromkeys(
        (4, 8), "blocks.*  offload(activations)\n" + STAGE_SPLIT + EIGHT_MICRO
    ),
    "parked on a peer": dict.fromkeys(
        (4, 8), "blocks.*  offload(activations, to=peer, over=pp)\n" + STAGE_SPLIT + EIGHT_MICRO
    ),
    "optimizer on a peer": dict.fromkeys(
        (4, 8), "blocks[:2]  offload(optimizer, to=peer, over=pp)\n" + STAGE_SPLIT + EIGHT_MICRO
    ),
    **{
        f"zero {stage} in stages": dict.fromkeys(
            (4, 8), STAGE_SPLIT + f"zero(stage={stage}, over=dp)\npipeline({order}, micro=4)"
        )
        for stage, order in enumerate(
            ('order="1F1B"', 'order="Interleaved1F1B", chunks=2', 'order="ZB-V"', 'order="1F1B"')
        )
    },
    "all together": {
        8: TENSOR + "blocks.*  checkpoint()\n" + STAGE_SPLIT + "zero(stage=2, over=dp)\n"
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
    """Return the mesh of all ranks along the axis that the rows name, or the one listed in
    MESHES."""
    rows = FEATURES[feature][ranks]
    axis = next(name for name in ("dp", "cp", "pp") if f"over={name}" in rows or name == "pp")
    return MESHES.get((feature, ranks), f"{axis}={ranks}")


deep_model = partial(language_model, 0.0, 8)


@pytest.mark.parametrize(
    "feature,ranks", [(feature, ranks) for feature, some in FEATURES.items() for ranks in some]
)
def test_as_the_model_alone(feature: str, ranks: int) -> None:
    """Losses, norms and parameters of some steps, with no race on the way."""
    rows, mesh = FEATURES[feature][ranks], mesh_of(feature, ranks)
    # 16 tokens: two pieces for each of 8 ranks, as zigzag cuts them
    results = train_on_ranks(deep_model, mesh, rows, "sim", bind="pp" in mesh, tokens=16)
    check_training(results, single_process(deep_model, tokens=16))


def rows_of(order: Order, ranks: int) -> str:
    """Return a pipeline with an order, and the parameters that the order needs."""
    parameters = ", chunks=2" if order.chunks is None else ""
    parameters += ", slices=2" if order.sliced else ""
    micro = max(ranks, 4) if order.name != "DualPipe" else max(2 * ranks, 4)
    return STAGE_SPLIT + f'pipeline(order="{order.name}", micro={micro}{parameters})'


def small_steps(named: Any) -> torch.optim.Optimizer:
    """Return SGD with small steps: with stale weights large ones diverge."""
    return torch.optim.SGD([p for _, p in named], lr=1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("known", ORDERS, ids=lambda known: known.name)
def test_orders(known: Order, ranks: int) -> None:
    """Stages send and receive in each order; with stale weights, as on CPU ranks."""
    rows, make = rows_of(known, ranks), partial(language_model, 0.0, 2 * ranks)
    options: dict[str, Any] = {"optimizer": small_steps, "many": 16}
    mesh, bind = f"pp={ranks}", ranks > 2
    if known.relaxed:
        options["relax"] = ", ".join(sorted(known.relaxed))
        expected = train_on_ranks(make, mesh, rows, None, **options)[0]
    else:
        expected = single_process(make, **options)
    check_training(train_on_ranks(make, mesh, rows, "sim", bind=bind, **options), expected)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(
    "room", ["", ", capacity=1.0", ", capacity=1.0, dispatch=all_to_all", ", dispatch=fetch"]
)
def test_experts(room: str, ranks: int) -> None:
    """One expert on each rank: all tokens, or those within capacity, go to all ranks and back."""
    rows = EP.format(room)
    options = {"count": MIXED, "relax": "routing"}
    make = partial(tiny_model, ranks)
    expected = train_on_ranks(make, f"ep={ranks}", rows, None, **options)[0]
    check_training(train_on_ranks(make, f"ep={ranks}", rows, "sim", **options), expected)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("code", ["int8", "onebit", "powersgd"])
def test_compressed_sums(code: str, ranks: int) -> None:
    """As on CPU ranks: the same error is left out, and added later."""
    rows = ZERO_0 + f"compress(gradients, {code}, over=dp)"
    expected = train_on_ranks(deep_model, f"dp={ranks}", rows, None, optimizer=muon)[0]
    check_training(
        train_on_ranks(deep_model, f"dp={ranks}", rows, "sim", optimizer=muon), expected, 1e-6
    )


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("word", ["bf16", "fp16, params=true"])
def test_fewer_bits(word: str, ranks: int) -> None:
    """Casts, with loss scaling where they are to float16."""
    args: tuple[Any, ...] = (float32_model, f"dp={ranks}", f"cast({word})\n{ZERO_0}")
    expected = train_on_ranks(*args, None, relax="dtype")[0]
    check_training(train_on_ranks(*args, "sim", relax="dtype"), expected, 1e-2)


DROPOUT = {
    4: ("dp=2, tp=2", TENSOR + ZERO_0 + "blocks.*  checkpoint()"),
    8: ("dp=2, cp=4", RING.format("ring", "cp", "(dp, cp)")),
}


@pytest.mark.parametrize("ranks", DROPOUT)
def test_dropped(ranks: int) -> None:
    """Native dropout: losses are finite, differ from those without, and replicas stay equal."""
    results, reference = (
        train_on_ranks(dropout_model, *DROPOUT[ranks], "sim"),
        single_process(language_model)[0],
    )
    for losses, _, _, computed_on, replica_error in results:
        assert computed_on.startswith("sim") and replica_error == 0.0 and losses == results[0][0]
        assert losses[0] != pytest.approx(reference[0], rel=1e-6)
        assert losses == pytest.approx(reference, rel=0.3)


@pytest.mark.parametrize("ranks", [4, 8])
def test_activations_in_fewer_bits(ranks: int) -> None:
    """Replicas are equal, and losses are near those without compression."""
    rows = ZERO_0 + "blocks.*  compress(activations, int8)"
    for losses, _, _, computed_on, replica_error in train_on_ranks(
        deep_model, f"dp={ranks}", rows, "sim"
    ):
        assert computed_on.startswith("sim") and replica_error == 0.0
        assert losses == pytest.approx(single_process(deep_model)[0], rel=1e-3)


SAVED = {
    "slices on 4": ("dp=4", "zero(stage=3, over=dp)"),
    "slices on 8": ("dp=8", "zero(stage=3, over=dp)"),
    "tensor on 4": ("tp=4", TENSOR),
    "context on 8": ("cp=8", RING.format("ring", "cp", "cp")),
    "state on disk on 4": ("dp=4", ZERO_0 + "offload(optimizer, to=disk)"),
    "stages on 4": ("pp=4", PIPELINE),
    "stages with slices on 8": (
        "dp=4, pp=2",
        STAGE_SPLIT + 'zero(stage=2, over=dp)\npipeline(order="1F1B", micro=2)',
    ),
}


@pytest.mark.parametrize("layout", SAVED)
def test_kept_and_taken_up(layout: str, tmp_path: Path) -> None:
    """Training goes on from a checkpoint as before."""
    mesh, rows = SAVED[layout]
    model = model_for(mesh)()
    model.load_state_dict(single_process(model_for(mesh))[2])
    expected_loss = float(model(**batch(STEPS))["loss"])
    folder = str(tmp_path / "k")
    for _, next_loss, loaded_loss, evaluated, *_ in spawn(
        save_and_load, mesh, rows, folder, ranks=ranks_of(mesh)
    ):
        assert next_loss == pytest.approx(expected_loss, rel=1e-9) and loaded_loss == pytest.approx(
            expected_loss, rel=1e-9
        )
        assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-9)
