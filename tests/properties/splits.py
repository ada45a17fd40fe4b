"""Generators of rows that split tensors: shards, grids, contexts, experts, and their completion."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.properties.drawn import Step, generator, step
from tests.properties.drawn import block_path as _at
from tests.properties.models import Block, Config


def _pair(name: str, ups: Sequence[str], down: str, axis: str) -> list[Step]:
    """Both halves split together, the first gathered at once, the second alone."""
    name = f"{name}." if name else ""
    col = [f"{name}{up}  shard(col, over={axis})" for up in ups]
    gathered = [f"{name}{up}  shard(col, output=R, over={axis})" for up in ups]
    row = f"{name}{down}  shard(row, over={axis})"
    claim = [f"shard {name.rstrip('.')}"] if name else ["shard embed"]
    return [
        step("shard", [*col, row], claim, [axis]),
        step("shard", gathered, claim, [axis]),
        step("shard", [row], claim, [axis]),
    ]


@generator
def shard(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Every style, where sizes divide."""
    found: list[Step] = []
    for axis in ("tp", "up"):
        n = sizes.get(axis, 0)
        if not n:
            continue
        for place, block in enumerate(config.blocks):
            at = _at(place)
            claim, wide = [f"shard {at}"], config.width % n == 0
            match block.kind:
                case "mlp" | "custom" | "writing" | "used" if block.hidden % n == 0:
                    found += _pair(at, [block.up], "down", axis)
                case "experts" if block.hidden % n == 0:
                    found += _pair(f"{at}.experts.*", ["up", "gate"], "down", axis)
                case "attention" if block.heads % n == 0 and block.groups % n == 0:
                    if block.fused:
                        q, k = block.heads * block.size, block.groups * block.size
                        rows = [
                            f"{at}.qkv  shard(col, blocks=[{q}, {k}, {k}], over={axis})",
                            f"{at}.o  shard(row, over={axis})",
                        ]
                        found += [
                            step("shard", rows, claim, [axis]),
                            step("shard", rows[1:], claim, [axis]),
                        ]
                    else:
                        found += _pair(at, ["q", "k", "v"], "o", axis)
                case "chain" | "twice" if wide:
                    found += _pair(at, ["lin"], "lin", axis)[1:]
            if length % n == 0 and block.kind in ("mlp", "used"):
                found += _sequence(at, block, axis, n)
            if (block.paired or block.kind == "custom") and block.hidden % n == 0:
                said = "weight=S(out), bias=S(out), input=R, output=S(-1)"
                rows = [
                    f"{at}.up  shard({said}, over={axis})",
                    f"{at}.down  shard(row, over={axis})",
                ]
                found.append(step("shard", rows, [*claim, f"terms {at}"], [axis]))
            found += _uneven(at, block, axis, n)
        found += _ends(config, axis, n)
    return found


