"""The mesh: coordinates and ranks are inverse, groups partition, views and tuples fold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schedlang.ir.mesh import Mesh, run_axis


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to four axes of up to four ranks, sometimes with a view of two of them."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    axes = tuple((name, size) for name, size in zip("abcd", sizes))
    two = draw(st.permutations([name for name, _ in axes]))[:2]
    views = (("v", tuple(two)),) if len(two) == 2 and draw(st.booleans()) else ()
    return Mesh(axes, views)


@given(meshes())
def test_coordinates_and_ranks_are_inverse(mesh: Mesh) -> None:
    """Every rank has a place of its own, and the last axis varies fastest."""
    places = [mesh.coordinates(rank) for rank in range(mesh.world)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.world))
    assert places == sorted(places, key=lambda place: tuple(place.values()))


@given(meshes(), st.data())
def test_groups_partition_the_world(mesh: Mesh, data: st.DataObject) -> None:
    """Each rank is in one group along any axes, at its index, and the members rise."""
    over = list(data.draw(st.lists(st.sampled_from(mesh.names), unique=True))) if mesh.names else []
    for place, name in enumerate(over):
        count = data.draw(st.integers(1, 4))
        if name in mesh.sizes and mesh.sizes[name] % count == 0 and data.draw(st.booleans()):
            over[place] = run_axis(name, count)
    if len({name for n in over for name in mesh.fold(n.partition("/")[0])}) < len(mesh.fold(over)):
        over = over[:1]  # a view may hold the axis whose neighbours were drawn
    groups = mesh.groups(over)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        assert len(group) == mesh.size(over)
        assert list(group) == sorted(group), "as torch numbers the members of a process group"
        for place, rank in enumerate(group):
            assert mesh.group(rank, over) == group and mesh.index(rank, over) == place
            assert mesh.member(group[-1], over, place) == rank


@given(meshes(), st.data())
def test_the_order_of_names_does_not_matter(mesh: Mesh, data: st.DataObject) -> None:
    """A tuple of axes folds to the same axes in whatever order it names them, once each."""
    over = data.draw(st.permutations(mesh.names))
    assert mesh.fold(over) == mesh.fold(sorted(over)) == tuple(mesh.sizes)
    assert mesh.size(over) == mesh.world


def test_words() -> None:
    """A mesh prints as it is written."""
    assert str(Mesh((("dp", 2), ("tp", 4)))) == "dp=2, tp=4" and str(Mesh()) == "one rank"
    assert Mesh().world == 1 and Mesh().groups(()) == [(0,)]
