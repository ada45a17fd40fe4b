"""Bytes from rank to rank: by hand, in sum, and folded over many ranks."""

from __future__ import annotations

import numpy as np
import pytest

from schedlang.ir.mesh import Mesh, run_axis
from schedlang.passes.simulate.traffic import Collective, list_collectives
from schedlang.viz.cost_pictures import SHARE, Matrix, Pairs, draw_traffic, sum_pairs
from tests import models
from tests.models import tokens
from tests.proofs import planned

SQUARE = Mesh((("pp", 2), ("tp", 2)))


def one(kind: str, axes: str, size: int, **more: object) -> Collective:
    """A collective over some axes, once."""
    return Collective(kind, tuple(axes.split()), "forward", "", "", 1, size, **more)  # type: ignore[arg-type]


def of(mesh: Mesh, *found: Collective, line: str = "pp", most: int = 64) -> Pairs:
    return sum_pairs(mesh, line, found, most)


def test_by_hand() -> None:
    """A sum over tp, a send to the next stage, a gather over all: each where it goes."""
    reduce = of(SQUARE, one("all-reduce", "tp", 100)).bytes
    assert reduce.tolist() == [[0, 100, 0, 0], [100, 0, 0, 0], [0, 0, 0, 100], [0, 0, 100, 0]]
    send = of(SQUARE, one("send", "pp", 8, places=frozenset({0}), to=1)).bytes
    assert send.tolist() == [[0, 0, 8, 0], [0, 0, 0, 8], [0, 0, 0, 0], [0, 0, 0, 0]]
    gather = of(SQUARE, one("all-gather", "pp tp", 40)).bytes
    assert (gather == 10 * (1 - np.eye(4))).all()


def test_a_ring_goes_around() -> None:
    """A message that names nobody goes to the next of its group, the last one's to the first."""
    ring = of(Mesh((("cp", 3),)), one("send", "cp", 5), line="").bytes
    assert ring.tolist() == [[0, 5, 0], [0, 0, 5], [5, 0, 0]]


def test_only_where_it_happens() -> None:
    """What happens at one place of the pipeline is not drawn at others."""
    found = of(SQUARE, one("all-reduce", "tp", 100, places=frozenset({1}))).bytes
    assert found.sum() == 200 and found[2, 3] == found[3, 2] == 100


def test_runs_of_neighbours() -> None:
    """A group of two neighbours along an axis of four sends nothing to the other two."""
    found = of(Mesh((("tp", 4),)), one("all-gather", run_axis("tp", 2), 6), line="").bytes
    assert found[0].tolist() == [0, 3, 0, 0] and found[2].tolist() == [0, 0, 0, 3]


@pytest.mark.parametrize("kind", SHARE)
@pytest.mark.parametrize("axes", ["dp", "tp", "dp tp", "dp pp tp"])
def test_sums_are_those_of_groups(kind: str, axes: str) -> None:
    """Each rank sends a share for each other member of its group, and folding loses nothing."""
    mesh = Mesh((("dp", 4), ("pp", 2), ("tp", 8)))
    size = mesh.size(tuple(axes.split()))
    each = SHARE[kind] * 720 * (size - 1) / size
    whole = of(mesh, one(kind, axes, 720))
    assert whole.each == 1 and np.allclose(whole.bytes.sum(1), each)
    folded = of(mesh, one(kind, axes, 720), most=8)
    assert folded.each == 8 and folded.names[-1] == "dp=3, pp=1"
    assert np.allclose(folded.bytes, whole.bytes.reshape(8, 8, 8, 8).sum((1, 3)))


def test_a_long_axis_shows_its_first_ranks() -> None:
    """Where the slowest axis alone is too long the first ranks are shown, at what they send."""
    mesh = Mesh((("dp", 512), ("tp", 32)))
    found = of(mesh, one("all-reduce", "tp", 320), one("all-gather", "dp", 512), line="")
    assert found.ranks == 64 and found.bytes.shape == (64, 64)
    assert found.bytes[0, 1] == 20 and found.bytes[0, 32] == 1 and found.bytes[0, 33] == 0


def test_a_pipeline_sends_to_its_neighbours() -> None:
    """On a real model: between neighbouring stages, and back where the order turns around."""
    from schedlang.passes.analyze.prepare import prepare

    rows = 'transformer.h  pipeline_split(over=pp)\npipeline(order="ZB-V", micro=4, chunks=2)\n'
    made = planned(models.gpt2(layers=4), rows, "pp=2")
    sample = tokens(rows=2)
    found = list_collectives(made, prepare(made, sample, None, None), sample)
    sent = [one for one in found if one.kind == "send"]
    assert sent and all(one.to is not None and one.places != {one.to} for one in sent)
    assert {(*one.places, one.to) for one in sent if one.places} == {(0, 1), (1, 0)}
    total = sum_pairs(made.mesh, "pp", sent).bytes
    assert total.sum() == sum(one.total for one in sent)


def test_shades_follow_bytes() -> None:
    """More bytes are never lighter, the most are darkest, and equal ones have one shade."""
    sums = of(SQUARE, one("all-reduce", "tp", 10_000), one("all-gather", "pp", 64))
    drawn = Matrix(sums, 0)
    shades = [drawn.shade(value) for value in (32.0, 100.0, 1000.0, 10_000.0)]
    assert shades == sorted(shades) and shades[0] == 0 and shades[-1] == 3
    assert len(Matrix(of(SQUARE, one("all-reduce", "tp", 10)), 0).shade_starts) == 1


def test_nothing_sent_is_nothing_drawn() -> None:
    """A plan on one rank, or without a batch, has no such picture."""
    from schedlang.passes.simulate.account import account
    from schedlang.viz.show import make_view

    made = planned(models.gpt2(), "transformer.h.*  checkpoint()")
    assert draw_traffic(make_view(made, account(made, None)), 10) == ([], 0)
