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

    def worth(self, seconds: float, on: Cluster, most: float) -> float:
        """Return the seconds, money, or joules as Zeus weights them, of a training on nodes."""
        if self.name == TIME or not isinstance(on, Nodes):
            return seconds
        if self.name == COST:
            return seconds * on.price_per_second(on.ranks)
        return energy_cost(TrainingCost(seconds, on.watts(on.ranks)), most, self.eta)

    def describe(self, seconds: float, on: Cluster) -> str:
        """Describe a training on nodes: `41.2 h, 1,204.50`."""
        found = [_duration(seconds)]
        if self.name == COST and isinstance(on, Nodes):
            found.append(f"{seconds * on.price_per_second(on.ranks):,.2f} at these prices")
        if self.name == ENERGY and isinstance(on, Nodes):
            found.append(f"{seconds * on.watts(on.ranks) / KWH:,.4g} kWh")
        return ", ".join(found)


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
            for work in (run.unit.forward, run.unit.backward)
            for op in work.operators
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
    need = NEEDED_FIELDS.get(aim.name)
    if need is None:
        return
    said = {"price": "price = 24.5", "power": "power = 400"}[need]
    unit = {"price": "of an hour of the node", "power": "watts of a rank"}[need]
    help_ = f"write `{said}`, {unit}, into each `[[node]]` of a file: `--on cluster.toml`"
    if not isinstance(cluster, Nodes):
        title = f"`--aim {aim.name}` asks for a {need}, and `{cluster.name}` says none"
        raise Refusal.of("S109", title, helps=(help_,))
    for number, one in zip(cluster.numbers, cluster.nodes):
        if getattr(one, need) is None:
            title = f"`--aim {aim.name}`: node {number} of `{cluster.name}` says no `{need}`"
            raise Refusal.of("S109", title, helps=(help_,))


def list_choices(job: Job, aim: Aim) -> list[ResourceChoice]:
    """List all numbers of nodes of each kind (for energy also under each power limit), with each
    batch; for time all nodes.

    Raises Refusal S109 for too many.
    """
    some = [(job.cluster, job.ranks, "")]
    if isinstance(job.cluster, Nodes) and aim.name != TIME:
        some = [(one, one.ranks, text) for one, text in _chosen(job.cluster, aim.name == ENERGY)]
    found = []
    for rows, samples in aim.samples.items():
        for cluster, ranks, text in some:
            words = [text] * bool(text) + [f"{rows} rows"] * (len(aim.samples) > 1)
            each = replace(job, ranks=ranks, rows=rows, cluster=cluster)
            found.append(
                ResourceChoice(each, math.ceil(samples / rows), ", ".join(words) or "all nodes")
            )
    return found


def _chosen(nodes: Nodes, limited: bool) -> Iterator[tuple[Nodes, str]]:
    """Yield subsets of nodes, the first ones of each kind, and their descriptions."""
    kinds: dict[Node, list[int]] = {}
    for at, one in enumerate(nodes.nodes):
        kinds.setdefault(one, []).append(at)
    menus = [
        [
            (0, one),
            *(
                (k + 1, h)
                for h in (one.with_power_limits if limited else (one,))
                for k in range(len(at))
            ),
        ]
        for one, at in kinds.items()
    ]
    if (many := math.prod(map(len, menus)) - 1) > MAX_OFFERS:
        title = (
            f"{many} choices of nodes and limits are too many: at most {MAX_OFFERS} are looked at"
        )
        raise Refusal.of("S109", title, helps=("give fewer `limits`, or fewer nodes: `--gpus`",))
    for chosen in product(*menus):
        places = {p: one for (k, one), at in zip(chosen, kinds.values()) for p in at[:k]}
        if places:
            told = [
                f"{k} node{'s' * (k > 1)} of {one.device.node} {one.device.name}"
                + f" at {one.power:g} W" * (one not in kinds)
                for k, one in chosen
                if k
            ]
            order = sorted(places)
            yield nodes.select(order, [places[at] for at in order]), ", ".join(told)


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
        whole = self.job.cluster
        self.most = whole.watts(whole.ranks) if isinstance(whole, Nodes) else 0.0

    def iter_evaluated(self) -> Iterator[EvaluatedChoice]:
        """Yield bids that end within the deadline, the least worth first (lambda-DNN, Xu et al.,
        IEEE Transactions on Computers 2022)."""
        row, turn = self.profiles(Placement()), count()
        heap: list[tuple[float, int, ResourceChoice | EvaluatedChoice]] = []
        for one in self.offers:
            if (floor := one.floor(row)) <= self.aim.deadline:
                heapq.heappush(heap, (self.worth(one, floor), next(turn), one))
        while heap:
            *_, at = heapq.heappop(heap)
            if isinstance(at, EvaluatedChoice):
                yield at
                continue
            found = self.find(at.job)
            if found.best is None or found.best.priced is None:
                continue
            took = at.steps * found.best.least
            bid = EvaluatedChoice(at, found, took, self.worth(at, took))
            self.evaluated.append(bid)
            if took <= self.aim.deadline:
                heapq.heappush(heap, (bid.worth, next(turn), bid))

    def worth(self, offer: ResourceChoice, seconds: float) -> float:
        """Weight the seconds of a training on an offer's nodes."""
        return self.aim.worth(seconds, offer.job.cluster, self.most)

    def describe(self, bid: EvaluatedChoice) -> RejectedSetting:
        """Describe a bid that was not chosen."""
        said = self.aim.describe(bid.seconds, bid.offer.job.cluster)
        late = ": too late" if bid.seconds > self.aim.deadline else ""
        return RejectedSetting(bid.offer.text, bid.found.best, said + late)


