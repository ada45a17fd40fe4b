"""Locks: what a schedule makes of a model, as a text file, and the difference of two locks.

* Names with ranges: `h.0..3.mlp`, and back.
* Contents: the structure of a model, and what its schedule makes of each name.
* The file: TOML, one fact for each line, sorted, equal on any machine.
* Differences, name by name, in lines that a reviewer can read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from schedlang import __version__
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.elaborate.state import arguments_text

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.plan import Plan
    from schedlang.passes.simulate.account import Account


_MOST, _DIGITS = 1_000_000, 19  # names of one range; digits of a number
MODEL_ROOT = "."  # the model itself, whose own name is empty
Numbers = tuple[int, ...]
Range = tuple[int, int]


def compress_names(names: Iterable[str]) -> list[str]:
    """Return the fewest names with ranges (`0..3`, both included) for these names, sorted."""
    by_shape: dict[str, set[Numbers]] = {}
    names_left = set(names)
    root = sorted(names_left & {MODEL_ROOT})
    for name in names_left - {MODEL_ROOT}:
        numbers = tuple(int(part) for part in name.split(".") if _is_number(part))
        by_shape.setdefault(_number_free(name), set()).add(numbers)
    boxes = [
        (shape, box)
        for shape, numbers_set in by_shape.items()
        for box in _range_products(numbers_set)
    ]
    return root + [_format_name(shape, box) for shape, box in sorted(boxes)]


def expand_names(name: str) -> Iterator[str]:
    """Return the names that a name with ranges stands for, in order; ValueError if far too many."""
    if name == MODEL_ROOT:
        return iter([name])
    choices: list[list[str]] = []
    many = 1
    parts = name.split(".")
    while parts:
        part = parts.pop(0)
        # no module is called "", so an empty part is the middle of a range
        if len(parts) > 1 and parts[0] == "" and _is_number(part) and _is_number(parts[1]):
            many *= max(1, int(parts[1]) - int(part) + 1)
            if many > _MOST:
                raise ValueError(f"stands for more than {_MOST} names")
            choices.append([str(n) for n in range(int(part), int(parts[1]) + 1)])
            del parts[:2]
        else:
            choices.append([part])
    return (".".join(parts_chosen) for parts_chosen in itertools.product(*choices))


def _is_number(part: str) -> bool:
    """Return whether a part of a name is a number without leading zeros."""
    few = len(part) < _DIGITS and part.isascii() and part.isdigit()
    return few and str(int(part)) == part


def _number_free(name: str) -> str:
    """Return the name with all such numbers removed; names of modules have no empty part."""
    return ".".join("" if _is_number(part) else part for part in name.split("."))


def _range_products(numbers_set: set[Numbers]) -> list[tuple[Range, ...]]:
    """Return a set of tuples of numbers as products of ranges."""
    if numbers_set == {()}:
        return [()]
    rests: dict[int, frozenset[Numbers]] = {}
    for first in sorted({numbers[0] for numbers in numbers_set}):
        rests[first] = frozenset(n[1:] for n in numbers_set if n[0] == first)
    runs: list[tuple[int, int, frozenset[Numbers]]] = []
    for first, rest in rests.items():
        if runs and runs[-1][1] == first - 1 and runs[-1][2] == rest:
            runs[-1] = (runs[-1][0], first, rest)
        else:
            runs.append((first, first, rest))
    return [((low, high), *box) for low, high, rest in runs for box in _range_products(set(rest))]


def _format_name(shape: str, box: tuple[Range, ...]) -> str:
    ranges = iter(box)
    parts = []
    for part in shape.split("."):
        if part:
            parts.append(part)
            continue
        low, high = next(ranges)
        parts.append(str(low) if low == high else f"{low}..{high}")
    return ".".join(parts)


Section = Mapping[str, tuple[str, ...]]
SECTIONS = {  # in the order of the file; comments of the sections
    "schedule": "decisions, mesh and order",
    "modules": "classes, and what they say of themselves",
    "parameters": "dtype and shape",
    "buffers": "dtype and shape",
    "rows": "what the schedule does to which module",
    "placements": "parameters that do not lie whole on every rank",
    "activations": "how they enter and leave a module",
    "stages": "units of the pipeline",
    "collectives": "of one step: how many, bytes each",
    "ranks": "bytes held, by kind of rank",
}
STRUCTURE = ("modules", "parameters", "buffers")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Lock:
    """A model and its schedule at one time.

    sections  section -> full name -> facts; names of modules have no ranges
    settings  the settings of the lock: ("--mesh", "dp=2"), ("--knob", "micro=4")
    made      versions of packages; not compared
    """

    sections: Mapping[str, Section]
    settings: tuple[tuple[str, str], ...] = ()
    made: tuple[tuple[str, str], ...] = ()

    @property
    def structure(self) -> str:
        """The hash of the model alone: its modules, parameters and buffers."""
        lines = [
            "\t".join((section, name, *texts))
            for section in STRUCTURE
            for name, texts in sorted(self.sections.get(section, {}).items())
        ]
        return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def make_lock(plan: Plan, account: Account, settings: tuple[tuple[str, str], ...] = ()) -> Lock:
    """Make the lock of a plan and its costs; the model may be on the meta device."""
    model = plan.model.model
    sections = {
        "schedule": _schedule(plan),
        "modules": dict(_modules(model)),
        "parameters": dict(_parameters(plan)),
        "buffers": {
            name: (_tensor(buffer.dtype, buffer.shape),) for name, buffer in model.named_buffers()
        },
        "rows": _rows(plan),
        "placements": dict(_placements(plan)),
        "activations": dict(_activations(plan)),
        "stages": {name or MODEL_ROOT: (str(stage),) for name, stage in account.stages.items()},
        "collectives": _collectives(plan, account),
        "ranks": dict(_ranks(account)),
    }
    return Lock(sections, settings, installed_versions(model))


def installed_versions(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return versions of this package and of the packages of the model's modules."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"schedlang": __version__}
    for package in {"torch", *(_package(module) for module in model.modules())}:
        try:
            versions[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return tuple(sorted(versions.items()))


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _schedule(plan: Plan) -> Section:
    entries = {f"knob {name}": (str(value),) for name, value in plan.decisions}
    entries |= {f"axis {name}": (str(size),) for name, size in plan.mesh.axes}
    if plan.order is not None:
        order = plan.order
        parts = f"microbatches {order.micro}, stages a rank {order.chunks}"
        parts += f", an update every {order.every}" if order.every is not None else ""
        entries["order"] = (f"{order.name}, {parts}",)
    return {"model": (plan.model.class_name,), **entries}


def _modules(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield plain names of classes: the module path of a class is not structure."""
    for name, module in model.named_modules(remove_duplicate=False):
        settings = " ".join(_ADDRESS.sub("", module.extra_repr()).split())
        yield name or MODEL_ROOT, (f"{type(module).__qualname__}({settings})",)


