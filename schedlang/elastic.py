"""Elastic runs: choose the settings of a schedule's knobs for the ranks that a job has now.

A job that has lost or gained ranks restarts with the current ones. Among the settings of one file
for this number of ranks, the planner chooses the one with the shortest step: knobs that size the
mesh, and knobs that split a batch. The computation stays the same: the batch of a step, what is
trained, what may be given up.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import (
    Label,
    Refusal,
)
from schedlang.diagnostics.job_refusals import FRESH_STORE
from schedlang.diagnostics.source import python_span
from schedlang.language import nodes as n
from schedlang.language.knob import refuse_unknown_settings
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings
from schedlang.schedule import Schedule

if TYPE_CHECKING:
    from schedlang.ir.plan import Plan
    from schedlang.language.knob import Knob
    from schedlang.passes.autoshard.knob_tuning import PricedPlan
    from schedlang.passes.simulate.machine import Cluster
    from schedlang.trainer import Trainer

ARRIVAL_TIMEOUT = (
    30.0  # seconds in which all ranks must arrive: a node may have died since it was counted
)
_CHECK_INTERVAL = 3.0  # seconds between two checks of the other ranks
_MAX_REASONS = 4  # reasons shown for refused settings
_MICRO = "micro"  # the argument for the number of microbatches
KnobValues = dict[str, Any]  # values of knobs, by name
Setting = dict[str, Any]  # `ranks`, and the `knobs` for them: plain data


class Rendezvous:
    """The ranks of this round of a job before they join a process group, connected by the job's
    store.

    Simulations of steps require that no process group exists yet: planning comes before joining.
    """

    def __init__(self, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Wait until all ranks have arrived, for the `wait` of `build`, at least 30 s.

        Raises Refusal S651 if a rank does not arrive, S654 if the launcher's variables cannot be
        used. Raises S695 if ranks have joined already, or under a torchrun that restarts and holds
        one store for all rounds: nodes that stay keep using the first node's store, which may be
        gone, and find addresses of lost ranks in it.
        """
        from schedlang.runtime.comm import agreement, world

        if world.is_joined():
            title = "an elastic run chooses its mesh before the ranks join their job"
            raise _refusal(title, "", "leave `init_process_group` to the trainer")
        if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            agreement.read_job_variables()  # refuses what no job has
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._turn, self._room = 0, f"schedlang/elastic/{agreement.round_name()}/{self.ranks}"
        keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if keeps_store and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            title = "this torchrun keeps one store for all rounds of the job"
            note = "ranks that restart would read entries of the round before"
            help_ = f"give each round its own store: `{FRESH_STORE}=1 torchrun ...`"
            raise _refusal(title, note, help_)
        self._wait = max(ARRIVAL_TIMEOUT, options.get("wait", 0.0))
        self._store = agreement.rendezvous(self._wait)
        if self._store is None and self.ranks > 1:
            title = f"{self.ranks} ranks have no store of torchrun"
            raise _refusal(title, "", "start them by `torchrun`: `schedlang launch FILE`")
        self._done = threading.Event()
        if self._store is not None:
            beats = threading.Thread(target=self._beat, args=(self._store.clone(),), daemon=True)
            beats.start()

    def from_first_rank(self, value: Any) -> Any:
        """Return the first rank's value, on all ranks."""
        return self.gather_values(value)[0]

    def gather_values(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on all ranks.

        Raises Refusal S651 on the first rank if a rank has sent no value and no heartbeat for 30
        seconds.
        """
        from schedlang.runtime.comm.agreement import poll_until, refuse_missing

        if self._store is None:
            return [value]
        self._turn += 1
        prefix = f"{self._room}/{self._turn}"
        keys = [f"{prefix}/{rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], pickle.dumps(value))
        self._store.add(f"{prefix}/count", 1)

        def all_sent() -> bool:
            return bool(self._store.add(f"{prefix}/count", 0) >= self.ranks)

        heartbeats: dict[int, tuple[int, float]] = {}  # number of a rank's, and the last one's time
        while not poll_until(all_sent, _CHECK_INTERVAL):
            before, now = heartbeats, time.monotonic()
            heartbeats = {rank: (beats, now) for rank, beats in self._count_beats(keys).items()}
            for rank in heartbeats.keys() & before.keys():
                if before[rank][0] == heartbeats[rank][0]:
                    heartbeats[rank] = before[rank]
            lost = [
                rank
                for rank, (_, since) in heartbeats.items()
                if now - since > ARRIVAL_TIMEOUT - 2 * _CHECK_INTERVAL
            ]
            if lost:  # the other ranks end with the store, which this rank holds
                refuse_missing(lost, self.ranks, ARRIVAL_TIMEOUT)
        return [pickle.loads(pickled) for pickled in self._store.multi_get(keys)]

    def _count_beats(self, keys: Sequence[str]) -> dict[int, int]:
        """Return the heartbeats of each rank that has not sent its value yet."""
        if self.rank:
            return {}
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return {rank: self._store.add(f"{self._room}/beats/{rank}", 0) for rank in missing}

    def _beat(self, store: Any) -> None:
        """Send heartbeats until this rank joins, or the store is gone."""
        with suppress(RuntimeError):
            while not self._done.wait(1.0):
                store.add(f"{self._room}/beats/{self.rank}", 1)

    def fit_schedule(
        self,
        trainer: Trainer,
        schedule: Schedule,
        batch: Mapping[str, Any],
        saved: Mapping[str, Any] | None,
    ) -> tuple[Schedule, Setting, KnobValues]:
        """Return the schedule under the best setting for the current ranks, and join them.

        Also returns the setting, and options of `build`: dropout draws on one rank as on several,
        since draws from the process's generator would change the order in which a loader shuffles.

        told   the run's state in a checkpoint: with the same number of ranks, its setting stays

        All ranks together. Raises Refusal S695 if no setting fits the number of ranks.
        """
        from schedlang.runtime.comm.agreement import join_world

        elastic = [trainer.elastic] if isinstance(trainer.elastic, str) else trainer.elastic
        names = () if elastic is True else tuple(elastic or ())
        search = SettingSearch(
            schedule, names, self, batch, trainer.loss, trainer.build.get("weight")
        )
        same = saved is not None and saved["schedule"] == schedule.to_sched()
        before = saved.get("setting") if saved is not None and same else None
        if before is None or before["ranks"] != self.ranks:
            before = {"ranks": self.ranks, "knobs": search.best()}
        self._done.set()
        guard = threading.Timer(self._wait, _exit_alone, (self._wait,))
        guard.daemon = True
        guard.start()
        try:
            join_world(met=self._store)
        finally:
            guard.cancel()
        drawing = {} if {"dropout", "seed"} & trainer.build.keys() else {"dropout": "native"}
        return search.schedule_with(before["knobs"]), before, drawing


def _exit_alone(seconds: float) -> None:
    """End this rank, which waits in torch for a rank that died after all had arrived."""
    title = f"another rank has not joined the job within {seconds:g} s, and was there before"
    print(Refusal.of("S651", title), file=sys.stderr, flush=True)
    os._exit(1)


class JoinedJob:
    """The ranks of a job whose number matches the schedule; has the methods of a `Rendezvous`."""

    def __init__(
        self, schedule: Schedule, options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Join the job, within the `wait` of `build`, or ten minutes.

        Raises Refusal S651 if a rank does not come, S205 or S607 if the ranks are not those of the
        mesh.
        """
        from schedlang.passes.lower.build import join_job
        from schedlang.runtime.comm.agreement import TIMEOUT

        join_job(schedule.plan(), wait=options.get("wait", TIMEOUT.total_seconds()))

    def from_first_rank(self, value: Any) -> Any:
        """Return the first rank's value, on all ranks."""
        from schedlang.runtime.comm import world

        return world.broadcast_object(0, value)

    def fit_schedule(
        self, _run: Trainer, schedule: Schedule, *_: Any
    ) -> tuple[Schedule, Setting | None, KnobValues]:
        """Return the schedule unchanged."""
        return schedule, None, {}


def _refusal(title: str, note: str, help_: str) -> Refusal:
    notes = (note,) if note else ()
    return Refusal.of("S695", title, Label(python_span()), notes=notes, helps=(help_,))


@dataclass(frozen=True)
class SettingSearch:
    """A search for the setting of a schedule for a number of ranks; all ranks of the job together.

    given     the schedule, under any setting
    names     the knobs that may change; (): those that size the mesh, and those of `micro=`
    meeting   the ranks, which price settings together
    batch     a batch of a whole step
    """

    given: Schedule
    names: Sequence[str]
    meeting: Rendezvous
    batch: Mapping[str, Any]
    loss: Callable[..., Any] | None = None
    weight: Callable[..., Any] | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks of the job."""
        return self.meeting.ranks

    def schedule_with(self, knobs: Mapping[str, Any]) -> Schedule:
        """Return the schedule under a setting, for these ranks."""
        model = self.given._facts.base.model
        return Schedule(model, self.given.tree, self._settings(knobs))

    def _settings(self, knobs: Mapping[str, Any]) -> Settings:
        return Settings({**self.given._settings.knobs, **knobs}, {}, self.ranks)

    def best(self) -> KnobValues:
        """Return the knobs with the shortest step.

        Candidates make a mesh of all ranks, train the same parameters, give up the same properties
        as the given schedule, and fit into memory; each rank prices some of them. Raises Refusal
        S695 if there is none, with the objections to each.
        """
        candidates, refused = self._candidates()
        if len(candidates) == 1:
            return candidates[0]
        from schedlang.passes.autoshard.knob_tuning import rank_fitting

        cluster = _cluster(self.given.tree, self.meeting)
        priced = self._price(candidates, cluster)
        if best := rank_fitting(priced, cluster.memory):
            return dict(best[0].knobs)
        raise self._no_setting([*refused, *_objections(priced, cluster.memory)])

    # -- candidates -------------------------------------------------------------------------------

    def _candidates(self) -> tuple[list[KnobValues], list[str]]:
        """Return the settings for these ranks, and why others are excluded."""
        from schedlang.passes.autoshard.knob_tuning import format_setting, settings_of

        tree, fixed = self.given.tree, dict(self.given._settings.knobs)
        state = expand(tree, None, Settings(fixed))
        knobs, sizing = state.knobs, {*state.axis_knobs.values(), *_names_in(_mesh(tree))}
        free_knobs = self._free_knobs(knobs, sizing)
        kept = {name: knob.value for name, knob in knobs.items() if name not in free_knobs}
        sizes = {name: _divisor_sizes(self.ranks, knobs[name]) for name in free_knobs & sizing}
        candidates, refused = [], []
        family = _family_key(self.given.plan())
        for setting in settings_of(
            tree, kept, {name: values for name, values in sizes.items() if values}
        ):
            if reason := self._objection(setting, family):
                refused.append(f"{format_setting(setting)}: {reason}" if setting else reason)
            else:
                candidates.append(setting)
        if not candidates:
            raise self._no_setting(refused)
        return candidates, refused

    def _free_knobs(self, knobs: Mapping[str, Knob], sizing: set[str]) -> set[str]:
        """Return the knobs that may change. Raises Refusal S106 for an unknown one."""
        refuse_unknown_settings(self.names, knobs)
        if self.names:
            return set(self.names)
        nodes = n.walk(self.given.tree)
        cuts = (node for node in nodes if isinstance(node, n.Keyword) and node.name == _MICRO)
        return (sizing | _names_in(*cuts)) & knobs.keys()

    def _objection(self, knobs: KnobValues, family: object) -> str:
        """Return what is against a setting before it is priced; "" if nothing is."""
        settings = self._settings(knobs)
        try:  # without the model, which is fast and excludes most
            mesh = expand(self.given.tree, None, settings).mesh
            if (size := mesh.world if mesh is not None else 1) != self.ranks:
                return f"its mesh has {size} ranks"
            plan = expand(self.given.tree, self.given._facts.base, settings).plan
        except Refusal as refusal:
            return refusal.diagnostics[0].title
        assert plan is not None
        return (
            ""
            if _family_key(plan) == family
            else "it trains other parameters, or gives up other things"
        )

    def _price(self, candidates: Sequence[KnobValues], cluster: Cluster) -> list[PricedPlan]:
        """Price every setting, each on one of the ranks."""
        from schedlang.passes.autoshard.knob_tuning import Job, price_settings

        facts = self.given._facts.base
        job = Job(facts, self.batch, self.loss, self.weight, cluster, self.ranks)
        rank, size = self.meeting.rank, self.ranks
        own_knobs = [self._settings(setting).knobs for setting in candidates[rank::size]]
        gathered = self.meeting.gather_values(list(price_settings(job, self.given.tree, own_knobs)))
        priced = (gathered[index % size][index // size] for index in range(len(candidates)))
        return [replace(plan, knobs=setting) for plan, setting in zip(priced, candidates)]

    def _no_setting(self, reasons: Sequence[str]) -> Refusal:
        plural = "s" * (self.ranks > 1)
        title = f"no setting of the knobs gives a mesh of {self.ranks} rank{plural}"
        over = len(reasons) - _MAX_REASONS
        suffix = (f"and {over} more",) if over > 0 else ()
        rest = "_" in _names_in(_mesh(self.given.tree))
        helps = (
            "let knobs size the axes beside `_`: `knob tp: int = 2 in [1, 2]`, `mesh(dp=_, tp=tp)`"
            if rest
            else "let an axis take all available ranks: `mesh(dp=_)`",
            "or start torchrun with other numbers of nodes only: `--nnodes 2:4`",
        )
        return Refusal.of("S695", title, notes=(*reasons[:_MAX_REASONS], *suffix), helps=helps)


def _mesh(tree: n.File) -> n.Mesh | None:
    return next((item for item in tree.items if isinstance(item, n.Mesh)), None)


def _names_in(*roots: n.Node | None) -> set[str]:
    """Return the names in these nodes of a schedule; knobs are among them."""
    return {node.text for part in roots for node in n.walk(part) if isinstance(node, n.Name)}


def _divisor_sizes(ranks: int, knob: Knob) -> list[Any]:
    """Return the sizes of an axis that divide the ranks; [] if the knob's domain lists its
    values."""
    if knob.type != "int" or knob.choices is not None:
        return []
    return [size for size in range(1, ranks + 1) if ranks % size == 0 and knob.allows(size)]


def _family_key(plan: Plan) -> object:
    """Return what settings of a family share: the trained parameters, and the properties given
    up."""
    parameters = plan.model.model.named_parameters()
    trained = {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in parameters}
    return trained, plan.gives_up


def _objections(priced: Sequence[PricedPlan], memory: int) -> Iterator[str]:
    """Yield what is against settings that were priced."""
    from schedlang.diagnostics.tables import format_bytes
    from schedlang.passes.autoshard.knob_tuning import format_setting

    for plan in priced:
        reason = f"needs {format_bytes(plan.peak)} of {format_bytes(memory)}"
        if plan.refusal is not None:
            reason = ", ".join((plan.refusal.title, *plan.refusal.notes[:1]))
        yield f"{format_setting(plan.knobs)}: {reason}"


# -- the devices -----------------------------------------------------------------------------------


def _cluster(tree: n.File, meeting: Rendezvous) -> Cluster:
    """Return the cluster of the mesh's `on`, else of the present devices, with the smallest
    memory."""
    from schedlang.passes.simulate.machine import CLUSTERS, GIB, Cluster, cluster_of
    from schedlang.runtime import device as devices

    device = devices.local_device()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    name, memory = devices.device_name(device).lower(), devices.total_bytes(device)
    if devices.on_host(device) and memory is not None:
        memory //= local  # its ranks share the memory
    base = cluster_of(tree)[0]
    base = base.slowest if base is not None else None  # ranks may change: take the slowest node
    base = base or next((machine for key, machine in CLUSTERS.items() if key in name), None)
    # for unknown devices only proportions matter: a core, its memory, a network
    base = base or Cluster(name or "ranks", 1e11, 2e10, 1e10, 1e9, local, GIB)
    smallest = min(meeting.gather_values(memory or base.memory))
    return replace(base, node=local, memory=smallest)
