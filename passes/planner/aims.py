"""Aims other than the time of a step: money or energy of a training, within a deadline (`--aim`).

Searches which nodes, power limits and batch give the cheapest training; an energy cost as in Zeus.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.tables import format_seconds
from schedlang.passes.planner.reasons import RejectedSetting
from schedlang.passes.planner.search import Counts, SearchResult
from schedlang.passes.planner.search_space import Job
from schedlang.passes.planner.tuning import (
    MAX_REASONS,
    MAX_SEARCHES,
    FindSetting,
    TuningResult,
    tune_model,
)
from schedlang.passes.planner.values import Chain, Placement
from schedlang.passes.simulate.machine import Cluster
from schedlang.passes.simulate.node_cluster import Node, Nodes

if TYPE_CHECKING:
    from schedlang.passes.planner.profile import Profiles

# -- a training ------------------------------------------------------------------------------------

AIMS = TIME, COST, ENERGY = ("time", "cost", "energy")
NEEDED_FIELDS = {COST: "price", ENERGY: "power"}  # the field that each node must have
MAX_OFFERS = 1000  # maximal number of offers
KWH = 3.6e6


@dataclass(frozen=True)
class Aim:
    """The figure of a training to minimise, and its deadline.

    name      "time", "cost" or "energy"
    samples   rows of a step -> rows that a training with such steps needs until its target
    deadline  maximal seconds of all steps
    eta       weight of the energy; the rest weighs time, at the watts of all nodes (`energy_cost`)
    """

    name: str
    samples: Mapping[int, float]
    deadline: float = math.inf
    eta: float = 1.0

    def worth(self, seconds: float, nodes: Cluster, max_watts: float) -> float:
        """Return the seconds, money, or joules as Zeus weights them, of a training on nodes."""
        if self.name == TIME or not isinstance(nodes, Nodes):
            return seconds
        if self.name == COST:
            return seconds * nodes.price_per_second(nodes.ranks)
        return energy_cost(TrainingCost(seconds, nodes.watts(nodes.ranks)), max_watts, self.eta)

    def describe(self, seconds: float, nodes: Cluster) -> str:
        """Describe a training on nodes: `41.2 h, 1,204.50`."""
        parts = [_duration(seconds)]
        if self.name == COST and isinstance(nodes, Nodes):
            parts.append(f"{seconds * nodes.price_per_second(nodes.ranks):,.2f} at these prices")
        if self.name == ENERGY and isinstance(nodes, Nodes):
            parts.append(f"{seconds * nodes.watts(nodes.ranks) / KWH:,.4g} kWh")
        return ", ".join(parts)


@dataclass(frozen=True)
class ResourceChoice:
    """Some of the nodes, each at full power or limited, with a batch; `steps` of a training."""

    job: Job
    steps: int
    text: str

    def floor(self, chain: object) -> float:
        """Lower bound of seconds of a training: operations of `chain` (one row) at the speed of all
        ranks."""
        if not isinstance(chain, Chain):
            return 0.0
        flops = sum(
            run.count * op.flops * op.count
            for run in chain.runs
            for direction in (run.unit.forward, run.unit.backward)
            for op in direction.operators
        )
        speed = sum(self.job.cluster.device_of(rank).speed for rank in range(self.job.ranks))
        return self.steps * self.job.rows * flops / speed


@dataclass(frozen=True)
class EvaluatedChoice:
    """The best setting that was found for an offer: seconds of a training, and its worth."""

    offer: ResourceChoice
    found: SearchResult
    seconds: float
    worth: float


def check_cluster(aim: Aim, cluster: Cluster) -> None:
    """Refuse (S109) a cluster without the figure that the aim needs."""
    figure = NEEDED_FIELDS.get(aim.name)
    if figure is None:
        return
    example = {"price": "price = 24.5", "power": "power = 400"}[figure]
    unit = {"price": "of an hour of the node", "power": "watts of a rank"}[figure]
    help_ = f"write `{example}`, {unit}, into each `[[node]]` of a file: `--on cluster.toml`"
    if not isinstance(cluster, Nodes):
        message = f"`--aim {aim.name}` asks for a {figure}, and `{cluster.name}` says none"
        raise Refusal.of("S109", message, helps=(help_,))
    for number, node in zip(cluster.numbers, cluster.nodes):
        if getattr(node, figure) is None:
            message = f"`--aim {aim.name}`: node {number} of `{cluster.name}` says no `{figure}`"
            raise Refusal.of("S109", message, helps=(help_,))


def list_choices(job: Job, aim: Aim) -> list[ResourceChoice]:
    """List all numbers of nodes of each kind (for energy also under each power limit), with each
    batch; for time all nodes.

    Raises Refusal S109 for too many.
    """
    menu = [(job.cluster, job.ranks, "")]
    if isinstance(job.cluster, Nodes) and aim.name != TIME:
        menu = [(part, part.ranks, text) for part, text in _chosen(job.cluster, aim.name == ENERGY)]
    choices = []
    for rows, samples in aim.samples.items():
        for cluster, ranks, text in menu:
            parts = [text] * bool(text) + [f"{rows} rows"] * (len(aim.samples) > 1)
            variant = replace(job, ranks=ranks, rows=rows, cluster=cluster)
            choices.append(
                ResourceChoice(variant, math.ceil(samples / rows), ", ".join(parts) or "all nodes")
            )
    return choices


def _chosen(nodes: Nodes, limited: bool) -> Iterator[tuple[Nodes, str]]:
    """Yield subsets of nodes, the first ones of each kind, and their descriptions."""
    kinds: dict[Node, list[int]] = {}
    for spots, node in enumerate(nodes.nodes):
        kinds.setdefault(node, []).append(spots)
    menus = [
        [
            (0, node),
            *(
                (k + 1, limited_node)
                for limited_node in (node.with_power_limits if limited else (node,))
                for k in range(len(spots))
            ),
        ]
        for node, spots in kinds.items()
    ]
    if (many := math.prod(map(len, menus)) - 1) > MAX_OFFERS:
        message = (
            f"{many} choices of nodes and limits are too many: at most {MAX_OFFERS} are looked at"
        )
        raise Refusal.of("S109", message, helps=("give fewer `limits`, or fewer nodes: `--gpus`",))
    for selection in product(*menus):
        places = {p: node for (k, node), spots in zip(selection, kinds.values()) for p in spots[:k]}
        if places:
            parts = [
                f"{k} node{'s' * (k > 1)} of {node.device.node} {node.device.name}"
                + f" at {node.power:g} W" * (node not in kinds)
                for k, node in selection
                if k
            ]
            order = sorted(places)
            yield nodes.select(order, [places[spots] for spots in order]), ", ".join(parts)


@dataclass
class ChoiceSearch:
    """Best-first search over offers: an offer is evaluated when no other can be worth less.

    find       finds the best setting of a job
    evaluated  evaluated offers, including those that end too late
    """

    profiles: Callable[[Placement], object]
    job: Job
    aim: Aim
    find: Callable[[Job], SearchResult]
    evaluated: list[EvaluatedChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_cluster(self.aim, self.job.cluster)
        self.offers = list_choices(self.job, self.aim)
        cluster = self.job.cluster
        self.most = cluster.watts(cluster.ranks) if isinstance(cluster, Nodes) else 0.0

    def iter_evaluated(self) -> Iterator[EvaluatedChoice]:
        """Yield bids that end within the deadline, the least worth first (lambda-DNN, Xu et al.,
        IEEE Transactions on Computers 2022)."""
        row, tie_breaker = self.profiles(Placement()), count()
        heap: list[tuple[float, int, ResourceChoice | EvaluatedChoice]] = []
        for offer in self.offers:
            if (floor := offer.floor(row)) <= self.aim.deadline:
                heapq.heappush(heap, (self.worth(offer, floor), next(tie_breaker), offer))
        while heap:
            *_, candidate = heapq.heappop(heap)
            if isinstance(candidate, EvaluatedChoice):
                yield candidate
                continue
            result = self.find(candidate.job)
            if result.best is None or result.best.priced is None:
                continue
            seconds = candidate.steps * result.best.least
            bid = EvaluatedChoice(candidate, result, seconds, self.worth(candidate, seconds))
            self.evaluated.append(bid)
            if seconds <= self.aim.deadline:
                heapq.heappush(heap, (bid.worth, next(tie_breaker), bid))

    def worth(self, offer: ResourceChoice, seconds: float) -> float:
        """Weight the seconds of a training on an offer's nodes."""
        return self.aim.worth(seconds, offer.job.cluster, self.most)

    def describe(self, bid: EvaluatedChoice) -> RejectedSetting:
        """Describe a bid that was not chosen."""
        text = self.aim.describe(bid.seconds, bid.offer.job.cluster)
        late = ": too late" if bid.seconds > self.aim.deadline else ""
        return RejectedSetting(bid.offer.text, bid.found.best, text + late)


