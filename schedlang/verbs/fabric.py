"""fabric: links and routes between hosts that fit the communication of a plan (TopoOpt)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlang.diagnostics.tables import format_bytes, format_seconds, terminal_columns, wrap_lines
from schedlang.verbs.exits import bad_option, show_json
from schedlang.verbs.options import AsJson, Common, verb

if TYPE_CHECKING:
    from schedlang.passes.planner.fabric import Strides, Traffic
    from schedlang.passes.simulate.machine import Cluster


@verb
def fabric(
    file: Annotated[Path, typer.Argument(help="A schedule.", metavar="FILE")],
    *,
    common: Common,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="NAME", help="Machine, as for `tune`; default: the schedule's `on`."
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows of a step, all with the shape of the first row of the model file's batch.",
        ),
    ] = None,
    links: Annotated[
        int | None,
        typer.Option(
            "--links",
            min=1,
            help="Links of a host, which share its bandwidth; default: the number of its ranks.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose direct links between hosts that fit the communication of a plan (TopoOpt).

    Each host gets links to the hosts that are certain strides away.  Rings use the strides that fit
    them, other messages the shortest paths.  The report also shows a switch that never blocks.
    """
    from schedlang.passes.planner.fabric import choose_strides, traffic_of
    from schedlang.passes.simulate.machine import cluster_named, cluster_of
    from schedlang.passes.simulate.node_cluster import cluster_and_ranks
    from schedlang.verbs.inputs import account_costs, plan_schedule

    planned = plan_schedule(file, common.model, common.knob, common.mesh, rows)
    world = planned.plan.mesh.world
    machine, counted = cluster_of(planned.tree) if on is None else cluster_named(on)
    if machine is None and on is None:
        bad_option("the cluster is missing", "give it: `--on a100`, `--on cluster.toml`")
    cluster, _ = cluster_and_ranks(machine or str(on), world if machine is not None else counted)
    hosts = cluster.node_of(world - 1) + 1
    if hosts < 3:
        title = f"{world} ranks of {cluster.name} are {hosts} hosts: there is nothing to choose"
        bad_option(title, "a larger mesh: `--mesh dp=64`; or fewer ranks in a node of `--on`")
    sent = account_costs(planned).collectives
    if sent is None:
        bad_option(
            "the model file has no batch: nothing is sent without one", "`batch(seed)` in it"
        )
    ports = min(_ports(cluster, world), hosts - 1) if links is None else links
    if ports >= hosts:
        bad_option(f"a host has {hosts - 1} others, not {ports}", f"`--links {hosts - 1}`")
    traffic = traffic_of(planned.plan, sent, cluster.node_of)
    link = _uplink_rate(cluster, world) / ports
    strides, seconds = choose_strides(hosts, ports, traffic, link)
    wiring = Wiring(
        hosts, strides, seconds, link, _switch_seconds(hosts, traffic, link * ports), traffic
    )
    if as_json:
        show_json(wiring.to_json())
    else:
        print(wrap_lines("\n".join(wiring.lines(file.name, cluster.name)), terminal_columns()))


@dataclass(frozen=True)
class Wiring:
    """A direct wiring of hosts, and its times.

    strides  of the links, from each host
    seconds  of the fullest link, of `link` bytes per second
    switch   seconds of the fullest host behind a switch
    """

    hosts: int
    strides: Strides
    seconds: float
    link: float
    switch: float
    traffic: Traffic

    def lines(self, name: str, cluster: str) -> Iterator[str]:
        """Yield the wiring in words."""
        from schedlang.passes.planner.fabric import routes, strides_around

        links = "1 link" if len(self.strides) == 1 else f"{len(self.strides)} links"
        rate_text = f"{links} of {self.link / 1e9:.4g} GB/s each"
        yield f"{name} · {self.hosts} hosts of {cluster} · {rate_text}"
        yield ""
        on = ", ".join(f"h + {stride}" for stride in self.strides)
        yield f"links     from each host h to {on} (modulo {self.hosts})"
        for group, size in sorted(self.traffic.rings.items()):
            around = strides_around(self.hosts, self.strides, group)
            via = f"by strides {', '.join(map(str, around))}" if around else "by the shortest ways"
            members = ", ".join(map(str, group))
            yield f"ring      {members}: {format_bytes(round(size))} a link, {via}"
        for (source, target), size in sorted(self.traffic.messages.items()):
            route = routes(self.hosts, self.strides)[(target - source) % self.hosts]
            hops = " + ".join(map(str, route))
            yield f"message   {source} to {target}: {format_bytes(round(size))}, by {hops}"
        times = f"{format_seconds(self.seconds)} on the fullest link"
        yield f"a step    {times}; behind a switch that never blocks {format_seconds(self.switch)}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, in bytes and seconds."""
        from schedlang.passes.planner.fabric import routes, strides_around

        paths = routes(self.hosts, self.strides)
        return {
            "hosts": self.hosts,
            "strides": list(self.strides),
            "links": [
                [host, (host + stride) % self.hosts]
                for host in range(self.hosts)
                for stride in self.strides
            ],
            "link": self.link,
            "seconds": self.seconds,
            "switch": self.switch,
            "rings": [
                {
                    "hosts": group,
                    "bytes": size,
                    "strides": strides_around(self.hosts, self.strides, group),
                }
                for group, size in self.traffic.rings.items()
            ],
            "messages": [
                {"from": a, "to": b, "bytes": size, "route": paths[(b - a) % self.hosts]}
                for (a, b), size in self.traffic.messages.items()
            ],
        }


def _ports(cluster: Cluster, world: int) -> int:
    """Return the number of ranks of the smallest host: each rank has an uplink."""
    return min(Counter(map(cluster.node_of, range(world))).values())


def _uplink_rate(cluster: Cluster, world: int) -> float:
    """Return the bytes per second that the slowest host sends to others."""
    rates: defaultdict[int, float] = defaultdict(float)
    for rank in range(world):
        device = cluster.device_of(rank)
        rates[cluster.node_of(rank)] += device.network * device.routed
    return min(rates.values())


def _switch_seconds(hosts: int, traffic: Traffic, out: float) -> float:
    """Return the seconds in which the fullest host sends or receives everything."""
    sends, receives = [0.0] * hosts, [0.0] * hosts
    for group, size in traffic.rings.items():
        for host in group:
            sends[host] += size
            receives[host] += size
    for (source, target), size in traffic.messages.items():
        sends[source] += size
        receives[target] += size
    return max(*sends, *receives) / out
