"""Each wait for a message or a sum of schedlang is missed when it is left out.

With the calls that `test_mutations_copies.py` leaves out these are all orders of the runtime: what
is neither hunted here nor there is listed, with the reason.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from schedlang.runtime.device import HOST
from schedlang.runtime.launch.rank_job import Hang, RankDied
from schedlang.testing.accelerator import unavailable
from tests.accelerator import sent_ways
from tests.accelerator.hunting import NEAR, Fate, Way, hunt_apart, judge
from tests.accelerator.mutants import CALLS, PACKAGE, Site, left_out, sites, users, works
from tests.engine import Faults, Threads

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

_RUNTIME = "schedlang.runtime."
MODULES = tuple(
    _RUNTIME + name
    for name in (
        "context_parallel.ring",
        "grad_reduction.gradient",
        "grad_reduction.zero",
        "moe.dispatch",
        "offload.offloaded_step",
        "pipeline.overlapped_reduction",
        "pipeline.p2p",
        "pipeline.evicted_activations",
        "redistribution.execution",
    )
)
_KEPT = "the work of a message keeps its tensors until it is done, and nobody writes into these"
# calls that nothing needs, by their function and text: why that is so
REDUNDANT = {
    ("PeerChannel.free", "work.wait()"): _KEPT,
    ("PeerChannel.sweep", "work.is_completed()"): _KEPT,
    (
        "ShardedStage.reshard",
        "handle.wait()",
    ): "each unit waits for its own gather before its"
    " forward; of one that does not run `test_zero.py` looks at the values that it would keep",
}
# between hosts, by gloo: no device orders these, and ranks whose messages are late miss them
HOSTS = {
    ("PartnerEviction._receive_numbers", "world.irecv(message, source, self.hosts).wait()"): (
        sent_ways.parked_on_a_peer
    ),
    ("PeerState._exchange_size", "work.wait()"): sent_ways.state_on_a_peer,
}
# of what a host has sent nobody looks at anything: its work holds the buffer until it is gone
SENT = {("PartnerEviction.finish", "message.wait()")}
# modules with a `wait` that is of no stream, message or sum
OTHERS = {
    "diagnostics.job_refusals": "of a store",
    "elastic": "of a store, and of threads",
    "editors.services": "of a process",
    "runtime.comm.store_watch": "of threads",
    "runtime.comm.world": "of messages that go through the host, where gloo alone serves a device",
    "runtime.grad_reduction.batch_statistics": "of threads",
    "runtime.launch.hang_watch": "of threads",
    "runtime.launch.pool": "of processes",
    "runtime.launch.rank_record": "of threads",
    "runtime.launch.recorded_calls": "those of whoever called, which are told and passed on",
    "runtime.rowwise_kernels.launch": "of a process",
    "verbs.progress": "of threads",
}


def wanted() -> list[Site]:
    every, left = sites(*MODULES, chosen=works), {*HOSTS, *SENT}
    return [one for one in every if (one.function, one.text) not in left]


def test_every_order_of_the_runtime_is_hunted() -> None:
    """A wait, event or record that somebody writes tomorrow is hunted, or listed."""
    root = Path(inspect.getfile(importlib.import_module(PACKAGE))).parent
    found = set()
    for path in root.rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if "testing" in path.parts or name == "runtime.device":
            continue  # `runtime.device` has the calls themselves: test_mutations_copies.py
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                plain = isinstance(node.func.value, ast.Name) and node.func.value.id == "devices"
                if node.func.attr in (*CALLS, "is_completed") and not plain:
                    found.add(name)
    hunted = {name.removeprefix(f"{PACKAGE}.") for name in MODULES}
    assert found == hunted | set(OTHERS)
    here = {(one.function, one.text) for one in sites(*MODULES, chosen=works)}
    assert {*REDUNDANT, *HOSTS, *SENT} <= here
    assert f"{_RUNTIME}checkpointing.background" in users()


def test_a_wait_for_a_message_that_is_left_out() -> None:
    """For what a stage is sent: by a report."""
    (site,) = (one for one in wanted() if one.function == "PeerChannel.take")
    (fate,) = hunt_apart([site], (sent_ways.stages,))
    assert fate.report, fate


@pytest.mark.parametrize("site", HOSTS, ids=lambda site: site[0])
def test_what_hosts_tell_each_other(site: tuple[str, str]) -> None:
    """On ranks whose messages come when somebody waits: the schedule trains, and not without."""
    with Threads(faults=Faults()) as late:
        for found in late.run(HOSTS[site], 2, HOST):
            assert found < NEAR
        (mutation,) = (
            one for one in sites(*MODULES, chosen=works) if (one.function, one.text) == site
        )
        with left_out(mutation) as watch:
            try:
                wrong = not all(found < NEAR for found in late.run(HOSTS[site], 2, HOST))
            except (RankDied, Hang):
                wrong = True
        assert watch.count and wrong


@pytest.mark.deep
def test_every_wait_is_needed_or_known() -> None:
    """All that is left out is found; what is not is listed above, with the reason."""
    two = hunt_apart(wanted(), sent_ways.TWO)
    judge(_wider(_wider(two, sent_ways.FOUR, 4), sent_ways.EIGHT, 8), REDUNDANT, ())


def _wider(fates: list[Fate], ways: tuple[Way, ...], ranks: int) -> list[Fate]:
    """Those that nobody has found yet, on more ranks; where nobody reaches them, as before."""
    open_ = [fate for fate in fates if not fate.found]
    again = {fate.site: fate for fate in hunt_apart([f.site for f in open_], ways, ranks)}
    return [
        after if (after := again.get(fate.site)) and (after.found or after.reached) else fate
        for fate in fates
    ]