def tune_for_aim(
    profiles: Profiles, job: Job, aim: Aim, find: FindSetting
) -> tuple[Job, TuningResult]:
    """Return the cheapest bid whose simulated steps end within the deadline, and its job.

    Without such a bid nothing is written: the result lists the quickest bids as rejected.  Raises
    Refusal S109 for a cluster without the figure that the aim needs, and what `tuned` raises.
    """
    auction = ChoiceSearch(profiles, job, aim, lambda job: find(profiles, job, None))
    best: tuple[float, Job, TuningResult] | None = None
    for tries, bid in enumerate(auction.iter_evaluated(), 1):
        if best is not None and bid.worth >= best[0]:
            break
        result = _tuned_bid(profiles, auction, bid, find)
        seconds = math.inf if result.written is None else bid.offer.steps * result.written.seconds
        worth = auction.worth(bid.offer, seconds)
        if seconds <= aim.deadline and (best is None or worth < best[0]):
            best = worth, bid.offer.job, result
        if tries == MAX_SEARCHES:
            break
    if best is not None:
        return best[1:]
    late = [auction.describe(bid) for bid in sorted(auction.evaluated, key=lambda bid: bid.seconds)]
    if not late:
        row = profiles(Placement())
        floor, text = min((offer.floor(row), offer.text) for offer in auction.offers)
        reason = f"{_duration(floor)} at least, all operations at full speed: too late"
        late = [RejectedSetting(text, None, reason)]
    return job, TuningResult(SearchResult(None, 0.0, Counts(), tuple(late), done=True), None, job)


