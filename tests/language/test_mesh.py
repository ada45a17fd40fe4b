"""The mesh: coordinates and ranks are inverse, groups partition the ranks, views fold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schedlang.ir.mesh import Mesh, run_axis


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Draw a mesh of up to four axes of up to four ranks, sometimes with a view of two axes."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    axes = tuple((name, size) for name, size in zip("abcd", sizes))
    two = draw(st.permutations([name for name, _ in axes]))[:2]
    views = (("v", tuple(two)),) if len(two) == 2 and draw(st.booleans()) else ()
    return Mesh(axes, views)


@given(meshes())
def test_coordinates_and_ranks_are_inverse(mesh: Mesh) -> None:
    """Every rank has its own coordinates, and the last axis varies fastest."""
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.world)]
    assert [mesh.rank(point) for point in coordinates] == list(range(mesh.world))
    assert coordinates == sorted(coordinates, key=lambda point: tuple(point.values()))


@given(meshes(), st.data())
def test_groups_partition_the_world(mesh: Mesh, data: st.DataObject) -> None:
    """Along any axes, each rank is in one group, at its index, and members are in rising order."""
    axes = list(data.draw(st.lists(st.sampled_from(mesh.names), unique=True))) if mesh.names else []
    for index, name in enumerate(axes):
        count = data.draw(st.integers(1, 4))
        if name in mesh.sizes and mesh.sizes[name] % count == 0 and data.draw(st.booleans()):
            axes[index] = run_axis(name, count)
    if len({name for n in axes for name in mesh.fold(n.partition("/")[0])}) < len(mesh.fold(axes)):
        axes = axes[:1]  # a view may hold the axis whose neighbours were drawn
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        assert len(group) == mesh.size(axes)
        assert list(group) == sorted(group), "as torch numbers the members of a process group"
        for index, rank in enumerate(group):
            assert mesh.group(rank, axes) == group and mesh.index(rank, axes) == index
            assert mesh.member(group[-1], axes, index) == rank


@given(meshes(), st.data())
def test_the_order_of_names_does_not_matter(mesh: Mesh, data: st.DataObject) -> None:
    """A tuple of axes folds to the same axes in any order, each once."""
    axes = data.draw(st.permutations(mesh.names))
    assert mesh.fold(axes) == mesh.fold(sorted(axes)) == tuple(mesh.sizes)
    assert mesh.size(axes) == mesh.world


def test_words() -> None:
    """A mesh prints as it is written in a schedule."""
    assert str(Mesh((("dp", 2), ("tp", 4)))) == "dp=2, tp=4" and str(Mesh()) == "one rank"
    assert Mesh().world == 1 and Mesh().groups(()) == [(0,)]
