"""Rule-based planners: they give the layouts that their papers and guides state."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from schedlang.passes.planner.rule_planners import RULE_PLANNERS, JobFacts
from schedlang.passes.planner.values import Setting

GIB = 1 << 30

# Table 1 of Narayanan et al. (SC 2021): billions of parameters, heads, layers, tensor and pipeline
# parallelism, devices (A100, 80 GB), rows of a step
TABLE_1 = (
    (1.7, 24, 24, 1, 1, 32, 512),
    (3.6, 32, 30, 2, 1, 64, 512),
    (7.5, 32, 36, 4, 1, 128, 512),
    (18.4, 48, 40, 8, 1, 256, 1024),
    (39.1, 64, 48, 8, 2, 512, 1536),
    (76.1, 80, 60, 8, 4, 1024, 1792),
    (145.6, 96, 80, 8, 8, 1536, 2304),
    (310.1, 128, 96, 8, 16, 1920, 2160),
    (529.6, 128, 105, 8, 35, 2520, 2520),
    (1008.0, 160, 128, 8, 64, 3072, 3072),
)


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: f"{row[0]}B")
def test_ptd_p_gives_the_published_layouts(row: tuple[float, int, int, int, int, int, int]) -> None:
    """Tensor and pipeline sizes of all ten rows of their Table 1."""
    billions, heads, layers, tp, pp, ranks, rows = row
    state = 18 * billions * 1e9  # 16-bit weights, 32-bit gradients, master copy, two moments
    case = JobFacts(ranks, 8, 80e9, lambda setting: math.inf, state, layers, heads, rows)
    recommended = RULE_PLANNERS["ptd-p"].plan(case)
    assert recommended is not None
    assert (recommended[0].placement.tp, recommended[0].pp) == (tp, pp)


def test_ptd_p_takes_the_rows_that_its_formula_likes_best() -> None:
    """The microbatch size minimises the formula over all divisors."""

    def times(rows: int) -> tuple[float, float]:
        return 1.0 + rows, 2.0 * (1.0 + rows)  # kernel start, plus time per row

    rows_chosen = []
    for rows, room in ((64, 100), (256, 100), (16, 100), (64, 2)):
        case = JobFacts(16, 2, 100.0, lambda s: 0.0, 500.0, 8, 2, rows, times=times)
        tight = replace(case, needs=lambda s, room=room: 100.0 * (s.placement.rows > room))
        recommended = RULE_PLANNERS["ptd-p"].plan(replace(tight, memory=99.0))
        assert recommended is not None
        setting = recommended[0]
        rows_chosen.append(setting.placement.rows)
        assert (setting.placement.tp, setting.pp) == (2, 8)
        replica_rows = rows // setting.dp

        def took(b: int, replica_rows: int = replica_rows, pp: int = setting.pp) -> float:
            return (replica_rows / b + pp - 1) * sum(times(b))

        divisors = [b for b in range(1, replica_rows + 1) if replica_rows % b == 0 and b <= room]
        assert took(setting.placement.rows) == min(map(took, divisors))
    assert rows_chosen == [4, 8, 2, 2]


# Hagemann et al. (2023), by tensor and pipeline size: seconds of a step with microbatch size 1,
# no recomputation, FlashAttention 2 and their norm; None: out of memory
MEASURED_STEPS = {
    (40, 40, 2048, 64): {(1, 1): 26.54, (1, 2): 31.06, (2, 1): 31.29, (2, 2): 34.84},
    (40, 40, 512, 128): {
        (1, 1): None,
        (1, 2): None,
        (1, 4): None,
        (2, 1): None,
        (2, 2): 18.41,
        (2, 4): 19.32,
        (4, 1): 21.36,
        (4, 2): 21.94,
        (4, 4): 23.46,
    },
    (60, 52, 512, 128): {
        (2, 2): None,
        (2, 4): None,
        (4, 2): None,
        (4, 4): 49.43,
        (4, 8): 50.23,
        (4, 16): 54.79,
    },
    (60, 52, 2048, 256): {
        (1, 1): None,
        (1, 2): None,
        (1, 4): 24.00,
        (2, 1): None,
        (2, 2): 28.34,
        (2, 4): 22.67,
        (4, 1): 31.77,
        (4, 2): 26.94,
        (4, 4): 26.28,
    },
}


@pytest.mark.parametrize(("job", "ran"), MEASURED_STEPS.items(), ids=str)
def test_layouts_recommend_what_ran_best_or_within_six_percent(
    job: tuple[int, int, int, int], ran: dict[tuple[int, int], float | None]
) -> None:
    """The recommendation is the best of its campaign in three of four, else within 6 percent."""
    layers, heads, rows, ranks = job

    def needs(setting: Setting) -> float:
        seconds = ran.get((setting.placement.tp, setting.pp))
        return 0.0 if seconds is not None else math.inf

    recommended = RULE_PLANNERS["layouts"].plan(
        JobFacts(ranks, 8, 80e9, needs, 0, layers, heads, rows)
    )
    assert (
        recommended is not None
        and recommended[0].placement.rows == 1
        and not any(recommended[0].again)
    )
    seconds_run = ran[recommended[0].placement.tp, recommended[0].pp]
    best = min(seconds for seconds in ran.values() if seconds is not None)
    assert seconds_run is not None and seconds_run <= 1.06 * best


def decoder_facts(
    ranks: int, billions: float, fast: bool = False, largest: float = 1.0
) -> JobFacts:
    """Return the facts of a model of 32 layers on 80 GiB devices, 8 per node."""
    state = 16 * billions * 1e9

    def needs(setting: Setting) -> float:
        parts = setting.placement.tp * setting.pp
        bytes_per_zero = (
            16,
            16 - 12 * (1 - 1 / setting.dp),
            16 - 14 * (1 - 1 / setting.dp),
            16 / setting.dp,
        )
        if setting.pp > 1 and largest > 80 and setting.placement.tp * 80 < largest:
            return math.inf
        return billions * 1e9 / parts * bytes_per_zero[setting.zero]

    return JobFacts(ranks, 8, 80 * GIB, needs, state, 32, 32, 1024, largest * GIB, fast)


@pytest.mark.parametrize(
    ("guide", "case", "when", "axes"),
    [
        ("pytorch", decoder_facts(16, 1), "fits on one device", (16, 1, 1, 0)),
        ("pytorch", decoder_facts(16, 13), "has a row", (16, 1, 1, 3)),
        ("pytorch", decoder_facts(16, 100), "limits", None),
        ("pytorch", decoder_facts(2048, 100), "limits", (64, 32, 1, 0)),
        ("huggingface", decoder_facts(8, 1), "case 1", (8, 1, 1, 0)),
        ("huggingface", decoder_facts(8, 13), "case 2", (2, 4, 1, 0)),
        ("huggingface", decoder_facts(8, 8, largest=100), "case 3", (4, 1, 2, 0)),
        ("huggingface", decoder_facts(64, 13, fast=True), "fast links", (64, 1, 1, 1)),
        ("huggingface", decoder_facts(64, 40), "slow links", (16, 4, 1, 1)),
    ],
)
def test_guides_say_what_to_do(
    guide: str, case: JobFacts, when: str, axes: tuple[int, int, int, int] | None
) -> None:
    """Each line of both guides' tables, for a model that it applies to."""
    recommended = RULE_PLANNERS[guide].plan(case)
    if axes is None:
        assert recommended is None
        return
    assert recommended is not None
    setting, rule = recommended
    assert when in rule.when
    assert (setting.dp, setting.pp, setting.placement.tp, setting.zero) == axes
    assert setting.ranks == case.ranks
