"""Machines: what operators and messages cost on equal ranks; clusters by name, and from a file."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from schedlang.diagnostics.diagnostic import Facts, Refusal, facts_of_unknown, suggest_name
from schedlang.passes.simulate import nccl

if TYPE_CHECKING:
    from schedlang.language.nodes import File
    from schedlang.runtime.storage.footprint import SegmentWork, TrafficMessage

GIB = 2**30

# -- a cluster -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Equal ranks, `node` of them in each node, numbered node by node.

    speed    FLOPs a second, in 16 bits
    stream   bytes a second between a rank and its own memory
    link     bytes a second that a rank sends within its node, and as many receives
    network  the same to other nodes
    memory   bytes of a rank
    host     bytes a second that a rank copies to its host, or its host's processor reads for a rank

    The defaults of the other fields give the figures of the data sheet:

    product, attention      share of `speed` that large products and fused attention reach
    streaming               share of `stream` that other operators reach
    linked, routed          share of `link` and `network` that rings of messages reach
    start, ramp             seconds of an operator in addition to its work; of a product in addition
    overlap                 share of messages that computing of equal length hides
    peaks                   FLOPs a second in other dtypes, which `operator_seconds` does not use
    library                 "nccl", whose latencies and algorithms are modelled, or any other
    hop, far                for any other: seconds of each step of a ring within a node, between
                            nodes
    low, reducing, plateau  for NCCL: see `Fabric`
    """

    name: str
    speed: float
    stream: float
    link: float
    network: float
    node: int
    memory: int
    product: float = 1.0
    attention: float = 1.0
    streaming: float = 1.0
    linked: float = 1.0
    routed: float = 1.0
    start: float = 0.0
    ramp: float = 0.0
    overlap: float = 1.0
    peaks: tuple[tuple[str, float], ...] = ()
    library: str = ""
    hop: float = 0.0
    far: float = 0.0
    low: float = math.inf
    reducing: float = 0.0
    plateau: float = 1.0
    host: float = 25e9  # PCI Express 4.0 of 16 lanes, less its headers

    def device_of(self, rank: int) -> Cluster:
        """Return the device of a rank: all are equal."""
        return self

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.node

    @property
    def slowest(self) -> Cluster:
        """The device that computes slowest: all are equal."""
        return self

    def in_order(self, order: Sequence[int]) -> Cluster:
        """Return the cluster itself: all nodes are equal."""
        return self

    def with_memory_share(self, share: float) -> Cluster:
        """Return the cluster with a share of its memory."""
        return replace(self, memory=int(self.memory * share))

    # -- operators -----------------------------------------------------------------------------

    def operator_seconds(self, kind: str, flops: float, bytes_moved: float) -> float:
        """Seconds of one operator: its start, and operations or bytes, whichever takes longer.

        Roofline (Williams et al. 2009) under the reached rates.  `kind` is product, attention or
        other; FLOPs count as 16-bit ones.
        """
        efficiency = {"product": self.product, "attention": self.attention}.get(kind, 1.0)
        bound = max(flops / (self.speed * efficiency), bytes_moved / (self.stream * self.streaming))
        return self.start + self.ramp * (kind == "product") + bound

    def computing_seconds(self, work: SegmentWork, share: float = 1.0) -> float:
        """Seconds of operators one after the other, on a share of their rows."""
        return sum(
            count * self.operator_seconds(kind, flops * share, bytes_moved * share)
            for (kind, flops, bytes_moved), count in work.operators.items()
        )

    def copy_seconds(self, size: float) -> float:
        """Seconds of a copy to the host, or back."""
        return size / self.host

    # -- messages ------------------------------------------------------------------------------

    def collective_seconds(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of a collective among ranks at a distance of `stride`; 0 for one rank.

        `size` is bytes of the full tensor.  "send" is one message between neighbours; where any
        neighbours are on different nodes, one that leaves its node.
        """
        per_node = max(1, min(ranks, self.node // stride))
        return self._sent(op, size, nccl.Ranks(ranks, math.ceil(ranks / per_node), per_node))

    def message_seconds(self, message: TrafficMessage) -> float:
        """Seconds of one collective or message."""
        ranks = message.ranks if message.ends is None else message.ends
        nodes = Counter(rank // self.node for rank in ranks)
        rank_layout = nccl.Ranks(len(ranks), len(nodes), min(nodes.values()))
        return self._sent(
            message.op if message.ends is None else "send", message.bytes, rank_layout
        )

    def hidden_share(self, op: str, size: float, ranks: Sequence[int]) -> float:
        """Share of a message that computing of equal length hides."""
        return self.overlap

    def _sent(self, op: str, size: float, ranks: nccl.Ranks) -> float:
        if ranks.count < 2:
            return 0.0
        if self.library == "nccl":
            return nccl.collective_seconds(op, size, ranks, self._fabric)
        steps, share = _ring(op, ranks.count)
        step = self.hop if ranks.nodes == 1 else self.far
        if op == "all_to_all" and ranks.nodes > 1:  # each rank has its own network link
            network_seconds = (ranks.count - ranks.each) / ranks.count * size / self._fabric.network
            return steps * step + max(network_seconds, share * size / self._fabric.link)
        bandwidth = self._fabric.network if op == "send" and ranks.nodes > 1 else None
        return steps * step + share * size / (bandwidth or self._fabric.ring(ranks))

    @property
    def _fabric(self) -> nccl.Fabric:
        link, network = self.link * self.linked, self.network * self.routed
        return nccl.Fabric(link, network, self.low, self.reducing, self.plateau)


def _ring(op: str, ranks: int) -> tuple[int, float]:
    """Return the steps of a ring, and the share of the full tensor that a rank sends.

    This is optimal for large tensors (Patarasuk and Yuan 2009).
    """
    ring_cost = RING_COSTS.get(op)
    return (1, 1.0) if ring_cost is None else ring_cost(ranks)


RING_COSTS: Final[Mapping[str, Callable[[int], tuple[int, float]]]] = {
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "all_gather": lambda n: (n - 1, (n - 1) / n),
    "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
    "all_to_all": lambda n: (n - 1, (n - 1) / n),
    "broadcast": lambda n: (n - 1, 1.0),
}


# -- clusters by name, and of a file ---------------------------------------------------------------


REQUIRED_FIELDS = ("speed", "stream", "link", "network", "node", "memory")
SHARE_FIELDS = ("product", "attention", "streaming", "linked", "routed", "overlap")  # at most 1
TOML_SUFFIX = ".toml"
CALIBRATE_HELP = "measure the machine at hand: `schedlang calibrate -o mine.toml`"


def read_machines(path: Path) -> dict[str, Cluster]:
    """Read the machines of a file, by name.

    Raises Refusal S936 for a file that is missing, is no TOML, or has a table with fields that a
    machine does not have.
    """
    _, tables = _tables(path)
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise unreadable_file(path, "a machine is a table, which its name begins: `[mine]`")
    return {name.lower(): machine_of(path, name, table) for name, table in tables.items()}


def _tables(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a file, and its parsed tables (S936)."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise unreadable_file(path, str(error)) from None


def machine_of(path: Path, name: str, table: Mapping[str, Any]) -> Cluster:
    """Parse the machine of a table (S936)."""
    known_fields = [dataclass_field.name for dataclass_field in fields(Cluster)][1:]
    for field, value in table.items():
        if field not in known_fields:
            message = f"`{name}` has no field `{field}`"
            help_ = suggest_name(field, known_fields, "its fields are")
            raise unreadable_file(path, message, help_, facts_of_unknown(field, known_fields))
        if reason := _wrong(field, value):
            raise unreadable_file(path, f"`{field}` of `{name}` is {value!r}: {reason}")
    if missing := [field for field in REQUIRED_FIELDS if field not in table]:
        raise unreadable_file(path, f"`{name}` lacks {', '.join(missing)}")
    values = {field: _READ.get(field, float)(value) for field, value in table.items()}
    return Cluster(name.lower(), **values)


def _wrong(field: str, value: Any) -> str | None:
    """Return the reason why a field cannot have a value; None if it can."""
    if field == "library":
        return None if isinstance(value, str) else "a name is needed"
    if field == "peaks":
        is_valid = isinstance(value, dict) and all(map(_positive, value.values()))
        return None if is_valid else "a table of operations a second by dtype is needed"
    if field == "memory":
        return None if _bytes(value) else 'a size is needed: "80 GiB"'
    if field == "node":
        is_valid = isinstance(value, int) and _positive(value)
        return None if is_valid else "a whole number above 0 is needed"
    if not is_number(value) or value < 0:
        return "a number is needed, not below 0"
    if field in SHARE_FIELDS and value > 1:
        return "a share is at most 1"
    if value == 0 and field in (*REQUIRED_FIELDS, *SHARE_FIELDS[:-1], "low", "host"):
        return "a number above 0 is needed"
    return None


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _bytes(value: Any) -> int:
    """Parse bytes: a number, or a size with its unit; 0 for anything else."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)\s*", value)
        if match is None:
            return 0
        power = "BKMGT".index(match[2][0])
        return int(float(match[1]) * (1024 if "i" in match[2] else 1000) ** power)
    return int(value) if _positive(value) else 0


