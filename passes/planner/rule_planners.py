"""Planners that are rules: guides and papers that say which settings to try first.

Has the facts of a job that rules need, the rule engine (the first setting that fits), and the
rules of PTD-P, of two guides, and of Parallelization Layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from schedlang.passes.planner.values import Placement, Setting

Times = Callable[[int], tuple[float, float]]  # rows of a microbatch -> seconds forward, backward


@dataclass(frozen=True)
class JobFacts:
    """Facts of a job for rules.

    needs         bytes of the fullest rank under a setting
    state         bytes of the model's full state on one device; `largest` of one layer
    layers        that a pipeline may split between; `heads` that tensor parallelism must divide
    rows          of the batch of a step
    fast_network  whether links between nodes are as fast as links inside of nodes
    """

    ranks: int
    node: int
    memory: float
    needs: Callable[[Setting], float]
    state: float
    layers: int
    heads: int
    rows: int
    largest: float = 0.0
    fast_network: bool = False
    times: Times = lambda rows: (1.0 * rows, 2.0 * rows)

    def setting(self, tp: int = 1, pp: int = 1, rows: int = 1, zero: int = 0) -> Setting:
        """Give the remaining ranks to replicas, with microbatches of `rows` rows."""
        dp = self.ranks // (tp * pp)
        micro = self.rows // (dp * rows)
        return Setting(Placement(rows, tp, tp > 1), dp, pp, micro, zero=zero)

    def divides(self, setting: Setting) -> bool:
        """Return whether ranks and rows divide as the setting says."""
        used = setting.dp * setting.micro * setting.placement.rows
        return setting.ranks == self.ranks and used == self.rows and setting.micro > 0


@dataclass(frozen=True)
class Rule:
    """One line of a guide: its condition, the settings to try, and the reason."""

    when: str
    holds: Callable[[JobFacts], bool]
    settings: Callable[[JobFacts], Iterator[Setting]]
    why: str


@dataclass(frozen=True)
class RulePlanner:
    """A planner that is a table of rules.

    paper   authors and venue; `omits` what this implementation leaves out
    counts  bytes of the fullest rank, as the guide counts; `margin` share of memory they may fill
    """

    paper: str
    omits: str
    rules: Sequence[Rule]
    counts: Callable[[JobFacts, Setting], float] = lambda case, setting: case.needs(setting)
    margin: float = 1.0

    def plan(
        self, case: JobFacts, is_legal: Callable[[Setting], bool] = lambda setting: True
    ) -> tuple[Setting, Rule] | None:
        """Return the first legal setting that fits, and its rule; None where none does."""
        for rule in self.rules:
            if rule.holds(case):
                for setting in rule.settings(case):
                    room = self.margin * case.memory
                    fits = case.divides(setting) and is_legal(setting)
                    if fits and self.counts(case, setting) <= room:
                        return setting, rule
        return None


def _divisors(number: int, limit: float = inf) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0 and k <= limit]


def _tp_degrees(case: JobFacts) -> list[int]:
    """Degrees of tensor parallelism that divide the heads and stay inside a node."""
    return [k for k in _divisors(case.heads, case.node) if case.ranks % k == 0]


def _pipelines(case: JobFacts, tp: int = 1) -> list[int]:
    return [k for k in _divisors(case.layers) if case.ranks % (tp * k) == 0]


def _fits_one(case: JobFacts) -> bool:
    return case.needs(case.setting()) <= case.memory


def _replicated(case: JobFacts) -> Iterator[Setting]:
    yield case.setting()


def _sharded(case: JobFacts) -> Iterator[Setting]:
    yield from (case.setting(zero=stage) for stage in (1, 2, 3))


def _split_thrice(case: JobFacts) -> Iterator[Setting]:
    """Split layers, tensors and rows; tensors only inside nodes, and as little as possible."""
    for tp, pp in _by_degree(case):
        yield case.setting(tp, pp)


def _split_and_sharded(case: JobFacts) -> Iterator[Setting]:
    for tp, pp in _by_degree(case):
        yield case.setting(tp, pp, zero=1)


def _by_degree(case: JobFacts) -> list[tuple[int, int]]:
    """Degrees, smallest product first, then the smallest degree of tensor parallelism."""
    pairs = [(tp, pp) for tp in _tp_degrees(case) for pp in _pipelines(case, tp)]
    return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0]))


def _megatron(case: JobFacts) -> Iterator[Setting]:
    """Split tensors over a node first, then layers over nodes; rows of a microbatch by the
    formula."""
    inside = [tp for tp in _tp_degrees(case) if tp & (tp - 1) == 0]
    shapes = [(tp, 1) for tp in inside]
    shapes += [(inside[-1], pp) for pp in _pipelines(case, inside[-1]) if pp > 1]
    for tp, pp in shapes:
        yield case.setting(tp, pp, _rows(case, tp, pp))


def _rows(case: JobFacts, tp: int, pp: int) -> int:
    """Rows b of a microbatch that minimise (b'/b + p - 1) (tf(b) + tb(b)), with b' rows of a
    replica."""
    replica_rows = case.rows // (case.ranks // (tp * pp))
    fit = [b for b in _divisors(replica_rows) if case.needs(case.setting(tp, pp, b)) <= case.memory]
    return min(fit or [1], key=lambda b: (replica_rows / b + pp - 1) * sum(case.times(b)))


def _pipelined(case: JobFacts) -> Iterator[Setting]:
    yield from (case.setting(pp=pp) for pp in _pipelines(case) if pp <= case.node)


def _tensors(case: JobFacts) -> Iterator[Setting]:
    yield from (case.setting(tp) for tp in _tp_degrees(case))


def _node_alternatives(case: JobFacts) -> Iterator[Setting]:
    """The alternatives for one node, in the order of the guide."""
    yield from _pipelined(case)
    yield from _sharded(case)
    yield from _tensors(case)


def _always(case: JobFacts) -> bool:
    return True


RULE_PLANNERS = {
    "ptd-p": RulePlanner(
        "PTD-P, Megatron-LM (Narayanan et al., SC 2021), its takeaways 1 to 3",
        "activations, but in the rows of a microbatch: the state alone may fill 0.6 of the memory,"
        " which gives all ten rows of its Table 1; recomputation; interleaved stages",
        (
            Rule(
                "always",
                _always,
                _megatron,
                "tensors within a node, layers over nodes, copies of what fits then",
            ),
        ),
        counts=lambda case, setting: case.state / setting.placement.tp / setting.pp,
        margin=0.6,
    ),
    "pytorch": RulePlanner(
        "PyTorch Distributed Overview, `Applying Parallelism To Scale Your Model`",
        "time altogether; where FSDP reaches its limits: here where it does not fit, or a rank has"
        " no row",
        (
            Rule("the model fits on one device", _fits_one, _replicated, "DDP scales up easily"),
            Rule(
                "each rank has a row",
                lambda case: case.rows >= case.ranks,
                lambda case: iter((case.setting(zero=3),)),
                "FSDP2 for a model that does not fit on one device",
            ),
            Rule("FSDP2 has reached its limits", _always, _split_thrice, "TP, PP or both"),
        ),
    ),
    "huggingface": RulePlanner(
        "Hugging Face, Efficient Training on Multiple GPUs, `Scalability strategy`",
        "time altogether: where it says to try several, the first that fits is taken",
        (
            Rule("case 1: fits on one device", _fits_one, _replicated, "DDP, or ZeRO"),
            Rule(
                "case 3: the largest layer does not fit on one device",
                lambda case: case.largest > case.memory and case.ranks <= case.node,
                _tensors,
                "stages alone cannot hold the layer",
            ),
            Rule(
                "case 2: does not fit on one device, one node",
                lambda case: case.ranks <= case.node,
                _node_alternatives,
                "PP, ZeRO or TP: as fast as each other where links are fast, else PP is fastest",
            ),
            Rule(
                "several nodes, fast links between them",
                lambda case: case.fast_network,
                _sharded,
                "ZeRO needs close to no change of the model",
            ),
            Rule(
                "several nodes, fast links between them, and ZeRO does not fit",
                lambda case: case.fast_network,
                _split_thrice,
                "PP with TP and DP sends less",
            ),
            Rule(
                "several nodes, slow links between them",
                _always,
                _split_and_sharded,
                "DP with PP, TP and ZeRO",
            ),
        ),
    ),
    "layouts": RulePlanner(
        "Parallelization Layouts (Hagemann et al., 2023), its recommendations",
        "kernels, which it chooses too; sequence parallelism is on wherever tensors are split",
        (
            Rule(
                "always",
                _always,
                _split_and_sharded,
                "microbatches of one row, nothing computed again, the least that fits of tensor and"
                " pipeline parallelism, and rather pipelines",
            ),
        ),
    ),
}
