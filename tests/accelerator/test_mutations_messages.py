"""Mutation tests of schedlang's messages and sums: each wait that is left out is noticed.

Together with `test_mutations_copies.py` these are all orders of the runtime: what neither covers is
listed, with the reason.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from schedlang.runtime.device import HOST
from schedlang.runtime.launch.rank_job import Hang, RankDied
from schedlang.testing.accelerator import spawn, unavailable
from tests.accelerator import message_variants
from tests.accelerator.mutation_runs import (
    TOLERANCE,
    Outcome,
    Variant,
    check_outcomes,
    run_separately,
)
from tests.accelerator.mutations import (
    CALLS,
    PACKAGE,
    Site,
    call_sites,
    calling_modules,
    is_work_wait,
    without_call,
)
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
FINISH = "finish_backwards"
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
# calls that none of these programs reaches
UNREACHED = {
    ("OverlappedReduction.end_broken_step", "work.wait()"): "none raises in a backward: that"
    " later steps are right then, `test_broken_steps.py` looks at",
}
# between hosts, by gloo: no device orders these; ranks whose messages are late need the waits
HOST_MESSAGES = {
    ("PartnerEviction._receive_numbers", "world.irecv(message, source, self.hosts).wait()"): (
        message_variants.activations_on_a_peer
    ),
    ("PeerState._exchange_size", "work.wait()"): message_variants.state_on_a_peer,
}
# nothing checks what a host has sent: its work holds the buffer until it is sent
UNCHECKED = {("PartnerEviction.finish", "message.wait()")}
# modules with a `wait` that is of no stream, message or sum
OTHER_MODULES = {
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


def searched_sites() -> list[Site]:
    all_sites, excluded = call_sites(*MODULES, chosen=is_work_wait), {*HOST_MESSAGES, *UNCHECKED}
    return [site for site in all_sites if (site.function, site.text) not in excluded]


def test_every_order_of_the_runtime_is_hunted() -> None:
    """A new wait, event or record must be tested here, or listed."""
    root = Path(inspect.getfile(importlib.import_module(PACKAGE))).parent
    names = set()
    for path in root.rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if "testing" in path.parts or name == "runtime.device":
            continue  # `runtime.device` has the calls themselves: test_mutations_copies.py
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_module = (
                    isinstance(node.func.value, ast.Name) and node.func.value.id == "devices"
                )
                if node.func.attr in (*CALLS, "is_completed") and not is_module:
                    names.add(name)
    searched = {name.removeprefix(f"{PACKAGE}.") for name in MODULES}
    assert names == searched | set(OTHER_MODULES)
    calls = {(site.function, site.text) for site in call_sites(*MODULES, chosen=is_work_wait)}
    assert {*REDUNDANT, *UNREACHED, *HOST_MESSAGES, *UNCHECKED} <= calls
    assert f"{_RUNTIME}checkpointing.background" in calling_modules()


def test_a_wait_for_a_message_that_is_left_out() -> None:
    """Leaving out the wait for what a stage receives is reported."""
    (site,) = (
        candidate for candidate in searched_sites() if candidate.function == "PeerChannel.take"
    )
    (outcome,) = run_separately([site], (message_variants.stages,))
    assert outcome.report, outcome


def test_an_update_that_does_not_wait_for_the_sums_of_stages() -> None:
    """Backwards in a pipeline do not wait for their sums: the step does, or it is reported."""
    (error, *_) = spawn(message_variants.sharded_stages, ranks=4)
    assert error < TOLERANCE
    sites = call_sites(
        f"{_RUNTIME}program",
        chosen=lambda _, call: isinstance(call.func, ast.Attribute) and call.func.attr == FINISH,
    )
    (outcome,) = run_separately(sites, (message_variants.sharded_stages,), ranks=4)
    assert outcome.report, outcome


@pytest.mark.parametrize("site", HOST_MESSAGES, ids=lambda site: site[0])
def test_what_hosts_tell_each_other(site: tuple[str, str]) -> None:
    """On ranks whose messages arrive only when waited for, the program trains with the wait, and
    fails without."""
    with Threads(faults=Faults()) as threads:
        for max_error in threads.run(HOST_MESSAGES[site], 2, HOST):
            assert max_error < TOLERANCE
        (mutation,) = (
            candidate
            for candidate in call_sites(*MODULES, chosen=is_work_wait)
            if (candidate.function, candidate.text) == site
        )
        with without_call(mutation) as counter:
            try:
                missed = not all(
                    max_error < TOLERANCE for max_error in threads.run(HOST_MESSAGES[site], 2, HOST)
                )
            except (RankDied, Hang):
                missed = True
        assert counter.count and missed


@pytest.mark.deep
def test_every_wait_is_needed_or_known() -> None:
    """Every call that is left out is found; the others are listed above, with the reason."""
    on_two = run_separately(searched_sites(), message_variants.TWO)
    check_outcomes(
        _on_more_ranks(_on_more_ranks(on_two, message_variants.FOUR, 4), message_variants.EIGHT, 8),
        REDUNDANT,
        UNREACHED,
    )


def _on_more_ranks(
    outcomes: list[Outcome], variants: tuple[Variant, ...], ranks: int
) -> list[Outcome]:
    """Run on more ranks those not found yet; where nothing reaches them, keep the old outcome."""
    unfound = [outcome for outcome in outcomes if not outcome.found]
    outcomes_by_site = {
        outcome.site: outcome
        for outcome in run_separately([f.site for f in unfound], variants, ranks)
    }
    return [
        after
        if (after := outcomes_by_site.get(outcome.site)) and (after.found or after.reached)
        else outcome
        for outcome in outcomes
    ]
