"""The search at scale, beside published plans: python -m tests.benchmarks.search_scale

Prints for each job the seconds of the search, counts of its settings, the plan, and the cost of a
published plan by the same prices; chains are closed forms.

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
    """A model and its job; `plan` is the published plan, as limits."""

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
        first_at, result = 0.0, None
        for result in search(case.profiles, case.job):
            first_at = first_at or time.perf_counter() - begin
            if not result.done:
                print(f"{name}: {time.perf_counter() - begin:6.2f} s  {_result_text(result)}")
        seconds = time.perf_counter() - begin
        assert result is not None and result.best is not None
        counts = result.counts
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{name}: {seconds:.1f} s ({first_at:.2f} s to the first plan), {counts.all} ways: "
            f"{counts.large} too large, {counts.pruned} pruned, {counts.cut} cut, {counts.priced} "
            f"priced; {peak_gib:.2f} GiB at most"
        )
        print(f"{name}: {_result_text(result)}  {dict(result.best.priced.parts)}")
        for rejected in result.rejected[:3]:
            print(f"{name}: not {rejected.kind}: {rejected.reason}")
        _compare_published(name, case, result)


def _compare_published(name: str, case: Case, result: SearchResult) -> None:
    limits: Limits = parse_question(case.plan)
    answer = explain_rejection(case.profiles, case.job, limits, result, NO_LIMITS)
    if answer.filled is not None:
        print(f"{name}: with {answer.kind}: {answer.filled.least:.2f} s, {answer.reason}")
        print(f"{name}:   {_setting_text(answer.filled.setting)}")


def _result_text(result: SearchResult) -> str:
    assert result.best is not None
    return f"{result.best.least:.3f} s a step: {_setting_text(result.best.setting)}"


def _setting_text(cfg: Setting) -> str:
    at = cfg.placement
    axes = (
        f"tp {at.tp}{' sequence' * at.sequence}, cp {at.cp}, ep {at.ep}, pp {cfg.pp}, dp {cfg.dp}"
    )
    recomputed = f", {sum(cfg.again)} of {sum(cfg.cuts)} units again" if cfg.again else ""
    return (
        f"{axes}, {'-'.join(cfg.axes)}, {at.rows} rows x {cfg.micro}, "
        f"{cfg.order} with {cfg.chunks}, zero {cfg.zero}{recomputed}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="|".join(CASES))
    main(parser.parse_args().names)