def _tensor(dtype: object, shape: object) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"  # type: ignore[call-overload]


def _parameters(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    for param in plan.model.unique_parameters.values():
        text = _tensor(param.dtype, param.shape) + ("" if param.requires_grad else ", frozen")
        yield param.name, (text, *(f"tied to {name}" for name in param.names[1:]))


def _rows(plan: Plan) -> Section:
    rows: dict[str, tuple[str, ...]] = {}
    for action in plan.actions:
        if not action.has_effect:
            continue  # a check changes nothing
        row = f"{action.name}({arguments_text(action.primitive)})"
        for site in action.sites:
            rows[site or MODEL_ROOT] = (*rows.get(site or MODEL_ROOT, ()), row)
    return rows


def _placements(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in plan.layouts:
        layout = plan.effective_layout(name)
        blocks = [f"dim {s.dim} in blocks {list(s.blocks)}" for s in layout.splits if s.blocks[1:]]
        if layout.splits:
            yield name, (", ".join((layout.show(), *blocks)),)


def _activations(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    for fqn, edges in plan.boundaries.items():
        texts = [f"{edge.axis}: {edge.show()}" for edge in edges if plan.mesh.size(edge.axis) > 1]
        if texts:
            yield fqn or MODEL_ROOT, tuple(texts)


def _collectives(plan: Plan, account: Account) -> Section:
    if account.collectives is None:
        return {MODEL_ROOT: ("not counted: there is no batch to count them with",)}
    axis = plan.cuts[0].axis if plan.cuts else ""
    texts_by_module: dict[str, list[str]] = {}
    for entry in account.collectives:
        stages = (
            "" if entry.places is None else f" at {axis}={','.join(map(str, sorted(entry.places)))}"
        )
        texts_by_module.setdefault(entry.fqn or MODEL_ROOT, []).append(
            f"{entry.phase}: {entry.kind} over {'x'.join(entry.axes)}{stages}, {entry.what}: "
            f"{entry.count} x {entry.bytes} B"
        )
    return {fqn: tuple(sorted(texts)) for fqn, texts in texts_by_module.items()}


def _ranks(account: Account) -> Iterator[tuple[str, tuple[str, ...]]]:
    if account.classes is None:
        yield MODEL_ROOT, ("not counted: there is no batch to cut the model with",)
        return
    for rank_class in account.classes:
        yield (
            f"from rank {rank_class.first}",
            (
                f"ranks: {rank_class.ranks}",
                f"parameters: {rank_class.parameters} B",
                f"gradients: {rank_class.gradients} B",
                f"optimizer: {rank_class.optimizer} B",
                f"in a step: {rank_class.working} B",
            ),
        )


VERSION = 1
HEAD = """\
# What the model and its schedule were when somebody last looked: `schedlang plan FILE --lock`
# writes this file, `schedlang plan FILE --locked` compares.  h.0..3 stands for h.0 to h.3.
"""


def to_text(lock: Lock) -> str:
    """Return the text of a lock file; equal locks have equal texts."""
    lines = [HEAD, f"lock = {VERSION}", f"structure = {_quoted(lock.structure)}"]
    lines += ["", "[made]  # not compared", *(f"{n} = {_quoted(v)}" for n, v in lock.made)]
    if lock.settings:
        pairs = [f"  {_quoted(f'{option} {value}')}," for option, value in lock.settings]
        lines += ["", "[settings]", "given = [", *pairs, "]"]
    for name, about in SECTIONS.items():
        if lock.sections.get(name):
            lines += ["", f"[{name}]  # {about}", *_section_lines(lock.sections[name])]
    return "\n".join(lines) + "\n"


def _section_lines(section: Section) -> Iterator[str]:
    """Yield the lines of a section; names of equal entries are joined."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, texts in section.items():
        groups.setdefault(texts, []).append(name)
    lines = [(name, texts) for texts, names in groups.items() for name in compress_names(names)]
    for name, texts in sorted(lines, key=lambda line: _sort_key(line[0])):
        if len(texts) == 1:
            yield f"{_quoted(name)} = {_quoted(texts[0])}"
        else:
            yield f"{_quoted(name)} = ["
            yield from (f"  {_quoted(text)}," for text in texts)
            yield "]"


def _sort_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key with numbers by size: h.2 before h.10."""
    parts = name.split(".")
    return [(0, int(p), "") if p.isascii() and p.isdigit() else (1, 0, p) for p in parts]


def _quoted(text: str) -> str:
    """Quote a string for TOML, as JSON does except for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_lock(text: str, name: str) -> Lock:
    """Read a lock file; raises Refusal S721 if it is invalid or was edited."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for endless numbers and deep nesting
        _refuse(name, f"it is not TOML: {error}")
    if document.get("lock") != VERSION:
        _refuse(name, f"it is not of version {VERSION}")
    sections = {key: _entries(document.get(key, {}), name) for key in SECTIONS}
    versions = document.get("made", {})
    settings = document.get("settings", {})
    options = settings.get("given", []) if isinstance(settings, dict) else None
    if not isinstance(versions, dict) or not isinstance(options, list):
        _refuse(name, "a section is missing")
    if not all(isinstance(text, str) for text in options):
        _refuse(name, "`given` has a value that is not a string")
    version_pairs = tuple((str(key), str(value)) for key, value in versions.items())
    pairs = [str(text).partition(" ") for text in options]
    lock = Lock(sections, tuple((option, value) for option, _, value in pairs), version_pairs)
    if document.get("structure") != lock.structure:
        _refuse(name, "its lines and its hash of the model do not match")
    return lock


def _entries(section: Any, name: str) -> Section:
    if not isinstance(section, dict):
        _refuse(name, "a section is missing")
    entries: dict[str, tuple[str, ...]] = {}
    for key, value in section.items():
        texts = tuple(value) if isinstance(value, list) else (value,)
        if not all(isinstance(text, str) for text in texts):
            _refuse(name, f"`{key}` has a value that is not a string")
        try:
            entries |= dict.fromkeys(expand_names(key), texts)
        except ValueError as error:
            _refuse(name, f"`{key[:60]}` {error}")
    return entries


def _refuse(name: str, reason: str) -> NoReturn:
    title = f"`{name}` is not a readable lock"
    helps = ("write it again: `schedlang plan FILE --lock`",)
    raise Refusal.of("S721", title, notes=(reason,), helps=helps)


@dataclass(frozen=True)
class Change:
    """One changed fact, and all names for which it changed.

    `sign` is `+` for new, `-` for removed, `~` for changed.
    """

    sign: str
    section: str
    names: tuple[str, ...]  # with ranges
    old: tuple[str, ...]
    new: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield the change as text, one line for each group of names."""
        removed = [text for text in self.old if text not in self.new]
        added = [text for text in self.new if text not in self.old]
        if sorted(self.old) == sorted(self.new):  # another order, or another count
            removed, added = list(self.old), list(self.new)
        change = " -> ".join(", ".join(texts) for texts in (removed, added) if texts)
        if not removed or not added:
            change = f"{'now also' if added and self.old else ''} {change}".strip()
            change = f"no longer {change}" if removed and self.new else change
        for name in self.names:
            yield f"{self.sign} {self.section}  {name}  {change}"

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "sign": self.sign,
            "section": self.section,
            "names": list(self.names),
            "old": list(self.old),
            "new": list(self.new),
        }


def compare_locks(old: Lock, new: Lock) -> list[Change]:
    """List the differences of two locks, without versions of packages."""
    changes: list[Change] = []
    for section in SECTIONS:
        changes += _section_changes(
            section, old.sections.get(section, {}), new.sections.get(section, {})
        )
    return changes


def changed_versions(old: Lock, new: Lock) -> list[str]:
    """Describe the packages whose versions differ."""
    old_versions, new_versions = dict(old.made), dict(new.made)
    return [
        f"{name} {old_versions.get(name, 'none')} -> {new_versions.get(name, 'none')}"
        for name in sorted({*old_versions, *new_versions})
        if old_versions.get(name) != new_versions.get(name)
    ]


def _section_changes(section: str, old: Section, new: Section) -> Iterator[Change]:
    names_by_texts: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name in [*old, *(name for name in new if name not in old)]:
        pair = old.get(name, ()), new.get(name, ())
        if pair[0] != pair[1]:
            names_by_texts.setdefault(pair, []).append(name)
    for (old_texts, new_texts), names in names_by_texts.items():
        sign = "~" if old_texts and new_texts else "-" if old_texts else "+"
        yield Change(sign, section, tuple(compress_names(names)), old_texts, new_texts)
