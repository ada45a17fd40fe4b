"""Clusters of unequal nodes: their devices, the network between them, and their TOML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from schedlang.diagnostics.diagnostic import Refusal, facts_of_unknown, suggest_name
from schedlang.diagnostics.tables import format_bytes
from schedlang.passes.simulate import nccl
from schedlang.passes.simulate.machine import (
    CLUSTERS,
    RING_COSTS,
    Cluster,
    cluster_named,
    is_number,
    machine_of,
    unreadable_file,
    with_figures,
)

if TYPE_CHECKING:
    from schedlang.runtime.storage.footprint import TrafficMessage

# -- nodes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """Ranks of one node, as many as its device's `node` says.

    price   of an hour of the node; `power` watts of a rank (None: not given)
    limits  pairs: a power limit of a rank in watts, and the share of `speed` that it then reaches
    """

    device: Cluster
    price: float | None = None
    power: float | None = None
    limits: tuple[tuple[float, float], ...] = ()

    @property
    def with_power_limits(self) -> Iterator[Node]:
        """Yield the node at full power, and under each of its power limits."""
        yield self
        for watts, share in self.limits:
            device = replace(self.device, speed=self.device.speed * share)
            yield replace(self, device=device, power=watts, limits=())


ENGINE, DEVICE = "engine", "device"
COLLECTIVE_SMS = 6 / 80  # share of a device's processors that collectives need to fill its links
# bytes of memory that a device reads for each byte that it sends: a reduction reads the received
# and the local data.  An engine reads the input of a collective once
READS_PER_SENT: Final[Mapping[str, float]] = {"all_reduce": 1.5, "reduce_scatter": 2.0}


@dataclass(frozen=True)
class Nodes(Cluster):
    """Nodes in the order of their ranks; as a plain `Cluster` it has the best of each figure.

    leaf      nodes under one leaf switch of the network; with `rails` rank i of each node has a
              leaf of its own, which `leaf` nodes share
    over      oversubscription: how much less a leaf passes on than enters it from below
    endpoint  who runs a collective during computing: the "device" itself, or an "engine" beside it
              (ACE, Rashidi et al., ISCA 2021); "": as the devices' `overlap` says
    only      the ranks, among all, that take part; (): all
    numbers   of the nodes in their file, from 1 on
    """

    nodes: tuple[Node, ...] = ()
    leaf: int = 1
    over: float = 1.0
    rails: bool = False
    endpoint: str = ""
    only: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    # -- ranks -------------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """The node of each rank, and its index there."""
        return tuple(
            (index, k) for index, node in enumerate(self.nodes) for k in range(node.device.node)
        )

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return len(self._places)

    def device_of(self, rank: int) -> Cluster:
        """Return the device of a rank."""
        return self.nodes[self._places[rank][0]].device

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return self._places[rank][0]

    def for_ranks(self, ranks: Sequence[int]) -> Nodes:
        """Return the cluster as ranks see it that wait for each other.

        Operators take as long as on the slowest of these ranks, and messages stay among them.
        """
        devices = {self.device_of(rank) for rank in ranks}
        worst = {name: min(getattr(device, name) for device in devices) for name in MIN_FIELDS}
        worst |= {name: max(getattr(device, name) for device in devices) for name in MAX_FIELDS}
        index = self._places[ranks[0]][0]
        # within a node: the same as in the first equal node
        if self._places[ranks[-1]][0] == index:
            first_equal = self.nodes.index(self.nodes[index])
            first_rank = sum(device.device.node for device in self.nodes[:first_equal])
            ranks = range(first_rank, first_rank + len(ranks))
        return replace(self, **worst, only=tuple(ranks))

    def first_nodes(self, ranks: int) -> Nodes:
        """Return the first nodes that have at least so many ranks."""
        return self.select(range(self._places[ranks - 1][0] + 1))

    def in_order(self, order: Sequence[int]) -> Nodes:
        """Return the nodes in another order of their ranks; unchanged for an empty order."""
        return self.select(order) if order else self

    def with_memory_share(self, share: float) -> Nodes:
        """Return the nodes with a share of each memory."""
        smaller = [
            replace(node, device=replace(node.device, memory=int(node.device.memory * share)))
            for node in self.nodes
        ]
        return self.select(range(len(smaller)), smaller)

    def select(self, places: Sequence[int], nodes: Sequence[Node] = ()) -> Nodes:
        """Return the nodes of some indices, in this order; or `nodes` in their places."""
        numbers = tuple(self.numbers[index] for index in places)
        nodes = nodes or [self.nodes[index] for index in places]
        return cluster_of_nodes(self.name, nodes, numbers=numbers, **self._network)

    @property
    def _network(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("leaf", "over", "rails", "endpoint")}

    def price_per_second(self, ranks: int) -> float:
        """Return the money for a second of the nodes of the first ranks."""
        return sum(node.price or 0.0 for node in self.first_nodes(ranks).nodes) / 3600

    def watts(self, ranks: int) -> float:
        """Return the watts of the first ranks."""
        return sum(self.nodes[index].power or 0.0 for index, _ in self._places[:ranks])

    def text(self, order: Sequence[int] = ()) -> str:
        """Describe the ranks of each node, in order: `8 a100 of 80 GiB, 8 v100 of 32 GiB`."""
        devices = (device.device for device in self.in_order(order).nodes)
        texts = (
            f"{device.node} {device.name} of {format_bytes(device.memory)}" for device in devices
        )
        runs = ((device, len(list(group))) for device, group in groupby(texts))
        return ", ".join(f"{count} x {device}" if count > 1 else device for device, count in runs)

    @property
    def best(self) -> Cluster:
        """A machine that is no slower in any figure than any of the nodes."""
        return Cluster(**{field.name: getattr(self, field.name) for field in fields(Cluster)})

    @property
    def slowest(self) -> Cluster:
        """The device that computes slowest."""
        return min(
            (device.device for device in self.nodes),
            key=lambda device: device.speed * device.product,
        )

    # -- messages ----------------------------------------------------------------------------------

    def collective_seconds(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of the slowest of all groups that run at once; also of messages between
        neighbours."""
        return max(
            (self._group_seconds(op, size, group) for group in self._groups(ranks, stride)),
            default=0.0,
        )

    def message_seconds(self, message: TrafficMessage) -> float:
        """Seconds of one collective or message."""
        if message.ends is not None:
            return self._group_seconds("send", message.bytes, message.ends)
        return self._group_seconds(message.op, message.bytes, message.ranks)

    def hidden_share(self, op: str, size: float, ranks: Sequence[int]) -> float:
        """Share of a message that is hidden by computing of equal length."""
        if not self.endpoint:
            return min(self.device_of(rank).overlap for rank in ranks)
        seconds = self._group_seconds(op, size, tuple(ranks))
        stream = min(self.device_of(rank).stream for rank in ranks)
        return _remaining_share(
            self.endpoint, op, len(ranks), size / seconds / stream if seconds else 0.0
        )

    def _group_seconds(self, op: str, size: float, ranks: tuple[int, ...]) -> float:
        if len(ranks) < 2:
            return 0.0
        if op == "send" and len(ranks) > 2:
            return max(
                self._group_seconds(op, size, pair) for pair in zip(ranks, (*ranks[1:], ranks[0]))
            )
        rank_layout, view = self._view(op, ranks)
        return view._sent(op, size, rank_layout)

    def _groups(self, ranks: int, stride: int) -> Iterator[tuple[int, ...]]:
        """Yield groups of ranks at a distance of `stride`, among the ranks that take part.

        The stride is reduced where it would be too large: replicas and sequence shards together may
        be anywhere.
        """
        members = self.only or range(self.ranks)
        if ranks < 2:
            return
        stride = min(stride, max(1, (len(members) - 1) // (ranks - 1)))
        for first_rank in members:
            group = tuple(range(first_rank, first_rank + ranks * stride, stride))
            if (first_rank - members[0]) % (ranks * stride) < stride and group[-1] < self.ranks:
                yield group

    def _view(self, op: str, ranks: tuple[int, ...]) -> tuple[nccl.Ranks, Cluster]:
        """Describe the ranks, and a machine all of whose links are as slow as the slowest between
        them."""
        counts = Counter(self._places[rank][0] for rank in ranks)
        fewest = min(counts.values())
        devices = [(self.nodes[index].device, count) for index, count in counts.items()]
        link = min(device.link * device.linked for device, _ in devices)
        if op in ("send", "all_to_all"):
            network = min(device.network * device.routed for device, _ in devices)
        else:  # a ring leaves a node over the network links of all its ranks there
            network = (
                min(device.network * device.routed * count for device, count in devices) / fewest
            )
        device = devices[0][0]
        library = (
            device.library if all(device.library == second.library for second, _ in devices) else ""
        )
        view = replace(
            device,
            link=link,
            network=network * self._network_share(op, ranks),
            linked=1.0,
            routed=1.0,
            library=library,
            hop=max(second.hop for second, _ in devices),
            far=max(second.far for second, _ in devices),
            low=min(second.low for second, _ in devices),
            reducing=min(second.reducing for second, _ in devices),
            plateau=max(second.plateau for second, _ in devices),
        )
        return nccl.Ranks(len(ranks), len(counts), fewest), view

    def _network_share(self, op: str, ranks: tuple[int, ...]) -> float:
        """Share of the network's bandwidth that remains where ranks communicate above the leaves.

        All equal groups communicate at once.  A ring leaves a leaf once, and so do the rings of
        other nodes under that leaf; a message, or an all-to-all, leaves it as often as it must.
        """
        rank_places = [self._places[rank] for rank in ranks]
        if op in ("send", "all_to_all"):
            away = beyond = 0
            for index, k in rank_places:
                elsewhere = [item for item in rank_places if item[0] != index]
                leaf = index // self.leaf, k * self.rails
                beyond_leaf = sum(
                    (node // self.leaf, rank_index * self.rails) != leaf
                    for node, rank_index in elsewhere
                )
                away, beyond = max(
                    (away, beyond), (len(elsewhere), beyond_leaf), key=lambda item: item[1]
                )
            return min(1.0, away / (beyond * self.over)) if beyond else 1.0
        places: dict[int, set[int]] = {}
        for index, k in rank_places:
            places.setdefault(index, set()).add(k)
        leaves = Counter(index // self.leaf for index in places)
        aligned = not self.rails or len({frozenset(item) for item in places.values()}) == 1
        if aligned and len(leaves) == 1:
            return 1.0
        return min(1.0, (min(leaves.values()) if aligned else 1) / self.over)


MIN_FIELDS = ("speed", "stream", "product", "attention", "streaming", "memory", "host")
MAX_FIELDS = ("start", "ramp")
BEST_MAX_FIELDS = (
    *MIN_FIELDS,
    "link",
    "network",
    "linked",
    "routed",
    "overlap",
    "low",
    "reducing",
    "node",
)
BEST_MIN_FIELDS = (*MAX_FIELDS, "hop", "far", "plateau")


def cluster_of_nodes(name: str, nodes: Sequence[Node], **network: Any) -> Nodes:
    """Build a cluster of nodes in this order."""
    devices = [device.device for device in nodes]
    best: dict[str, Any] = {key: max(getattr(d, key) for d in devices) for key in BEST_MAX_FIELDS}
    best |= {key: min(getattr(d, key) for d in devices) for key in BEST_MIN_FIELDS}
    libraries = {device.library for device in devices}
    best["library"] = libraries.pop() if len(libraries) == 1 else ""
    if endpoint := network.get("endpoint"):
        # a reduction sends twice
        share = min(device.link * device.linked / device.stream / 2 for device in devices)
        best["overlap"] = _remaining_share(endpoint, "all_reduce", 2**20, share)
    network.setdefault("numbers", tuple(range(1, len(nodes) + 1)))
    return Nodes(name, nodes=tuple(nodes), **best, **network)


def _remaining_share(endpoint: str, op: str, ranks: int, sends: float) -> float:
    """Share of its speed that a device keeps during a collective.

    `sends` is the share of its memory bandwidth that the bytes of the tensor would take while the
    collective runs; a rank sends its part of these.
    """
    part = RING_COSTS[op](ranks)[1] if op in RING_COSTS else 1.0
    if endpoint == DEVICE:
        return 1 - min(1.0, max(COLLECTIVE_SMS, READS_PER_SENT.get(op, 1.0) * part * sends))
    return 1 - min(1.0, sends / (ranks if op == "all_gather" else 1))


# -- a file of nodes -------------------------------------------------------------------------------


CLUSTER_KEYS = ("node", "leaf", "oversubscription", "rails", "endpoint", "order")
NODE_KEYS = ("device", "count", "ranks", "link", "network", "price", "power", "limits")
LEGAL_FILE = (
    "a cluster is `[[node]]` tables, each with a `device`, and `leaf`, `oversubscription`,"
    " `rails`, `endpoint`, `order` above them"
)


def cluster_and_ranks(on: str | Cluster, ranks: int | None) -> tuple[Cluster, int]:
    """Return the cluster and the number of ranks of `h100x64`, of a file, or of a `Cluster`.

    Raises Refusal S109 for an unknown name, for a missing number of ranks, and for more ranks than
    exist; S936 as `cluster_named`.
    """
    cluster, rank_count = (on, None) if isinstance(on, Cluster) else cluster_named(on)
    if cluster is None:
        helps = (f"give one of {', '.join(CLUSTERS)}",)
        raise Refusal.of("S109", f"unknown cluster `{on}`", helps=helps)
    count = ranks or rank_count or (cluster.ranks if isinstance(cluster, Nodes) else None)
    if count is None:
        raise Refusal.of("S109", "the number of ranks is missing", helps=('write `"h100x64"`',))
    if not isinstance(cluster, Nodes):
        return cluster, count
    if count > cluster.ranks:
        title = f"`{cluster.name}` has {cluster.ranks} ranks, not {count}"
        raise Refusal.of("S109", title, helps=(f"`ranks={cluster.ranks}`",))
    return cluster.first_nodes(count), count


def read_nodes(path: Path, text: str, tables: Mapping[str, Any]) -> Nodes:
    """Read a cluster of unequal nodes; other tables of its file define machines.

    Raises Refusal S936 for text that is no cluster, with the line.
    """
    reader = _Reader(path, text)
    machine_tables = {
        name: machine_table
        for name, machine_table in tables.items()
        if isinstance(machine_table, dict)
    }
    machines = CLUSTERS | {
        name.lower(): machine_of(path, name, machine_table)
        for name, machine_table in machine_tables.items()
    }
    for key in tables:
        if key not in CLUSTER_KEYS and key not in machine_tables:
            reader.refuse(f"a cluster has no field `{key}`", key, known=CLUSTER_KEYS)
    nodes: list[Node] = []
    for index, table in enumerate(tables["node"]):
        nodes += reader.node(index, table, machines)
    leaf = tables.get("leaf", len(nodes) if tables.get("rails") else 1)
    excess, rails = tables.get("oversubscription", 1.0), tables.get("rails", False)
    endpoint, order = tables.get("endpoint", ""), tables.get("order", [*range(1, len(nodes) + 1)])
    checks = {
        "leaf": (_count(leaf), "a whole number of nodes is needed, above 0"),
        "oversubscription": (is_number(excess) and excess >= 1, "a number is needed, not below 1"),
        "rails": (isinstance(rails, bool), "true or false is needed"),
        "endpoint": (endpoint in ("", ENGINE, DEVICE), f'"{ENGINE}" or "{DEVICE}" is needed'),
        "order": (
            _numbers(order, len(nodes)),
            f"some of the {len(nodes)} nodes by their numbers are needed, from 1 on, each once",
        ),
    }
    for key, (is_valid, needed) in checks.items():
        if not is_valid:
            reader.refuse(f"`{key}` is {tables[key]!r}: {needed}", key)
    network = {"leaf": leaf, "over": float(excess), "rails": rails, "endpoint": endpoint}
    return cluster_of_nodes(path.stem.lower(), nodes, **network).select(
        [index - 1 for index in order]
    )


def _limits(value: Any, power: float) -> bool:
    return isinstance(value, list) and all(
        isinstance(limit, list)
        and len(limit) == 2
        and all(is_number(part) and part > 0 for part in limit)
        and limit[0] < power
        and limit[1] <= 1
        for limit in value
    )


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _numbers(order: Any, nodes: int) -> bool:
    all_valid = (
        isinstance(order, list)
        and order
        and all(_count(number) and number <= nodes for number in order)
    )
    return bool(all_valid) and len(set(order)) == len(order)


@dataclass(frozen=True)
class _Reader:
    """Reads the tables of a file, and finds their lines in its text."""

    path: Path
    text: str

    def node(self, index: int, table: Any, machines: Mapping[str, Cluster]) -> list[Node]:
        """Return the nodes of one table, `count` of them."""
        if not isinstance(table, dict):
            self.refuse("`node` is no table", "node")
        for key in table:
            if key not in NODE_KEYS:
                self.refuse(f"a node has no field `{key}`", key, index, NODE_KEYS)
        device_name = table.get("device")
        if not isinstance(device_name, str) or device_name.lower() not in machines:
            text = (
                "a node needs a `device`"
                if device_name is None
                else f"unknown device `{device_name}`"
            )
            self.refuse(text, "device", index, tuple(machines), str(device_name))
        for key in ("count", "ranks"):
            if key in table and not _count(table[key]):
                text = f"`{key}` is {table[key]!r}: a whole number above 0 is needed"
                self.refuse(text, key, index)
        for key in ("link", "network", "price", "power"):
            minimum = 0 if key in ("price", "power") else 1e-9
            if key in table and not (is_number(table[key]) and table[key] >= minimum):
                self.refuse(f"`{key}` is {table[key]!r}: a number above 0 is needed", key, index)
        if not _limits(limits := table.get("limits", []), table.get("power", 0)):
            reason = (
                "pairs of watts, below `power`, and a share of the speed are needed: [[250, 0.8]]"
            )
            self.refuse(f"`limits` is {limits!r}: {reason}", "limits", index)
        figures = {key: float(table[key]) for key in NODE_KEYS[3:7] if key in table}
        link, network = figures.pop("link", None), figures.pop("network", None)
        device = with_figures(
            machines[device_name.lower()], link=link, network=network, node=table.get("ranks")
        )
        pairs = tuple((float(watts), float(share)) for watts, share in limits)
        return [Node(device, **figures, limits=pairs)] * table.get("count", 1)

    def refuse(
        self,
        text: str,
        key: str,
        index: int = -1,
        known: tuple[str, ...] = (),
        word: str | None = None,
    ) -> NoReturn:
        """Refuse with the reason, the line, and what is legal."""
        help_ = suggest_name(word or key, known, "known are") if known else ""
        facts = facts_of_unknown(word or key, known) if known else ()
        raise unreadable_file(
            self.path, f"line {self._line(key, index)}: {text}", help_, facts, LEGAL_FILE
        )

    def _line(self, key: str, index: int) -> int:
        """Return the line of a field in the table of number `index` (below 0: in no table), or of
        the table."""
        table, head, inside = -1, 1, False
        for line, text in enumerate(self.text.splitlines(), 1):
            content = text.split("#")[0].strip()
            if content.startswith("["):
                inside = content.replace(" ", "") == "[[node]]"
                table += inside
                head = line if inside and table == index else head
            elif (
                content.split("=")[0].strip() == key
                and (inside if index >= 0 else True)
                and table == index
            ):
                return line
        return head
