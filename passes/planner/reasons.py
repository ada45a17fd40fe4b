"""Reasons, in words, why a setting was rejected: its parts compared with those of the best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from schedlang.diagnostics.tables import format_bytes
from schedlang.ir.limits import Value, format_value
from schedlang.passes.planner.evaluation import EvaluatedSetting
from schedlang.passes.planner.limits import setting_values
from schedlang.passes.planner.values import Placement, Price, Setting

# names in which a rejected setting differs from the best
KINDS = (
    *("tp", "pp", "cp", "ep", "order", "chunks", "slices", "zero", "rows", "sequence", "offload"),
    "axes",
)
ACTIVITIES = {  # parts of a step, as verbs of a rank
    "computing": "computes",
    "idle": "waits in the pipeline",
    "gradients": "sums gradients",
    "optimizer": "updates parameters",
    "host": "copies to the host and back",
}


@dataclass(frozen=True)
class RejectedSetting:
    """A setting compared with the best one.

    kind    the value in which the setting differs: `tp = 4`
    filled  None where no setting with this value exists
    reason  words with figures
    """

    kind: str
    filled: EvaluatedSetting | None
    reason: str


@dataclass(frozen=True)
class BestByKind:
    """The quickest setting of each value of each name: of settings that fit, and of those too
    large."""

    fit: dict[tuple[str, Value], EvaluatedSetting] = field(default_factory=dict)
    large: dict[tuple[str, Value], EvaluatedSetting] = field(default_factory=dict)

    def note(self, evaluated: EvaluatedSetting) -> None:
        """Record a setting where it is the quickest of one of its kinds."""
        best_of = self.large if evaluated.priced is None else self.fit
        for kind in setting_values(evaluated.setting).items():
            if kind not in best_of or evaluated.least < best_of[kind].least:
                best_of[kind] = evaluated

    def list_rejected(
        self, best: EvaluatedSetting | None, memory: float
    ) -> tuple[RejectedSetting, ...]:
        """List the best of each other kind with the reason, the quickest first.

        The quickest setting that does not fit comes before them where it would be quicker than the
        best.  Where nothing fits, the settings that need the fewest bytes come first.
        """
        if best is None:
            nearest = sorted(self.large.items(), key=lambda item: item[1].needs)
            return tuple(_distinct(best, nearest, memory))
        values = setting_values(best.setting)
        large, fit = (
            sorted(
                ((kind, entry) for kind, entry in best_of.items() if values[kind[0]] != kind[1]),
                key=lambda item: item[1].least,
            )
            for best_of in (self.large, self.fit)
        )
        large = [(kind, entry) for kind, entry in large if entry.least < best.least]
        fit = [(kind, entry) for kind, entry in fit if kind[0] in KINDS]
        return (*_distinct(best, large[:1], memory), *_distinct(best, fit, memory))


def _distinct(
    best: EvaluatedSetting | None,
    items: Iterable[tuple[tuple[str, Value], EvaluatedSetting]],
    memory: float,
) -> Iterable[RejectedSetting]:
    """Yield no name and no setting twice, and no name whose value follows from other names."""
    names, settings = {"dp", "micro"}, set[Setting]()
    for (name, value), evaluated in items:
        if name not in names and evaluated.setting not in settings:
            names.add(name)
            settings.add(evaluated.setting)
            yield compare_with_best(best, evaluated, memory, f"{name} = {format_value(value)}")


def compare_with_best(
    best: EvaluatedSetting | None, other: EvaluatedSetting | None, memory: float, kind: str
) -> RejectedSetting:
    """Compare one setting with the best: why it is not the best."""
    if other is None:
        return RejectedSetting(kind, None, "there is no such setting")
    if other.priced is None:
        room = memory if other.room is None else other.room
        verb = "needs" if other.setting.cuts else "needs at least"  # a bound, without stages
        return RejectedSetting(
            kind, other, f"{verb} {format_bytes(round(other.needs))} of {format_bytes(round(room))}"
        )
    if best is None or best.priced is None:
        return RejectedSetting(kind, other, "")
    return RejectedSetting(kind, other, describe_slowdown(best.priced, other.priced))


def describe_smallest(tried: EvaluatedSetting, memory: float) -> RejectedSetting:
    """Describe the candidate that needs the fewest bytes, where none fits and none was evaluated:
    the values in which it differs from one rank."""
    base = setting_values(Setting(Placement(), zero=0)) | {"axes": "-".join(tried.setting.axes)}
    differing = {
        name: value for name, value in setting_values(tried.setting).items() if value != base[name]
    }
    text = ", ".join(f"{name} = {format_value(value)}" for name, value in differing.items())
    rejected = compare_with_best(None, tried, memory, "what needs least")
    return replace(rejected, reason=f"{rejected.reason}: {text or 'one rank'}")


def describe_slowdown(best: Price, price: Price) -> str:
    """Describe a slowdown: `12 % slower: tp sends 0.8 s more`."""
    share = price.seconds / best.seconds - 1
    if abs(share) < 5e-4:
        return "as quick"
    percent = f"{abs(share):.1%}" if abs(share) < 1 else f"{abs(share):.0%}"
    sign = 1 if share > 0 else -1
    text = f"{percent} {'slower' if share > 0 else 'quicker'}"
    slower_by = {
        cause: sign * (price.parts.get(cause, 0.0) - best.parts.get(cause, 0.0))
        for cause in sorted({*best.parts, *price.parts})
    }
    cause = max(slower_by, key=slower_by.__getitem__, default="")
    if slower_by.get(cause, 0.0) <= 0:
        return text
    activity = ACTIVITIES.get(cause, f"{cause} sends")
    return f"{text}: {activity} {slower_by[cause]:.3g} s {'more' if share > 0 else 'less'}"
