"""The search at scale, beside published plans: python -m tests.benchmarks.search_scale

Prints for each job the seconds that the search takes, what became of its ways, the plan, and what
a plan that was published costs by the same prices; chains are closed forms.

GPT-3       Narayanan et al. 2021 (2104.04473), table 1: their nearest, 145.6 B parameters, on 1,536
            A100 with tp 8 and pp 8
Llama-3     Dubey et al. 2024 (2407.21783), table 4: 405 B on 16,384 H100 with tp 8, pp 16, dp 128,
            16 M tokens in rows of 8,192
Mixtral     8x22B on H100: 49.3 % of the peak with experts folded over other axes (2504.14960); no
            plan for 64 ranks was published
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlang.ir.limits import Limits
from schedlang.passes.planner.limits import parse_question
from schedlang.passes.planner.search import NO_LIMITS, SearchResult, explain_rejection, search
from schedlang.passes.planner.search_space import Job
from schedlang.passes.simulate.machine import CLUSTERS
from tests.planner.decoders import decoder

if TYPE_CHECKING:
    from schedlang.passes.planner.search import Profiles
    from schedlang.passes.planner.values import Setting

A100, H100 = CLUSTERS["a100"], CLUSTERS["h100"]


@dataclass(frozen=True)
class Case:
    """A model and its job; `plan` what was published, as limits."""

    profiles: Profiles
    job: Job
    plan: str


CASES = {
    "gpt3": Case(
        decoder(96, 12288, 96, 4 * 12288, 51200, 2048),
        Job(1024, 1536, A100, length=2048),
        "tp=8 pp=8",
    ),
    "llama3": Case(
        decoder(126, 16384, 128, 53248, 128256, 8192, kv=8, gated=True),
        Job(16384, 2048, H100, length=8192),
        "tp=8 pp=16 dp=128",
    ),
    "mixtral": Case(
        decoder(56, 6144, 48, 16384, 32768, 4096, kv=8, gated=True, experts=8, top=2),
        Job(64, 1024, H100, length=4096, experts=8),
        "ep=8",
    ),
}


def main(names: list[str]) -> None:
    """Search for the plan of each case."""
    for name in names:
        case = CASES[name]
        begin = time.perf_counter()
        first, found = 0.0, None
        for found in search(case.profiles, case.job):
            first = first or time.perf_counter() - begin
            if not found.done:
                print(f"{name}: {time.perf_counter() - begin:6.2f} s  {_told(found)}")
        took = time.perf_counter() - begin
        assert found is not None and found.best is not None
        counts = found.counts
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{name}: {took:.1f} s ({first:.2f} s to the first plan), {counts.all} ways: "
            f"{counts.large} too large, {counts.pruned} pruned, {counts.cut} cut, {counts.priced} "
            f"priced; {held:.2f} GiB at most"
        )
        print(f"{name}: {_told(found)}  {dict(found.best.priced.parts)}")
        for one in found.rejected[:3]:
            print(f"{name}: not {one.kind}: {one.reason}")
        _beside(name, case, found)


def _beside(name: str, case: Case, found: SearchResult) -> None:
    limits: Limits = parse_question(case.plan)
    told = explain_rejection(case.profiles, case.job, limits, found, NO_LIMITS)
    if told.filled is not None:
        print(f"{name}: with {told.kind}: {told.filled.least:.2f} s, {told.reason}")
        print(f"{name}:   {_setting(told.filled.setting)}")


def _told(found: SearchResult) -> str:
    assert found.best is not None
    return f"{found.best.least:.3f} s a step: {_setting(found.best.setting)}"


def _setting(one: Setting) -> str:
    at = one.placement
    axes = (
        f"tp {at.tp}{' sequence' * at.sequence}, cp {at.cp}, ep {at.ep}, pp {one.pp}, dp {one.dp}"
    )
    again = f", {sum(one.again)} of {sum(one.cuts)} units again" if one.again else ""
    return (
        f"{axes}, {'-'.join(one.axes)}, {at.rows} rows x {one.micro}, "
        f"{one.order} with {one.chunks}, zero {one.zero}{again}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="|".join(CASES))
    main(parser.parse_args().names)
