"""What a proposed schedule says of itself: what stays replicated, where transformers differs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set

from schedlang.amounts import number
from schedlang.passes.completing.proposal_text import names_text
from schedlang.passes.shrinking.blocks import TABLES, Blocks, leaf_kind, splits
from schedlang.plan import Plan

STYLES = {"colwise": "out", "rowwise": "in", "embedding_rowwise": "vocab"}
SMALL = 500  # a weight with less than the 500th part of all parameters is not worth a line


def headline(blocks: Blocks) -> str:
    """What the model is, in one line."""
    facts = blocks.facts
    outer = [name for name in facts.sites if name in blocks.lists and "*" not in name]
    counts = ((len(facts.children(name)), name) for name in outer)
    said = " and ".join(f"{count} block{'s' * (count > 1)} of {name}" for count, name in counts)
    total = f"{number(facts.numel(''))} parameters"
    return f"{total}, {said}." if said else f"{total}, no repeated blocks."


def left_whole(
    plan: Plan, blocks: Blocks, axis: str, said: Sequence[str], named: Set[str],
    read: Mapping[str, str],
) -> Iterator[str]:  # fmt: skip
    """Notes on large weights that no row splits, none of them `named`, nor in what was `said`.

    `read` has the line of the model at which each module's output is first used.
    """
    total = blocks.facts.numel("")
    known = " ".join(said)
    groups: dict[str, dict[str, None]] = {}
    for name, fact in blocks.facts.unique.items():
        owner = name.rpartition(".")[0]
        split = any(s.axis == axis for s in plan.held(name).splits)
        common = blocks.common(owner)
        if split or common in named or len(fact.shape) < 2 or fact.numel * SMALL < total:
            continue
        if not _mentioned(common, known):
            why = _why(blocks, owner, len(fact.shape), read)
            groups.setdefault(why, {})[common] = None
    for why, names in groups.items():
        yield f"replicated: {names_text(list(names))}: {why}"


def _mentioned(common: str, known: str) -> bool:
    """Is a name among some notes, where siblings stand in braces?"""
    parent, _, last = common.rpartition(".")
    braced = re.escape(parent) + r"\.\S*\{[^}]*\}\S*"
    found = (match.group() for match in re.finditer(braced, known))
    return common in known or any(_in_braces(last, text) for text in found)


def _in_braces(last: str, text: str) -> bool:
    front, _, rest = text.rpartition(".")[2].partition("{")
    middle, _, back = rest.partition("}")
    back = back.rstrip(":,")
    return last in {front + one + back for one in middle.split(",")}


def _why(blocks: Blocks, owner: str, dims: int, read: Mapping[str, str]) -> str:
    site = blocks.facts.sites[owner]
    if leaf_kind(site) in TABLES:
        return "a small table"
    if dims == 3 and not site.dims:
        return "weights of several experts or heads in one"
    if "Conv" in site.class_name and not splits(blocks.facts, owner):
        return "a convolution of several groups"
    if not splits(blocks.facts, owner):
        return f"no style fits a `{site.class_name}`"
    elsewhere = f"is used elsewhere, at {read[owner]}" if read.get(owner) else "leaves the model"
    return f"no column/row pair found: its output {elsewhere}"


def differences(plan: Plan, blocks: Blocks, axis: str) -> Iterator[str]:
    """Where transformers' own plan for the model splits otherwise."""
    theirs = getattr(blocks.facts.model, "tp_plan", None)
    found: dict[str, dict[str, None]] = {}
    for pattern, style in (theirs or {}).items() if isinstance(theirs, Mapping) else ():
        wanted = STYLES.get(next((s for s in STYLES if str(style).startswith(s)), ""))
        if wanted is None:
            continue
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for fqn in filter(regex.fullmatch, blocks.facts.sites):
            ours = _ours(plan, blocks, fqn, axis)
            if ours not in (wanted, None):
                words = f"`{style}` there, {f'split along {ours}' if ours else 'replicated'} here"
                found.setdefault(words, {})[blocks.common(fqn)] = None
    for words, names in found.items():
        yield f"transformers' own plan differs: {names_text(list(names))}: {words}"


def _ours(plan: Plan, blocks: Blocks, fqn: str, axis: str) -> str | None:
    """The dim of the weight that is split, "" for none; None where it has no named dims."""
    site = blocks.facts.sites[fqn]
    dims = site.dims.get("weight", ())
    if not dims or "weight" not in site.parameters:
        return None
    held = plan.held(site.parameters["weight"].name)
    return next((dims[s.dim] for s in held.splits if s.axis == axis), "")
