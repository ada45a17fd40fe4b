"""Layouts: local shapes, how placements print, and dims that are split in blocks."""

from __future__ import annotations

import pytest

from schedlang.ir.mesh import Mesh
from schedlang.ir.placement import Layout, P, R, S, Segment

MESH = Mesh((("dp", 2), ("tp", 2)))


def test_words() -> None:
    """Placements and layouts print as they are written."""
    assert [str(p) for p in (S("out"), S(0, 3), S(1, (4, 2)), R, P())] == [
        *("S(out)", "S(0, blocks=3)", "S(1, blocks=[4, 2])", "R", "P(sum)")
    ]
    layout = Layout.whole((6, 8)).split("tp", 1)
    assert layout.show() == "[6, 8@tp]" and layout.show(("in", "out")) == "[in, out@tp]"


def test_blocks_are_split_one_by_one() -> None:
    """Of q, k and v in one weight, each rank has a piece of each, in order."""
    layout = Layout.whole((12,)).split("tp", 0, (8, 2, 2))
    segments = [layout.segments(MESH, {"dp": 0, "tp": index})[0] for index in range(2)]
    assert segments[0] == (Segment(0, 4), Segment(8, 1), Segment(10, 1))
    assert segments[1] == (Segment(4, 4), Segment(9, 1), Segment(11, 1))
    assert layout.local_shape(MESH) == (6,)


def test_two_axes_split_one_dim() -> None:
    """The first axis named is the slowest; an unsplit dim is one segment."""
    layout = Layout.whole((8, 3)).split("tp", 0).split("dp", 0)
    firsts = {
        (dp, tp): layout.segments(MESH, {"dp": dp, "tp": tp})[0][0].start
        for dp in range(2)
        for tp in range(2)
    }
    assert firsts == {(0, 0): 0, (1, 0): 2, (0, 1): 4, (1, 1): 6}
    assert layout.segments(MESH, {"dp": 1, "tp": 1})[1] == (Segment(0, 3),)


def test_padding_comes_before_splitting() -> None:
    """A padded dim is split by its padded size; padding after splitting is not allowed."""
    layout = Layout.whole((5,)).pad(0, 8)
    assert layout.split("tp", 0).local_shape(MESH) == (4,) and layout.shape == (5,)
    with pytest.raises(AssertionError):
        layout.split("tp", 0).pad(0, 16)
    with pytest.raises(AssertionError):
        layout.split("tp", 0, (4, 2))