def along(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Some of the trunk on parts of the sequence: one module, or all from one to the next.  What is
    used twice, and what the model gives beside, is not legal under all of them."""
    axes = [a for a in ("tp", "up") if length % sizes.get(a, length + 1) == 0]
    return [one for axis in axes for one in _along(config, axis)]


def _along(config: Config, axis: str) -> list[Step]:
    into = f"shard(input=R, output=S(seq), over={axis})"
    out_of = f"shard(input=S(seq), output=R, over={axis})"
    found = [
        step("shard", [f"{one}  {out_of}"], [f"shard {one}", "head whole"], [axis])
        for one in ("head", "norm")
    ]
    alone = [k for k, b in enumerate(config.blocks) if b.kind in TOKENWISE]
    for k in alone:
        found.append(step("shard", [f"{_at(k)}  {out_of}"], [f"shard {_at(k)}"], [axis]))
    if len(alone) == len(config.blocks):
        rows = [f"embed  {into}", f"norm  {out_of}"]
        claims = ["shard embed", "shard norm", *(f"shard {_at(k)}" for k in alone)]
        found.append(step("shard", rows, claims, [axis]))
    return found


def _uneven(at: str, block: Block, axis: str, n: int) -> list[Step]:
    """Sizes that the ranks do not divide: padded, or key-value heads that several ranks hold."""
    claim = [f"shard {at}", "zero cp"]  # a context exchanges whole heads
    if block.paired and block.hidden % n:
        rows = [
            f"{at}.{one}, over={axis}, uneven=pad)" for one in ("up  shard(col", "down  shard(row")
        ]
        return [step("shard", rows, claim, [axis])]
    if block.kind != "attention" or block.fused or block.groups % n == 0:
        return []
    own = f", over={axis}, heads={block.groups}, uneven="
    if block.heads % n == 0 and n % block.groups == 0:
        ends = [f"{at}.{one}, over={axis})" for one in ("q  shard(col", "o  shard(row")]
        keys = [f"{at}.{one}  shard(col{own}replicate)" for one in "kv"]
        return [step("shard", [*keys, *ends], claim, [axis])]
    if block.groups == 1:
        return []
    rows = [f"{at}.{one}  shard(col{own}pad)" for one in "qkv"]
    return [step("shard", [*rows, f"{at}.o  shard(row{own}pad)"], claim, [axis])]


def _sequence(at: str, block: Block, axis: str, n: int) -> list[Step]:
    """The norm, or the whole block, on parts of the sequence."""
    norm = f"{at}.norm  shard(input=S(seq), output=S(seq), over={axis})"
    rows = [
        norm,
        f"{at}.{block.up}  shard(col, over={axis})",
        f"{at}.down  shard(row, output=S(seq), over={axis})",
        f"{at}  shard(input=S(seq), output=R, over={axis})",
    ]
    found = [
        step(
            "shard",
            [f"{at}.norm  shard(input=S(seq), output=R, over={axis})"],
            [f"shard {at}"],
            [axis],
        )
    ]
    if block.pre and block.hidden % n == 0:
        found.append(step("shard", rows, [f"shard {at}"], [axis]))
    return found


def _ends(config: Config, axis: str, n: int) -> list[Step]:
    """Embedding and head."""
    found: list[Step] = []
    if config.entry == "floats":
        return _pair("", ["embed"], "embed", axis)[1:] if config.width % n == 0 else []
    pads = [f"embed  pad(vocab, multiple={n})"] if config.vocab % n else []
    words, head = f"embed  shard(vocab, over={axis})", f"head  shard(vocab, over={axis})"
    if config.tied:
        return [step("shard", [*pads, words, head], ["shard embed", "shard head"], [axis])]
    found.append(step("shard", [*pads, words], ["shard embed"], [axis]))
    pads = [f"head  pad(out, multiple={n})"] if config.vocab % n else []
    found.append(step("shard", [*pads, head], ["shard head"], [axis]))
    if not pads:
        gathered = f"head  shard(col, output=R, over={axis})"
        found.append(step("shard", [gathered], ["shard head", "head whole"], [axis]))
    return found


TOKENWISE = ("chain", "mlp", "used", "experts", "twice", "custom")  # kinds that mix no tokens


@generator
def context_parallel(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """All attentions together, where nothing else mixes tokens and the loss is a mean over them."""
    mixing = [(k, b) for k, b in enumerate(config.blocks) if b.kind not in TOKENWISE]
    own = config.returns == "tuple" and config.entry == "floats"
    fit = [block.kind == "attention" and block.flag for _, block in mixing]
    if "cp" not in sizes or not mixing or own or not all(fit):
        return []
    heads = sizes["cp"] * sizes.get("tp", 1)  # those of a tensor rank are divided again
    whole = all(block.heads % heads == 0 for _, block in mixing)
    ways = ["gather, over=cp", "ring, over=cp, layout=zigzag", "ring, over=cp, layout=striped"]
    ways += ["gather, over=cp, layout=contiguous"] + ["ulysses, over=cp"] * whole
    wide = math.prod(sizes[axis] for axis in ("cp", "cq") if axis in sizes)
    both = ["double_ring", "nbody", *["usp"] * all(b.heads % wide == 0 for _, b in mixing)]
    found = [(way, ["cp"]) for way in ways]
    if "cq" in sizes and length >= wide:  # a token for every rank
        found += [(f"{way}, over=(cp, cq)", ["cp", "cq"]) for way in both]
    return [
        step(
            "context_parallel",
            [f"{_at(k)}  context_parallel({way})" for k, _ in mixing],
            ["zero cp"],
            axes,
        )
        for way, axes in found
    ]


@generator
def complete(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """One row of a block, and what follows from it."""
    found, n = [], sizes.get("tp", 0)
    alike = len(config.blocks) > 1 and len(set(config.blocks)) == 1  # so that pairs are of a block
    for place, block in enumerate(config.blocks if n and alike else ()):
        at, first = _at(place), ""
        if (block.paired or block.kind == "custom") and block.hidden % n == 0:
            first = "up"
        elif block.kind == "attention" and block.heads % n == 0 and block.groups % n == 0:
            first = "" if block.fused else "k"
        if first:
            rows = [f"{at}.{first}  shard(col, over=tp)", "complete(over=tp)"]
            found.append(step("complete", rows, ["complete", f"shard {at}"], ["tp"]))
    return found


@generator
def grid(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Blocks, embedding and head on the grid of a data axis and another, where sizes divide."""
    rows, columns = sizes.get("dp", 0), sizes.get("tp", 0)
    found: list[Step] = []
    whole = math.lcm(rows, columns) if rows and columns else 0
    if not whole or config.width % whole:
        return []
    for place, block in enumerate(config.blocks):
        at, claim = _at(place), [f"shard {_at(place)}", f"kernel {_at(place)}"]
        norm = block.pre and block.norm in ("layer", "rms")
        first = [f"{at}.norm  grid(summa, over=(dp, tp))"] if norm else []
        inner, heads = block.heads * block.size, block.groups * block.size
        if block.paired and block.hidden % whole == 0:
            pair = [
                f"{at}.up  grid(summa, over=(dp, tp))",
                f"{at}.down  grid(summa, output=R, over=(dp, tp))",
            ]
            found += [step("grid", rows_, claim, ["tp"]) for rows_ in ([*first, *pair], pair)]
        divides = block.heads % columns == 0 and block.groups % columns == 0
        if block.kind == "attention" and divides and inner % whole == 0:
            ups = [f"{at}.{{q,k,v}}  grid(summa, over=(dp, tp))"]
            if block.fused:
                blocks = f"[{inner}, {heads}, {heads}]"
                ups = [f"{at}.qkv  grid(summa, blocks={blocks}, over=(dp, tp))"]
            last = f"{at}.o  grid(summa, output=R, over=(dp, tp))"
            found.append(step("grid", [*first, *ups, last], claim, ["tp"]))
    return found + _table(config, columns)


def _table(config: Config, columns: int) -> list[Step]:
    """Embedding and head on a grid, tied or not."""
    if config.entry != "words":
        return []
    pads = [f"embed  pad(vocab, multiple={columns})"] if config.vocab % columns else []
    words = "embed  grid(summa, output=R, over=(dp, tp))"
    head = "head  grid(summa, output=S(vocab), over=(dp, tp))"
    if config.tied:
        claims = ["shard embed", "shard head", "head whole"]
        return [step("grid", [*pads, words, head], claims, ["tp"])]
    more = [f"head  pad(out, multiple={columns})"] if config.vocab % columns else []
    return [
        step("grid", [*pads, words], ["shard embed"], ["tp"]),
        step("grid", [*more, head], ["shard head", "head whole"], ["tp"]),
    ]


@generator
def expert_parallel(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Stacked experts, where their number divides; an axis of data is left to `zero`."""
    options = (
        "",
        ", dispatch=all_to_all, chunks=2",
        ", dispatch=gather",
        ", dispatch=fetch",
        ", shadow=[1, 2]",
    )
    halves = [
        step(
            "expert_parallel",
            [f"{_at(place)}.experts  expert_parallel(over={axis}, inner=tp)"],
            [f"shard {_at(place)}"],
            ["tp"],
        )
        for place, block in enumerate(config.blocks)
        for axis in ("dp", "ep")
        if block.kind == "routed"
        and block.count % sizes.get(axis, block.count + 1) == 0
        and "tp" in sizes
        and block.hidden % sizes["tp"] == block.hidden % 2 == 0  # it is tried in halves
    ]
    return halves + [
        step(
            "expert_parallel",
            [f"{_at(place)}.experts  expert_parallel(over={axis}{more})"],
            [f"shard {_at(place)}"],
            [axis] if axis in ("tp", "up") else [],
        )
        for place, block in enumerate(config.blocks)
        for axis in ("dp", "ep", "tp", "up")
        for more in options
        if block.kind == "routed" and block.count % sizes.get(axis, block.count + 1) == 0
    ]
