"""How two locks differ, name by name, in lines that a reviewer can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from schedlang.passes.locking.lock import SECTIONS, Lock, Section
from schedlang.passes.shrinking.ranges import gathered


@dataclass(frozen=True)
class Change:
    """One fact that is not what it was, for all names of which the same is to be said.

    sign   `+` new, `-` gone, `~` changed
    """

    sign: str
    section: str
    names: tuple[str, ...]  # with ranges
    old: tuple[str, ...]
    new: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """As text, one line for each group of names."""
        gone = [text for text in self.old if text not in self.new]
        come = [text for text in self.new if text not in self.old]
        if sorted(self.old) == sorted(self.new):  # the same in another order, or another count
            gone, come = list(self.old), list(self.new)
        said = " -> ".join(", ".join(texts) for texts in (gone, come) if texts)
        if not gone or not come:
            said = f"{'now also' if come and self.old else ''} {said}".strip()
            said = f"no longer {said}" if gone and self.new else said
        for name in self.names:
            yield f"{self.sign} {self.section}  {name}  {said}"

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return {"sign": self.sign, "section": self.section, "names": list(self.names),
                "old": list(self.old), "new": list(self.new)}  # fmt: skip


def changes(old: Lock, new: Lock) -> list[Change]:
    """What is not the same; versions of packages are left out.  Empty if the locks agree."""
    found: list[Change] = []
    for section in SECTIONS:
        found += _section(section, old.sections.get(section, {}), new.sections.get(section, {}))
    return found


def versions(old: Lock, new: Lock) -> list[str]:
    """The packages whose versions differ, in words."""
    was, now = dict(old.made), dict(new.made)
    return [
        f"{name} {was.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    ]


def _section(section: str, old: Section, new: Section) -> Iterator[Change]:
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name in [*old, *(name for name in new if name not in old)]:
        pair = old.get(name, ()), new.get(name, ())
        if pair[0] != pair[1]:
            alike.setdefault(pair, []).append(name)
    for (was, now), names in alike.items():
        sign = "~" if was and now else "-" if was else "+"
        yield Change(sign, section, tuple(gathered(names)), was, now)
