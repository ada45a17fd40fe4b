"""Limits of a search: parsing, refusals, effect on the best plan, and explanations."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.limits import AXES, Limits
from schedlang.language.printer import fmt
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.planner import search_space
from schedlang.passes.planner.limits import (
    parse_limits,
    parse_question,
    satisfies_limits,
    setting_values,
)
from schedlang.passes.planner.reasons import describe_slowdown
from schedlang.passes.planner.search import explain_rejection, search
from schedlang.passes.planner.search_space import Job
from schedlang.passes.planner.values import Chain, Placement, Price
from schedlang.passes.simulate.machine import CLUSTERS
from schedlang.pipeline.schedules import ORDERS
from tests.planner.decoders import decoder

PROFILES = decoder(8, 1024, 16, 4096, 32000, 1024)
JOB = Job(8, 32, replace(CLUSTERS["a100"], memory=4 * 2**30))


def test_limits_are_read():
    """Options become limits, with names of orders as the catalogue has them."""
    limits = parse_limits(
        ["tp=2,4", "order=interleaved", "sequence=true", "zero=0"], ["pp=8", "pp=4"], ["dp=2"]
    )
    assert limits.pinned["tp"] == (2, 4) and limits.pinned["order"] == ("Interleaved1F1B",)
    assert limits.pinned["sequence"] == (True,) and limits.forbidden["pp"] == (8, 4)
    assert limits.admits("dp", 2) and not limits.admits("dp", 1) and not limits.admits("pp", 4)
    assert limits.text().startswith("tp = 2 or 4, order = Interleaved1F1B, sequence = true")
    assert parse_question("tp=4 again=none") == parse_limits(["tp=4", "again=none"])


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({"pin": ["tp"]}, "S109", "cannot read `--pin tp`"),
        ({"pin": ["tp=0"]}, "S109", "at least 1"),
        ({"pin": ["rowz=2"]}, "S106", "did you mean `rows`"),
        ({"pin": ["zero=4"]}, "S109", "from 0 to 3"),
        ({"pin": ["order=1F2B"]}, "S109", "1F1B"),
        ({"pin": ["again=maybe"]}, "S109", "none, some, all"),
        ({"forbid": ["sequence=1"]}, "S109", "true or false"),
        ({"least": ["order=1F1B"]}, "S109", "one number, of dp"),
        ({"pin": ["tp=2"], "forbid": ["tp=2"]}, "S109", "nothing is left of `tp`"),
        ({"pin": ["dp=2"], "least": ["dp=4"]}, "S109", "dp at least 4"),
    ],
)
def test_what_is_no_limit_is_refused(given, code, says):
    """A wrong option is refused with its code and the valid values."""
    with pytest.raises(Refusal) as caught:
        parse_limits(**given)
    diagnostic = caught.value.diagnostics[0]
    assert diagnostic.code == code
    assert says in " ".join([diagnostic.title, *diagnostic.notes, *diagnostic.helps])


def limits_of(*lines: str) -> Limits:
    text = "\n".join(["schedule 1", "", "knob t: int = 4", "", *lines, ""])
    assert fmt(Source("x.sched", text)) == text
    return expand(parse(Source("x.sched", text)), None).limits


def test_a_schedule_binds_a_search():
    """`search` statements of a schedule equal the limits of options, and print as written."""
    limits = limits_of(
        "search pin tp = [t, 2]",
        'search forbid order = [GPipe, "1f1b"]',
        "search at least dp = t // 2",
        "search pin sequence = true",
    )
    assert limits == parse_limits(["tp=4,2", "sequence=true"], ["order=GPipe,1F1B"], ["dp=2"])


def test_axes_that_are_named_lie_so_among_the_others():
    """A pin of some axes admits all orders that keep their sequence; several pins combine."""
    limits = limits_of('search pin axes = "pp-dp"', 'search pin axes = "tp-cp"')
    assert limits == parse_limits(["axes=pp-dp", "axes=tp-cp"])
    admitted = {
        order for order in map("-".join, permutations(AXES)) if limits.admits("axes", order)
    }
    assert {"pp-dp-tp-cp", "tp-pp-cp-dp"} < admitted and len(admitted) == 6
    assert not parse_limits([], ["axes=pp-dp"]).admits("axes", "cp-pp-tp-dp")
    assert parse_limits(["axes=pp-dp"]).text() == "axes = pp-dp"


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("search tp = 4", "S003", "`pin`"),
        ("search pin tp", "S003", "`=`"),
        ("search pin rowz = 4", "S106", "rows"),
        ("search at least order = GPipe", "S109", "no least value"),
        ("search pin tp = 1.5", "S109", "`tp` cannot be `1.5`"),
        ('search pin axes = "ep-dp"', "S109", "experts lie along dp"),
        ('search pin axes = "tp"', "S109", "from the slowest on"),
        ('search pin axes = "pp-dp"\nsearch pin axes = "dp-pp"', "S109", "nothing is left of"),
        ("search pin tp = 2\nsearch forbid tp = 2", "S109", "nothing is left of `tp`"),
    ],
)
def test_a_limit_that_is_none_is_refused_at_its_place(line, code, says):
    """A wrong limit is refused on its line."""
    with pytest.raises(Refusal) as caught:
        limits_of(*line.split("\n"))
    diagnostic = caught.value.diagnostics[0]
    assert diagnostic.code == code and says in " ".join(
        [diagnostic.title, *diagnostic.notes, *diagnostic.helps]
    )
    assert diagnostic.primary.span.line == 5 + line.count("\n")


@pytest.mark.parametrize(
    "limits",
    [
        parse_limits(["tp=4"]),
        parse_limits(["order=GPipe", "pp=2"]),
        parse_limits(["again=all"]),
        parse_limits(["again=some", "pp=2"]),
        parse_limits(["cp=2", "chunks=2"]),
        parse_limits([], ["zero=1,2,3", "tp=1"], ["pp=2", "rows=2"]),
        parse_limits(["order=BFS", "chunks=2"]),
    ],
    ids=Limits.text,
)
def test_limits_bind(limits):
    """The best setting under limits satisfies them, and is not better than the unlimited one."""
    *_, limited = search(PROFILES, replace(JOB, length=1024), limits)
    assert limited.best is not None and satisfies_limits(limits, limited.best.setting)
    *_, free = search(PROFILES, JOB)
    assert free.best.least <= limited.best.least


def test_sums_over_the_batch_bind_split_sequences_to_one_microbatch():
    """Limits that want both are refused with what to allow; either alone is accepted."""
    job = replace(JOB, length=1024, sums_batch=True)
    search_space.check_job_limits(job, parse_limits(["cp=2"]))
    search_space.check_job_limits(job, parse_limits(["micro=2"]))
    with pytest.raises(Refusal, match="no way has cp = 2 and micro = 2") as refused:
        search_space.check_job_limits(job, parse_limits(["cp=2", "micro=2"]))
    assert refused.value.diagnostic.helps == ("allow `micro=1`", "or `cp=1`")


def test_why_prices_what_is_asked_about():
    """A `--why` question is answered by a price and a reason, or by why there is none."""
    *_, best = search(PROFILES, JOB)
    slow = explain_rejection(PROFILES, JOB, parse_question("tp=8"), best)
    assert slow.kind == "tp = 8" and setting_values(slow.filled.setting)["tp"] == 8
    assert slow.reason.endswith(" s more") and "% slower: " in slow.reason
    large = explain_rejection(
        PROFILES,
        replace(JOB, cluster=replace(JOB.cluster, memory=2**28)),
        parse_question("tp=1"),
        best,
    )
    assert large.reason.startswith("needs ") and large.reason.endswith(" of 256 MiB")
    none = explain_rejection(PROFILES, JOB, parse_question("pp=3"), best)
    assert none.reason == "there is no such setting"


def test_reasons_compare_parts():
    """The reported cause is the part of a step that grew most."""
    best = Price(10.0, (1.0,), {"computing": 8.0, "tp": 2.0})
    assert describe_slowdown(best, Price(11.2, (1.0,), {"computing": 8.4, "tp": 2.8})) == (
        "12.0% slower: tp sends 0.8 s more"
    )
    assert describe_slowdown(best, Price(30.0, (1.0,), {"computing": 8.0, "idle": 22.0})) == (
        "200% slower: waits in the pipeline 22 s more"
    )
    assert describe_slowdown(best, best) == "as quick"


def test_rejected_are_of_other_kinds_and_not_better():
    """Rejected settings differ as they say, and are slower or too large."""
    *_, result = search(PROFILES, JOB)
    best_values = setting_values(result.best.setting)
    assert len(result.rejected) >= 3
    for rejected in result.rejected:
        name, value = rejected.kind.split(" = ")
        assert str(setting_values(rejected.filled.setting)[name]).lower() == value.lower()
        assert str(best_values[name]).lower() != value.lower()
        assert rejected.filled.priced is None or rejected.filled.least >= result.best.least


def test_an_order_without_a_price_is_refused():
    """A pinned order without a price is refused before the search begins."""
    with pytest.raises(Refusal) as caught:
        search(PROFILES, JOB, parse_question("order=Chimera"))
    diagnostic = caught.value.diagnostics[0]
    assert diagnostic.code == "S109" and "does not price `Chimera`" in diagnostic.title
    questions = {
        order.name: parse_question(f"order={order.name}") for order in ORDERS if not order.searched
    }
    profiles, job = decoder(4, 1024, 16, 4096, 32000, 1024), replace(JOB, ranks=4, rows=8)
    for name, limits in questions.items():
        try:
            *_, last = search(profiles, job, limits, moves=0)
            assert last.best is None or last.best.setting.order == name
        except Refusal:
            assert name not in search_space.ORDERS


def test_placements_that_the_model_refuses_are_told():
    """Placements without a chain are counted; the first refusal of each code is kept."""

    def some(placement: Placement) -> Chain | Refusal | None:
        if placement.tp > 1:
            return Refusal.of("S401", f"heads are no multiple of {placement.tp}")
        return PROFILES(placement) if placement.rows < 8 else None

    *_, result = search(some, JOB)
    assert result.best is not None and result.best.setting.placement.tp == 1
    ((placement, refusal),) = result.refused
    assert placement == Placement(1, 2) and refusal.diagnostics[0].title.endswith("of 2")
    assert result.counts.refused > 6
