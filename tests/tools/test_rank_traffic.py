"""Traffic from rank to rank: bytes of single collectives, sums, and folding of many ranks."""

from __future__ import annotations

import numpy as np
import pytest

from schedlang.ir.mesh import Mesh, run_axis
from schedlang.passes.simulate.traffic import Collective, list_collectives
from schedlang.viz.cost_pictures import SHARE, Matrix, Pairs, draw_traffic, sum_pairs
from tests import models
from tests.models import tokens
from tests.proofs import make_plan

SQUARE = Mesh((("pp", 2), ("tp", 2)))


def collective(kind: str, axes: str, size: int, **options: object) -> Collective:
    """A collective over some axes, called once."""
    return Collective(kind, tuple(axes.split()), "forward", "", "", 1, size, **options)  # type: ignore[arg-type]


def pairs_of(mesh: Mesh, *collectives: Collective, line: str = "pp", most: int = 64) -> Pairs:
    """The traffic between ranks of these collectives."""
    return sum_pairs(mesh, line, collectives, most)


def test_by_hand() -> None:
    """An all-reduce over tp, a send to the next stage and a gather over all, checked by hand."""
    reduce = pairs_of(SQUARE, collective("all-reduce", "tp", 100)).bytes
    assert reduce.tolist() == [[0, 100, 0, 0], [100, 0, 0, 0], [0, 0, 0, 100], [0, 0, 100, 0]]
    send = pairs_of(SQUARE, collective("send", "pp", 8, places=frozenset({0}), to=1)).bytes
    assert send.tolist() == [[0, 0, 8, 0], [0, 0, 0, 8], [0, 0, 0, 0], [0, 0, 0, 0]]
    gather = pairs_of(SQUARE, collective("all-gather", "pp tp", 40)).bytes
    assert (gather == 10 * (1 - np.eye(4))).all()


def test_a_ring_goes_around() -> None:
    """A send without a target goes to the next rank of its group, from the last to the first."""
    ring = pairs_of(Mesh((("cp", 3),)), collective("send", "cp", 5), line="").bytes
    assert ring.tolist() == [[0, 5, 0], [0, 0, 5], [5, 0, 0]]


def test_only_where_it_happens() -> None:
    """A collective of one pipeline stage has no bytes on other stages."""
    traffic = pairs_of(SQUARE, collective("all-reduce", "tp", 100, places=frozenset({1}))).bytes
    assert traffic.sum() == 200 and traffic[2, 3] == traffic[3, 2] == 100


def test_runs_of_neighbours() -> None:
    """A group of two neighbours on an axis of four sends nothing to the other two."""
    traffic = pairs_of(
        Mesh((("tp", 4),)), collective("all-gather", run_axis("tp", 2), 6), line=""
    ).bytes
    assert traffic[0].tolist() == [0, 3, 0, 0] and traffic[2].tolist() == [0, 0, 0, 3]


@pytest.mark.parametrize("kind", SHARE)
@pytest.mark.parametrize("axes", ["dp", "tp", "dp tp", "dp pp tp"])
def test_sums_are_those_of_groups(kind: str, axes: str) -> None:
    """Each rank sends a share to each other group member; folding keeps the sums."""
    mesh = Mesh((("dp", 4), ("pp", 2), ("tp", 8)))
    size = mesh.size(tuple(axes.split()))
    per_rank = SHARE[kind] * 720 * (size - 1) / size
    full = pairs_of(mesh, collective(kind, axes, 720))
    assert full.each == 1 and np.allclose(full.bytes.sum(1), per_rank)
    folded = pairs_of(mesh, collective(kind, axes, 720), most=8)
    assert folded.each == 8 and folded.names[-1] == "dp=3, pp=1"
    assert np.allclose(folded.bytes, full.bytes.reshape(8, 8, 8, 8).sum((1, 3)))


def test_a_long_axis_shows_its_first_ranks() -> None:
    """If the slowest axis is too long, its first ranks are shown unfolded."""
    mesh = Mesh((("dp", 512), ("tp", 32)))
    traffic = pairs_of(
        mesh, collective("all-reduce", "tp", 320), collective("all-gather", "dp", 512), line=""
    )
    assert traffic.ranks == 64 and traffic.bytes.shape == (64, 64)
    assert traffic.bytes[0, 1] == 20 and traffic.bytes[0, 32] == 1 and traffic.bytes[0, 33] == 0


def test_a_pipeline_sends_to_its_neighbours() -> None:
    """On a real model sends go between neighbouring stages only, both ways for ZB-V."""
    from schedlang.passes.analyze.prepare import prepare

    rows = 'transformer.h  pipeline_split(over=pp)\npipeline(order="ZB-V", micro=4, chunks=2)\n'
    plan = make_plan(models.gpt2(layers=4), rows, "pp=2")
    sample = tokens(rows=2)
    collectives = list_collectives(plan, prepare(plan, sample, None, None), sample)
    sent = [send for send in collectives if send.kind == "send"]
    assert sent and all(send.to is not None and send.places != {send.to} for send in sent)
    assert {(*send.places, send.to) for send in sent if send.places} == {(0, 1), (1, 0)}
    total = sum_pairs(plan.mesh, "pp", sent).bytes
    assert total.sum() == sum(send.total for send in sent)


def test_shades_follow_bytes() -> None:
    """More bytes are never lighter, most bytes are darkest, equal bytes have one shade."""
    sums = pairs_of(
        SQUARE, collective("all-reduce", "tp", 10_000), collective("all-gather", "pp", 64)
    )
    matrix = Matrix(sums, 0)
    shades = [matrix.shade(value) for value in (32.0, 100.0, 1000.0, 10_000.0)]
    assert shades == sorted(shades) and shades[0] == 0 and shades[-1] == 3
    assert len(Matrix(pairs_of(SQUARE, collective("all-reduce", "tp", 10)), 0).shade_starts) == 1


def test_nothing_sent_is_nothing_drawn() -> None:
    """A plan on one rank, or without a batch, has no traffic picture."""
    from schedlang.passes.simulate.account import account
    from schedlang.viz.show import make_view

    plan = make_plan(models.gpt2(), "transformer.h.*  checkpoint()")
    assert draw_traffic(make_view(plan, account(plan, None)), 10) == ([], 0)