def _tuned_bid(
    profiles: Profiles, auction: ChoiceSearch, bid: EvaluatedChoice, find: FindSetting
) -> TuningResult:
    """Write and simulate the schedule of a bid, with the other bids as reasons."""
    offer, aim = bid.offer, auction.aim
    other_bids = sorted((b for b in auction.evaluated if b is not bid), key=lambda b: b.worth)
    rejected = (*map(auction.describe, other_bids[: MAX_REASONS - 1]), *bid.found.rejected)
    first_result = replace(bid.found, rejected=rejected)

    def find_first(profiles: Profiles, job: Job, before: SearchResult | None) -> SearchResult:
        return first_result if job is offer.job else find(profiles, job, before)

    def say(seconds: float) -> Iterator[str]:
        rows = f"{offer.steps:,} steps of {offer.job.rows} rows"
        yield f"Training: {rows} take {aim.describe(offer.steps * seconds, offer.job.cluster)}."
        within = "" if aim.deadline == math.inf else f" within {_duration(aim.deadline)}"
        best = f"least {aim.name} of {len(auction.offers)} choices{within}"
        yield f"On {offer.text}: {best}, of which {len(auction.evaluated)} were searched."

    return tune_model(profiles, offer.job, find_first, say)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return format_seconds(seconds)


# -- energy ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingCost:
    """Training to a target, measured or expected: seconds, and mean watts."""

    seconds: float
    watts: float


def energy_cost(training: TrainingCost, max_watts: float, eta: float = 0.5) -> float:
    """Cost of a run in joules: eta of its energy, and 1 - eta of its time at `max_watts` watts.

    Zeus (You et al., NSDI 2023).
    """
    return eta * training.seconds * training.watts + (1 - eta) * training.seconds * max_watts
