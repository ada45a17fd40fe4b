"""Selectors: find the modules that a path names in a tree of modules, in model order.

Used when a schedule's rows are bound to a model, and by editors for completion.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NoReturn, Protocol

from schedlang.diagnostics.diagnostic import (
    Label,
    Refusal,
    facts_of_unknown,
    find_closest,
    quote_names,
)
from schedlang.ir.model import quote_module
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.nodes import walk
from schedlang.language.value import (
    UNKNOWN,
    MissingAttribute,
    Names,
    Symbol,
    evaluate,
    read_plain_value,
    show_value,
    unknown_words,
)

WHERE_NAMES = ("params", "dtype", "fqn", "index")  # names that a `where` finds at every module


class TypedParameter(Protocol):
    """A parameter, as far as a `where` condition reads it."""

    @property
    def dtype(self) -> str:
        """The name of the element type, for example float32."""


class Tree(Protocol):
    """The part of a model that selectors read. Modules have PyTorch's names; "" is the model."""

    def children(self, fqn: str) -> Sequence[str]:
        """Return the names of a module's direct children, in order."""

    def class_names(self, fqn: str) -> tuple[str, ...]:
        """Return the plain names of a module's class and of its base classes."""

    def attribute(self, fqn: str, name: str) -> object:
        """Return a plain attribute of a module; raise AttributeError if the module has none."""

    def attributes(self, fqn: str) -> Sequence[str]:
        """Return the public names of the module's own attributes."""

    def numel(self, fqn: str) -> int:
        """Return the number of elements of the parameters of a module and of its children."""

    def parameters_below(self, fqn: str) -> Sequence[TypedParameter]:
        """Return the parameters of a module and of its children."""


class MatchedModules(NamedTuple):
    """Modules matched below one outer match `root`; `after_globstar`: the path has passed a
    `**`."""

    root: str
    modules: tuple[str, ...]
    after_globstar: bool = False