def tune_for_aim(
    profiles: Profiles, job: Job, aim: Aim, find: FindSetting
) -> tuple[Job, TuningResult]:
    """Return the cheapest bid whose simulated steps end within the deadline, and its job.

    Without such a bid nothing is written: the result lists the quickest bids as rejected.  Raises
    Refusal S109 for a cluster without the figure that the aim needs, and what `tuned` raises.
    """
    auction = ChoiceSearch(profiles, job, aim, lambda job: find(profiles, job))
    best: tuple[float, Job, TuningResult] | None = None
    for tries, bid in enumerate(auction.iter_evaluated(), 1):
        if best is not None and bid.worth >= best[0]:
            break
        made = _tuned_bid(profiles, auction, bid, find)
        took = math.inf if made.written is None else bid.offer.steps * made.written.seconds
        worth = auction.worth(bid.offer, took)
        if took <= aim.deadline and (best is None or worth < best[0]):
            best = worth, bid.offer.job, made
        if tries == MAX_SEARCHES:
            break
    if best is not None:
        return best[1:]
    late = [auction.describe(bid) for bid in sorted(auction.evaluated, key=lambda bid: bid.seconds)]
    if not late:
        row = profiles(Placement())
        floor, text = min((offer.floor(row), offer.text) for offer in auction.offers)
        why = f"{_duration(floor)} at least, all operations at full speed: too late"
        late = [RejectedSetting(text, None, why)]
    return job, TuningResult(SearchResult(None, 0.0, Counts(), tuple(late), done=True), None, job)


def _tuned_bid(
    profiles: Profiles, auction: ChoiceSearch, bid: EvaluatedChoice, find: FindSetting
) -> TuningResult:
    """Write and simulate the schedule of a bid, with the other bids as reasons."""
    offer, aim = bid.offer, auction.aim
    others = sorted((one for one in auction.evaluated if one is not bid), key=lambda one: one.worth)
    rejected = (*map(auction.describe, others[: MAX_REASONS - 1]), *bid.found.rejected)
    first = replace(bid.found, rejected=rejected)

    def find_first(profiles: Profiles, job: Job) -> SearchResult:
        return first if job is offer.job else find(profiles, job)

    def say(took: float) -> Iterator[str]:
        rows = f"{offer.steps:,} steps of {offer.job.rows} rows"
        yield f"Training: {rows} take {aim.describe(offer.steps * took, offer.job.cluster)}."
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


def energy_cost(run: TrainingCost, most: float, eta: float = 0.5) -> float:
    """Cost of a run in joules: eta of its energy, and 1 - eta of its time at `most` watts.

    Zeus (You et al., NSDI 2023).
    """
    return eta * run.seconds * run.watts + (1 - eta) * run.seconds * most