_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    "node": int,
    "memory": _bytes,
    "library": str,
    "peaks": lambda value: tuple(sorted((str(k), float(v)) for k, v in value.items())),
}


def unreadable_file(
    path: Path, reason: str, help_: str = "", facts: Facts = (), general_help: str = CALIBRATE_HELP
) -> Refusal:
    """Return the refusal of a file (S936)."""
    title = f"no machine can be read from `{path}`"
    helps = tuple(filter(None, (help_, general_help)))
    return Refusal.of("S936", title, notes=(reason,), helps=helps, facts=facts)


CLUSTERS = read_machines(Path(__file__).with_name("machines.toml"))


def cluster_named(device: str | None) -> tuple[Cluster | None, int | None]:
    """Return the cluster and the ranks of `a100x64`; None for what the name does not say.

    `mine.toml` is the single machine, or the first, of a file; or unequal nodes (`Nodes`), with all
    of their ranks.  Raises Refusal S936 where the file cannot be read.
    """
    if device is not None and device.endswith(TOML_SUFFIX):
        text, tables = _tables(Path(device))
        if isinstance(tables.get("node"), list):
            from schedlang.passes.simulate.node_cluster import read_nodes

            cluster = read_nodes(Path(device), text, tables)
            return cluster, cluster.ranks
        return next(iter(read_machines(Path(device)).values())), None
    match = re.fullmatch(r"(?P<name>.*?)(x(?P<ranks>\d+))?", device or "")
    assert match is not None
    ranks = match["ranks"]
    return CLUSTERS.get(match["name"].lower()), int(ranks) if ranks else None


def cluster_of(tree: File) -> tuple[Cluster | None, int | None]:
    """Return the cluster and the ranks of a schedule's mesh; None for what the mesh does not say.

    A machine's file is searched in this folder, then beside the schedule.  Raises Refusal S936 as
    `cluster_named`.
    """
    from schedlang.language import nodes

    mesh = next((item for item in tree.items if isinstance(item, nodes.Mesh)), None)
    on = None if mesh is None else mesh.on
    if mesh is not None and on is not None and on.endswith(TOML_SUFFIX) and not Path(on).exists():
        sibling = Path(mesh.span.source.name).parent / on
        on = str(sibling) if sibling.exists() else on
    return cluster_named(on)


SHARES_OF_FIELD = {"speed": ("product", "attention"), "link": ("linked",), "network": ("routed",)}


def with_figures(cluster: Cluster, **given: float | None) -> Cluster:
    """Replace the given figures that are not None; a given speed counts as reached, so its share is
    1."""
    given_values = {name: value for name, value in given.items() if value is not None}
    full_shares = {share: 1.0 for name in given_values for share in SHARES_OF_FIELD.get(name, ())}
    return replace(cluster, **{**full_shares, **given_values})  # type: ignore[arg-type]