@dataclass(eq=False)
class Selector:
    """Resolves paths against one tree; finds the order of the tree's modules once."""

    tree: Tree
    _selected: dict[tuple[n.Path, tuple[str, ...]], tuple[str, ...]] = field(default_factory=dict)
    _matches: dict[tuple[str, Sequence[str]], Sequence[str]] = field(default_factory=dict)

    @cached_property
    def order(self) -> dict[str, int]:
        """The position of every module in model order."""
        return {fqn: index for index, fqn in enumerate(self.descend(""))}

    def descend(self, fqn: str) -> Iterator[str]:
        """Yield a module and all modules below it, in model order."""
        waiting = [fqn]
        while waiting:
            fqn = waiting.pop()
            yield fqn
            if children := self.tree.children(fqn):
                prefix = f"{fqn}." if fqn else ""
                waiting += [prefix + name for name in reversed(children)]

    def sort(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Return the modules in model order, each once."""
        modules = tuple(modules)
        if len(modules) < 2:
            return modules
        places = list(map(self.order.__getitem__, modules))
        if all(map(operator.lt, places, places[1:])):
            return modules
        return tuple(sorted(set(modules), key=self.order.__getitem__))

    # ---- paths ----------------------------------------------------------------------------

    def select(self, path: n.Path, roots: Sequence[str], names: Names) -> tuple[str, ...]:
        """Return the modules that `path` names below each of `roots`.

        Refuses S201 (a segment matches nothing below some outer match), S202 (an index is out of
        range) and S203 (no module has the type), unless the path ends in `?`.
        """
        key = (path, tuple(roots))
        if key not in self._selected:
            selected = self._select(path, roots, names)
            if any(seg.index for seg in path.segs) and not _has_literal_bounds(path):
                return selected
            self._selected[key] = selected
        return self._selected[key]

    def _select(self, path: n.Path, roots: Sequence[str], names: Names) -> tuple[str, ...]:
        groups = [MatchedModules(root, (root,)) for root in roots]
        for seg in path.segs:
            matches = self._match_below(seg, groups)
            if matches and seg is path.segs[-1] and not seg.index and not path.type:
                return self.sort(fqn for _, names in matches for fqn in names)
            matched = [MatchedModules(root, (fqn,)) for root, names in matches for fqn in names]
            groups = matched or self._match_each_group(seg, groups, path.optional)
            if seg.index:
                groups = [self._index(seg, group, names) for group in groups]
        if path.type:
            return self.sort(
                m
                for root_groups in _group_by_root(groups)
                for m in self._filter_by_type(path, root_groups)
            )
        return self.sort(m for group in groups for m in group.modules)

    def _match_below(
        self, seg: n.Seg, groups: Sequence[MatchedModules]
    ) -> list[tuple[str, list[str]]]:
        """Match one segment below all groups: the child names of each module, with the group's
        root.

        Returns [] where some module lacks one of the names, and for `**`. Modules with the same
        children are matched once.
        """
        if seg.text == "**" or any(group.after_globstar for group in groups):
            return []
        matches = []
        for group in groups:
            for fqn in group.modules:
                children = tuple(self.tree.children(fqn))
                key = (seg.text, children)
                if key not in self._matches:
                    is_name = seg.text in children and seg.text.isidentifier()
                    self._matches[key] = (seg.text,) if is_name else _matching_children(*key)
                names = self._matches[key]
                if not names:
                    return []
                prefix = f"{fqn}." if fqn else ""
                matches.append((group.root, [prefix + name for name in names]))
        return matches

    def _match_each_group(
        self, seg: n.Seg, groups: Sequence[MatchedModules], optional: bool
    ) -> list[MatchedModules]:
        """Match one segment below each group, module by module."""
        searched = [m for group in groups for m in group.modules]
        return [
            new for group in groups for new in self._match_group(seg, group, searched, optional)
        ]

    def _match_group(
        self, seg: n.Seg, group: MatchedModules, searched: Sequence[str], optional: bool
    ) -> list[MatchedModules]:
        """Match one segment below one group; with `optional` the segment may match nothing."""
        if seg.text == "**":
            inside = self.sort(d for m in group.modules for d in self.descend(m))
            return [MatchedModules(group.root, inside, after_globstar=True)]
        fqns: list[str] = []
        for glob in _expand_alternatives(seg.text):
            hits = [_join(m, c) for m in group.modules for c in self._children(m, glob, seg)]
            if not hits and group.modules and not optional:
                self._refuse_no_match(seg, glob, group, searched)
            fqns += hits
        if group.after_globstar:
            return [MatchedModules(group.root, self.sort(fqns), after_globstar=True)]
        return [MatchedModules(group.root, (fqn,)) for fqn in self.sort(fqns)]

    def _children(self, fqn: str, glob: str, seg: n.Seg) -> list[str]:
        children = self.tree.children(fqn)
        if glob.isdigit() and glob not in children and children:
            return [self._child_at(fqn, int(glob), seg)]
        pattern = _compile_pattern(glob)
        return [name for name in children if pattern.fullmatch(name)]

    def _child_at(self, fqn: str, index: int, seg: n.Seg) -> str:
        """Return the child at an index, which counts from the end if negative; refuses S202."""
        children = self.tree.children(fqn)
        if not -len(children) <= index < len(children):
            count = (
                f"{len(children)} children, 0 to {len(children) - 1}" if children else "no children"
            )
            label = Label(seg.span, f"{quote_module(fqn)} has {count}")
            helps = ("count from the end: the last is `-1`",) if children else ()
            raise Refusal.of("S202", f"index {index} is out of range", label, helps=helps)
        return children[index]

    def _index(self, seg: n.Seg, group: MatchedModules, names: Names) -> MatchedModules:
        """Pick children by [3], [-1], [0:12], [::2] or [:ckpt]."""
        picked: list[str] = []
        for fqn in group.modules:
            children = self.tree.children(fqn)
            for item in seg.index:
                if isinstance(item, str):
                    index = _evaluate_bound(item, seg, names)
                    assert index is not None
                    picked.append(_join(fqn, self._child_at(fqn, index, seg)))
                else:
                    picked += [
                        _join(fqn, name)
                        for name in _slice_children(children, item, seg, names, fqn)
                    ]
        return MatchedModules(group.root, self.sort(picked), group.after_globstar)

    def _filter_by_type(self, path: n.Path, found: tuple[str, ...]) -> tuple[str, ...]:
        kept = tuple(fqn for fqn in found if path.type in self.tree.class_names(fqn))
        if kept or path.optional or not found:
            return kept
        assert path.type is not None
        types = sorted({self.tree.class_names(fqn)[0] for fqn in found})
        closest = find_closest(path.type, types)
        help_ = (
            f"did you mean `:{closest}`?"
            if closest
            else f"the types there are {quote_names(types)}"
        )
        count = f"selects {len(found)} modules, none" if len(found) > 1 else "selects 1 module, not"
        label = Label(path.span, f"{count} of this type")
        title = f"no selected module is a `{path.type}`"
        facts = facts_of_unknown(path.type, types)
        raise Refusal.of("S203", title, label, helps=(help_,), facts=facts)

    def _refuse_no_match(
        self, seg: n.Seg, glob: str, group: MatchedModules, searched: Sequence[str]
    ) -> NoReturn:
        children = sorted({name for module in group.modules for name in self.tree.children(module)})
        owner = quote_module(group.modules[0])
        text = f"{owner} has no child `{glob}`" if children else f"{owner} has no children"
        notes: tuple[str, ...] = ()
        if len(searched) > 1:
            ends = f"{quote_module(searched[0])} to {quote_module(searched[-1])}"
            notes = (f"searched {len(searched)} modules, {ends}",)
            owners = [module for module in searched if self._has_child(module, glob)]
            if owners:
                notes += (
                    f"{len(owners)} of them have one; end the path in `?` to select only those",
                )
        closest = find_closest(glob, children)
        helps: tuple[str, ...] = (f"did you mean `{closest}`?",) if closest else ()
        if not closest and children:
            helps = (f"its children are {quote_names(children)}",)
        label = Label(seg.span, text)
        facts, title = facts_of_unknown(glob, children), "selector matches no module"
        raise Refusal.of("S201", title, label, (), notes, helps, facts=facts)

    def _has_child(self, fqn: str, glob: str) -> bool:
        return any(_compile_pattern(glob).fullmatch(name) for name in self.tree.children(fqn))

    # ---- at ... where ... except ... ------------------------------------------------------

    def select_scope(self, at: n.At, roots: Sequence[str], names: Names) -> tuple[str, ...]:
        """Return the modules of an `at`; refuses S207 where `where` or `except` leave no module."""
        fqns = self.sort(module for path in at.paths for module in self.select(path, roots, names))
        if not fqns:
            return fqns
        kept = self._filter_where(at.where, fqns, names) if at.where is not None else fqns
        excluded = {module for path in at.except_ for module in self.select(path, roots, names)}
        remaining = tuple(fqn for fqn in kept if fqn not in excluded)
        if not remaining:
            title = "this selection is empty"
            label = Label(at.paths[0].span.to(at.paths[-1].span), _describe_count(fqns))
            notes: tuple[str, ...] = ("`except` removes all of them",)
            if not kept and at.where is not None:
                notes = (
                    "`where` is false for all of them",
                    *self._describe_values(at.where, fqns, names),
                )
            helps = ("change the condition, or end the path in `?`: then it may select nothing",)
            raise Refusal.of("S207", title, label, notes=notes, helps=helps)
        return remaining

    def _filter_where(self, test: n.Expr, fqns: tuple[str, ...], names: Names) -> tuple[str, ...]:
        """Return the modules for which the test is true; a module without a named attribute is
        dropped."""
        kept, lacking = [], []
        for index, fqn in enumerate(fqns):
            try:
                result = evaluate(test, replace(names, module_lookup=self._names_at(fqn, index)))
            except MissingAttribute as missing:
                lacking.append(str(missing))
                continue
            if not isinstance(result, bool) and result is not UNKNOWN:
                label = Label(test.span, f"this is {show_value(result)}")
                title = "`where` needs a condition: true or false"
                raise Refusal.of("S304", title, label, facts=unknown_words(result))
            if result is True:
                kept.append(fqn)
        if lacking and len(lacking) == len(fqns):
            label = Label(test.span, f"in `{printer.expr(test)}`")
            title = f"no selected module has an attribute `{lacking[0]}`"
            attributes = self.tree.attributes(fqns[0])
            helps: tuple[str, ...] = (f"every module has {quote_names(WHERE_NAMES)}",)
            if closest := find_closest(lacking[0], [*WHERE_NAMES, *attributes]):
                helps = (f"did you mean `{closest}`?", *helps)
            facts = facts_of_unknown(lacking[0], [*WHERE_NAMES, *attributes])
            raise Refusal.of("S208", title, label, helps=helps, facts=facts)
        return tuple(kept)

    def _describe_values(self, test: n.Expr, fqns: tuple[str, ...], names: Names) -> Iterator[str]:
        """Yield, as notes, the values that the names of a test have in the selected modules."""
        for name in dict.fromkeys(node.text for node in walk(test) if isinstance(node, n.Name)):
            values: dict[str, None] = {}
            for index, fqn in enumerate(fqns):
                with suppress(AttributeError):
                    values[show_value(self._names_at(fqn, index)(name))] = None
            shown = list(values)
            if shown and name not in names.known_names():
                suffix = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
                yield f"`{name}` is {', '.join(shown[:4])}{suffix}"

    def _names_at(self, fqn: str, index: int) -> Any:
        """Return the function that looks up the names of a `where` at one module."""

        def here(name: str) -> object:
            if name == "fqn":
                return fqn
            if name == "index":
                return index
            if name == "params":
                return self.tree.numel(fqn)
            if name == "dtype":
                kinds = {p.dtype for p in self.tree.parameters_below(fqn)}
                return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "none"
            first, *path = name.split(".")
            if first.startswith("_"):
                raise AttributeError(name)
            return read_plain_value(self.tree.attribute(fqn, first), path)

        return here


def _group_by_root(groups: Sequence[MatchedModules]) -> Iterator[tuple[str, ...]]:
    """Yield the modules found below each root."""
    for root in dict.fromkeys(group.root for group in groups):
        yield tuple(m for group in groups if group.root == root for m in group.modules)


def _join(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name


def _describe_count(fqns: Sequence[str]) -> str:
    return f"selects {len(fqns)} modules" if len(fqns) > 1 else f"selects {quote_module(fqns[0])}"


@lru_cache
def _expand_alternatives(text: str) -> tuple[str, ...]:
    """Return q_proj and k_proj for {q,k}_proj; each of them must match."""
    bare = text.strip("`")
    if text.startswith("`"):
        return (f"`{bare}",)
    parts = re.findall(r"\{[^}]*\}|[^{]+", bare)
    options = [part[1:-1].split(",") if part[0] == "{" else [part] for part in parts]
    return tuple("".join(choice) for choice in itertools.product(*options))


@lru_cache
def _compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a segment without alternatives; a segment in backquotes is taken literally."""
    if text.startswith("`"):
        return re.compile(re.escape(text[1:]))
    first, *rest = map(re.escape, re.split(r"\*+", text))
    steps = [f"(?>[^.]*?{part})" for part in rest[:-1]]  # the nearest will do: nothing is retried
    return re.compile("".join([first, *steps, *(f"[^.]*{part}" for part in rest[-1:])]))


def _has_literal_bounds(path: n.Path) -> bool:
    """Return whether all indices of a path are numbers, so that no knob changes what the path
    names."""
    items = [item for seg in path.segs for item in seg.index]
    bounds = (
        (item,) if isinstance(item, str) else (item.start, item.stop, item.step) for item in items
    )
    return all(not text or text.lstrip("-").isdigit() for texts in bounds for text in texts)


def _matching_children(text: str, children: Sequence[str]) -> Sequence[str]:
    """Return the children that a segment names, in order; () if one of its alternatives matches
    none."""
    matched: set[str] = set()
    for glob in _expand_alternatives(text):
        pattern = _compile_pattern(glob)
        hits = [name for name in children if pattern.fullmatch(name)]
        if not hits:
            return ()
        matched.update(hits)
    return [name for name in children if name in matched]


def _evaluate_bound(text: str | None, seg: n.Seg, names: Names) -> int | None:
    """Return the value of one bound of an index: a number, or the value of a name."""
    if text is None:
        return None
    if text.lstrip("-").isdigit():
        return int(text)
    value = evaluate(n.Name((text,), span=seg.span), names)
    if value is UNKNOWN:
        return 0
    if type(value) is Symbol:
        title, label = f"unknown name `{text}`", Label(seg.span, "used as an index")
        raise Refusal.unknown("S210", title, text, names.known_names(), primary=label)
    if isinstance(value, bool) or not isinstance(value, int):
        label = Label(seg.span, f"`{text}` is {show_value(value)}")
        raise Refusal.of("S304", "an index must be an integer", label)
    return int(value)


def _slice_children(
    children: Sequence[str], item: n.Slice, seg: n.Seg, names: Names, fqn: str
) -> Sequence[str]:
    """Return a slice of the children; refuses S202 an empty slice, unless a name sets its
    bounds."""
    texts = (item.start, item.stop, item.step)
    bounds = [_evaluate_bound(text, seg, names) for text in texts]
    if bounds[2] == 0:
        helps = ("write `[::2]` for every second module",)
        raise Refusal.of("S202", "the step of a slice cannot be 0", Label(seg.span), helps=helps)
    picked = children[slice(*bounds)]
    numbers = all(text is None or text.lstrip("-").isdigit() for text in texts)
    if not picked and numbers:
        label = Label(seg.span, f"{quote_module(fqn)} has {len(children)} children")
        helps = ("the end is not included: `[0:2]` selects two modules",)
        raise Refusal.of("S202", "this slice is empty", label, helps=helps)
    return picked
