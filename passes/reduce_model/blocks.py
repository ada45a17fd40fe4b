"""Repeated blocks of a model: lists of blocks, common names, and the fewest representative layers.

Used by the reduction of models, and by proposals of rows (passes/complete, passes/autoshard).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from schedlang.ir.model import is_inside
from schedlang.ir.module_attributes import (
    differing_attributes,
    module_kind,
    modules_below,
    plain_attributes,
)
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.model import ModelFacts, Site


Kind = object  # equal for equal layers that have the same rows of the schedule


def layer_kinds(plan: Plan, trunk: str, attributes: Set[tuple[str, str]]) -> list[Kind]:
    """Return the kind of each child of a list: its modules and the rows that act on them.

    `attributes` are the attributes in which layers of the full model differ.
    """
    facts = plan.model
    cuts = [fqn for cut in plan.cuts for fqn in cut.before]
    kinds: list[Kind] = []
    for child in facts.children(trunk):
        root = f"{trunk}.{child}"
        modules = frozenset(
            (
                f[len(root) :],
                facts.sites[f].kind,
                _distinguishing_attributes(facts.module(f), f[len(root) :], attributes),
                tuple(p.requires_grad for p in facts.sites[f].parameters.values()),
            )
            for f in modules_below(facts, root)
        )
        rows = frozenset(
            (_place(action.span), action.name, site[len(root) :])
            for action in plan.actions
            for site in action.sites
            if is_inside(site, root)
        )
        starts = tuple(k for k, fqn in enumerate(cuts) if is_inside(fqn, root))
        kinds.append((modules, rows, starts))
    return kinds


def _distinguishing_attributes(
    module: nn.Module, path: str, telling: Set[tuple[str, str]]
) -> frozenset[tuple[str, object]]:
    """Return the attributes by which a block may compute otherwise than other blocks.

    These are booleans, None, words without digits, and the attributes in `telling`. Other numbers
    are sizes or indices of blocks.
    """
    return frozenset(
        (name, value)
        for name, value in plain_attributes(vars(module))
        if (path, name) in telling
        or value[0] in (bool, type(None))
        or (value[0] is str and not any(map(str.isdigit, value[1])))
    )


def _place(span: object) -> object:
    line, col = getattr(span, "line", 0), getattr(span, "col", 0)
    return (getattr(getattr(span, "source", None), "name", ""), line, col)


def adjacent_kinds(sequence: Sequence[Kind]) -> set[tuple[Kind, Kind]]:
    """Return the pairs of adjacent kinds, with both ends of the sequence."""
    ends: list[Kind] = ["first", *sequence, "last"]
    return set(zip(ends, ends[1:]))


def shows_all_kinds(old: Plan, new: Plan, lists: Sequence[str]) -> bool:
    """Return whether a shorter model has the same kinds of layers, adjacent pairs, and stages."""
    for trunk in lists:
        attributes = differing_attributes(
            old.model, [f"{trunk}.{child}" for child in old.model.children(trunk)]
        )
        old_kinds = layer_kinds(old, trunk, attributes)
        new_kinds = layer_kinds(new, trunk, attributes)
        if adjacent_kinds(old_kinds) != adjacent_kinds(new_kinds):
            return False
        stages_old, stages_new = _count_stages(old, trunk), _count_stages(new, trunk)
        if stages_old == 1:
            continue
        if len(new_kinds) < min(2, len(old_kinds) // stages_old) * stages_new:
            return False
        if (len(old_kinds) % stages_old == 0) != (len(new_kinds) % stages_new == 0):
            return False
        common_kinds = set.intersection(*_kinds_by_share(old_kinds, stages_old))
        if not all(common_kinds <= share for share in _kinds_by_share(new_kinds, stages_new)):
            return False
    return True


def _count_stages(plan: Plan, trunk: str) -> int:
    """Return the number of stages into which a row at the list itself splits it."""
    cut = [cut for cut in plan.cuts if trunk in cut.trunks]
    return plan.stages(cut[0].axis) if cut else 1


def _kinds_by_share(sequence: Sequence[Kind], stages: int) -> list[set[Kind]]:
    """Return the kinds in each share of the layers, for shares of equal size."""
    size, remainder = divmod(len(sequence), stages)
    shares, start = [], 0
    for k in range(stages):
        end = start + size + (k < remainder)
        shares.append(set(sequence[start:end]))
        start = end
    return shares


def full_model_name(name: str, shorter: Mapping[str, tuple[int, int]]) -> str:
    """Return the name in the full model of a parameter of the shorter model.

    `shorter` maps each list to its numbers of layers in the shorter and in the full model.
    The shorter model has the layers from both ends of the list.
    """
    for trunk, (new_count, old_count) in shorter.items():
        if name.startswith(f"{trunk}."):
            suffix = name[len(trunk) + 1 :]
            index, dot, tail = suffix.partition(".")
            if index.isdigit() and int(index) >= (new_count + 1) // 2:
                name = f"{trunk}.{int(index) + old_count - new_count}{dot}{tail}"
    return name


PROJECTIONS = ("Linear", "Conv1D")
TABLES = ("Embedding", "EmbeddingBag")
LEAVES = (*PROJECTIONS, *TABLES)
MIN_PROJECTIONS = 2  # projections in a block


def leaf_kind(site: Site) -> str:
    """Return the class in LEAVES of a module whose weight has named dims, or ""."""
    weight = site.parameters.get("weight")
    if weight is None or len(weight.shape) != 2 or "weight" not in site.dims:
        return ""  # another class of the same name may have another layout of its weight
    return next((kind for kind in LEAVES if site.is_a(kind)), "")


CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")


def can_split_module(facts: ModelFacts, fqn: str) -> bool:
    """Return whether a module can be sharded in a pair: a leaf, or an ungrouped convolution."""
    site = facts.sites[fqn]
    convolves = any(site.is_a(kind) for kind in CONVOLUTIONS)
    return bool(leaf_kind(site)) or convolves and _conv_groups(facts, fqn) == 1


def _conv_groups(facts: ModelFacts, fqn: str) -> int:
    return int(facts.model.get_submodule(fqn).groups)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Blocks:
    """The lists of blocks of a model, by names in which `*` stands for numbers of outer blocks."""

    facts: ModelFacts
    lists: frozenset[str]

    def common_name(self, fqn: str) -> str:
        """Return the name of a module that is common to all blocks: `model.layers.*.mlp.up`."""
        parts: list[str] = []
        for part in fqn.split("."):
            parts.append("*" if ".".join(parts) in self.lists and parts else part)
        return ".".join(parts)

    def is_inside(self, fqn: str) -> bool:
        """Return whether a module is a block or inside a block."""
        return "*" in self.common_name(fqn).split(".")  # also for names that are common already

    def is_block(self, fqn: str) -> bool:
        """Return whether a module is a block itself."""
        return bool(fqn) and self.common_name(fqn).endswith(".*")

    def enclosing_block(self, fqn: str) -> str:
        """Return the innermost block around a module; "" outside blocks."""
        common_name = self.common_name(fqn)
        depth = common_name.rpartition("*")[0].count(".")
        return ".".join(fqn.split(".")[: depth + 1]) if "*" in common_name else ""

    @cached_property
    def modules_by_name(self) -> Mapping[str, tuple[str, ...]]:
        """Return the modules of each common name, in the order of the model."""
        names: dict[str, list[str]] = {}
        for fqn in self.facts.sites:
            names.setdefault(self.common_name(fqn), []).append(fqn)
        return {name: tuple(group) for name, group in names.items()}

    def modules_of(self, name: str) -> tuple[str, ...]:
        """Return the modules of a common name, or the single module of a full name."""
        return self.modules_by_name.get(name) or ((name,) if name in self.facts.sites else ())

    def in_model(self, facts: ModelFacts) -> Blocks:
        """Return the same lists for a model with fewer blocks."""
        return Blocks(facts, self.lists)


def blocks_of(facts: ModelFacts) -> Blocks:
    """Return the lists of blocks: lists with two blocks of one class, or with a single block.

    A block has at least two projections.
    """
    counts: Counter[str] = Counter()
    for fqn, site in facts.sites.items():
        weights = (param for param in site.parameters.values() if len(param.shape) > 1)
        if any(True for _ in weights) and leaf_kind(site) not in TABLES:
            parts = fqn.split(".")
            counts.update(".".join(parts[:k]) for k in range(1, len(parts)))
    blocks = Blocks(facts, frozenset())
    for fqn, site in facts.sites.items():
        if fqn and site.is_list and _repeats(facts, site, counts):
            blocks = Blocks(facts, blocks.lists | {blocks.common_name(fqn)})
    return blocks


def _repeats(facts: ModelFacts, site: Site, projection_counts: Counter[str]) -> bool:
    blocks = [f"{site.fqn}.{child}" for child in site.children]
    names = [fqn for fqn in blocks if projection_counts[fqn] >= MIN_PROJECTIONS]
    classes = Counter(facts.sites[fqn].class_name for fqn in names)
    return len(blocks) == len(names) and (len(blocks) == 1 or max(classes.values(), default=0) > 1)


def shorten_model(model: nn.Module, blocks: Blocks, stages: int = 1) -> nn.Module:
    """Return the model on the meta device with the fewest blocks that have all kinds and pairs."""
    from schedlang.runtime.tracing.meta_runs import meta_model

    layers_kept = {}
    for list_name in blocks.lists:
        for fqn in blocks.modules_by_name.get(list_name, ()):
            children = blocks.facts.children(fqn)
            kinds = [module_kind(blocks.facts, f"{fqn}.{child}") for child in children]
            indices = fewest_layers(kinds, stages)
            if len(indices) < len(children):
                layers_kept[fqn] = [children[index] for index in indices]
    return meta_model(model, {}, layers_kept)


def fewest_layers(kinds: Sequence[object], stages: int = 1) -> list[int]:
    """Return indices from both ends of a list that have all its kinds and adjacent pairs.

    With several stages their number is divisible by the stages if the list's length is, and each
    stage has two layers if the list has two per stage.
    """
    all_kinds, count = adjacent_kinds(kinds), len(kinds)
    min_layers = min(count, min(2, max(1, count // stages)) * stages)
    for size in range(max(1, min_layers), count):
        if (size % stages == 0) != (count % stages == 0):
            continue
        for first_layers in range(size, -1, -1):
            indices = [*range(first_layers), *range(count - size + first_layers, count)]
            if adjacent_kinds([kinds[index] for index in indices]) == all_kinds:
                return indices
    return list(range(count))
