"""Places of ranks: how far apart neighbours along an axis lie, and ranks of replicas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from schedlang.passes.planner.values import Setting
from schedlang.passes.simulate.nodes import Nodes

if TYPE_CHECKING:
    from schedlang.passes.simulate.machine import Cluster


def stride(setting: Setting, axis: str) -> int:
    """Ranks from one to its neighbour along an axis; ep is folded into dp."""
    at = setting.placement
    sizes = {"dp": setting.dp, "pp": setting.pp, "cp": at.cp, "tp": at.tp}
    place = setting.axes.index("dp" if axis == "ep" else axis)
    return math.prod(sizes[inner] for inner in setting.axes[place + 1 :])


def replicas_apart(setting: Setting, cluster: Cluster) -> int:
    """Ranks from one replica to the next; along two axes as if they were one, of whose ranks as
    many share a node."""
    sizes = {"dp": setting.dp, "cp": setting.placement.cp}
    lie = [(stride(setting, axis), size) for axis, size in sizes.items() if size > 1]
    if len(lie) < 2 or isinstance(cluster, Nodes):
        return max(lie, default=(1, 1))[0]
    shared = math.prod(min(size, max(1, cluster.node // far)) for far, size in lie)
    return max(1, cluster.node // shared)
