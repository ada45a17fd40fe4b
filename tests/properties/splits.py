"""Generators of sharding rows: shard, grid, context parallel, expert parallel, complete."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.properties.drawn import Step, generator, step
from tests.properties.drawn import block_path as _at
from tests.properties.models import Block, Config


def _column_row(name: str, ups: Sequence[str], down: str, axis: str) -> list[Step]:
    """Return three steps: column and row split together, column gathered, row alone."""
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
    """Every shard style, if sizes divide."""
    steps: list[Step] = []
    for axis in ("tp", "up"):
        n = sizes.get(axis, 0)
        if not n:
            continue
        for index, block in enumerate(config.blocks):
            path = _at(index)
            claim, divides = [f"shard {path}"], config.width % n == 0
            match block.kind:
                case "mlp" | "custom" | "writing" | "used" if block.hidden % n == 0:
                    steps += _column_row(path, [block.up], "down", axis)
                case "experts" if block.hidden % n == 0:
                    steps += _column_row(f"{path}.experts.*", ["up", "gate"], "down", axis)
                case "attention" if block.heads % n == 0 and block.groups % n == 0:
                    if block.fused:
                        q, k = block.heads * block.size, block.groups * block.size
                        rows = [
                            f"{path}.qkv  shard(col, blocks=[{q}, {k}, {k}], over={axis})",
                            f"{path}.o  shard(row, over={axis})",
                        ]
                        steps += [
                            step("shard", rows, claim, [axis]),
                            step("shard", rows[1:], claim, [axis]),
                        ]
                    else:
                        steps += _column_row(path, ["q", "k", "v"], "o", axis)
                case "chain" | "twice" if divides:
                    steps += _column_row(path, ["lin"], "lin", axis)[1:]
            if length % n == 0 and block.kind in ("mlp", "used"):
                steps += _sequence(path, block, axis, n)
            if (block.paired or block.kind == "custom") and block.hidden % n == 0:
                placements = "weight=S(out), bias=S(out), input=R, output=S(-1)"
                rows = [
                    f"{path}.up  shard({placements}, over={axis})",
                    f"{path}.down  shard(row, over={axis})",
                ]
                steps.append(step("shard", rows, [*claim, f"terms {path}"], [axis]))
            steps += _uneven(path, block, axis, n)
        steps += _embedding_and_head(config, axis, n)
    return steps


def sequence_slices(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Shard part of the trunk along the sequence: one module, or all from one to the next.  Not
    all of them are legal if something is used twice or the model has other outputs."""
    axes = [a for a in ("tp", "up") if length % sizes.get(a, length + 1) == 0]
    return [slice_step for axis in axes for slice_step in _sequence_slices_over(config, axis)]


def _sequence_slices_over(config: Config, axis: str) -> list[Step]:
    into = f"shard(input=R, output=S(seq), over={axis})"
    out_of = f"shard(input=S(seq), output=R, over={axis})"
    steps = [
        step("shard", [f"{module_path}  {out_of}"], [f"shard {module_path}", "head whole"], [axis])
        for module_path in ("head", "norm")
    ]
    tokenwise = [k for k, b in enumerate(config.blocks) if b.kind in TOKENWISE]
    for k in tokenwise:
        steps.append(step("shard", [f"{_at(k)}  {out_of}"], [f"shard {_at(k)}"], [axis]))
    if len(tokenwise) == len(config.blocks):
        rows = [f"embed  {into}", f"norm  {out_of}"]
        claims = ["shard embed", "shard norm", *(f"shard {_at(k)}" for k in tokenwise)]
        steps.append(step("shard", rows, claims, [axis]))
    return steps


def _uneven(path: str, block: Block, axis: str, n: int) -> list[Step]:
    """Sizes that ranks do not divide: padded, or key-value heads replicated on several ranks."""
    claim = [f"shard {path}", "zero cp"]  # context parallelism exchanges full heads
    if block.paired and block.hidden % n:
        rows = [
            f"{path}.{layer}, over={axis}, uneven=pad)"
            for layer in ("up  shard(col", "down  shard(row")
        ]
        return [step("shard", rows, claim, [axis])]
    if block.kind != "attention" or block.fused or block.groups % n == 0:
        return []
    options = f", over={axis}, heads={block.groups}, uneven="
    if block.heads % n == 0 and n % block.groups == 0:
        ends = [f"{path}.{layer}, over={axis})" for layer in ("q  shard(col", "o  shard(row")]
        keys = [f"{path}.{layer}  shard(col{options}replicate)" for layer in "kv"]
        return [step("shard", [*keys, *ends], claim, [axis])]
    if block.groups == 1:
        return []
    rows = [f"{path}.{layer}  shard(col{options}pad)" for layer in "qkv"]
    return [step("shard", [*rows, f"{path}.o  shard(row{options}pad)"], claim, [axis])]


def _sequence(path: str, block: Block, axis: str, n: int) -> list[Step]:
    """Shard the norm, or the block, along the sequence."""
    norm = f"{path}.norm  shard(input=S(seq), output=S(seq), over={axis})"
    rows = [
        norm,
        f"{path}.{block.up}  shard(col, over={axis})",
        f"{path}.down  shard(row, output=S(seq), over={axis})",
        f"{path}  shard(input=S(seq), output=R, over={axis})",
    ]
    steps = [
        step(
            "shard",
            [f"{path}.norm  shard(input=S(seq), output=R, over={axis})"],
            [f"shard {path}"],
            [axis],
        )
    ]
    if block.pre and block.hidden % n == 0:
        steps.append(step("shard", rows, [f"shard {path}"], [axis]))
    return steps


def _embedding_and_head(config: Config, axis: str, n: int) -> list[Step]:
    """Shard embedding and head."""
    steps: list[Step] = []
    if config.entry == "floats":
        return _column_row("", ["embed"], "embed", axis)[1:] if config.width % n == 0 else []
    pads = [f"embed  pad(vocab, multiple={n})"] if config.vocab % n else []
    embed_row, head = f"embed  shard(vocab, over={axis})", f"head  shard(vocab, over={axis})"
    if config.tied:
        return [step("shard", [*pads, embed_row, head], ["shard embed", "shard head"], [axis])]
    steps.append(step("shard", [*pads, embed_row], ["shard embed"], [axis]))
    pads = [f"head  pad(out, multiple={n})"] if config.vocab % n else []
    steps.append(step("shard", [*pads, head], ["shard head"], [axis]))
    if not pads:
        gathered = f"head  shard(col, output=R, over={axis})"
        steps.append(step("shard", [gathered], ["shard head", "head whole"], [axis]))
    return steps


TOKENWISE = ("chain", "mlp", "used", "experts", "twice", "custom")  # kinds that do not mix tokens


@generator
def context_parallel(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Context parallelism of all attentions, if nothing else mixes tokens; the loss is a mean."""
    mixing = [(k, b) for k, b in enumerate(config.blocks) if b.kind not in TOKENWISE]
    own_loss = config.returns == "tuple" and config.entry == "floats"
    supported = [block.kind == "attention" and block.flag for _, block in mixing]
    if "cp" not in sizes or not mixing or own_loss or not all(supported):
        return []
    heads = sizes["cp"] * sizes.get("tp", 1)  # heads of a tensor-parallel rank are divided again
    heads_divide = all(block.heads % heads == 0 for _, block in mixing)
    methods = ["gather, over=cp", "ring, over=cp, layout=zigzag", "ring, over=cp, layout=striped"]
    methods += ["gather, over=cp, layout=contiguous"] + ["ulysses, over=cp"] * heads_divide
    world = math.prod(sizes[axis] for axis in ("cp", "cq") if axis in sizes)
    two_axis_methods = [
        "double_ring",
        "nbody",
        *["usp"] * all(b.heads % world == 0 for _, b in mixing),
    ]
    choices = [(method, ["cp"]) for method in methods]
    if "cq" in sizes and length >= world:  # a token for every rank
        choices += [(f"{method}, over=(cp, cq)", ["cp", "cq"]) for method in two_axis_methods]
    return [
        step(
            "context_parallel",
            [f"{_at(k)}  context_parallel({method})" for k, _ in mixing],
            ["zero cp"],
            axes,
        )
        for method, axes in choices
    ]


@generator
def complete(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """One shard row of a block, completed by `complete`."""
    steps, n = [], sizes.get("tp", 0)
    equal_blocks = (
        len(config.blocks) > 1 and len(set(config.blocks)) == 1
    )  # so that pairs are of a block
    for index, block in enumerate(config.blocks if n and equal_blocks else ()):
        path, first_layer = _at(index), ""
        if (block.paired or block.kind == "custom") and block.hidden % n == 0:
            first_layer = "up"
        elif block.kind == "attention" and block.heads % n == 0 and block.groups % n == 0:
            first_layer = "" if block.fused else "k"
        if first_layer:
            rows = [f"{path}.{first_layer}  shard(col, over=tp)", "complete(over=tp)"]
            steps.append(step("complete", rows, ["complete", f"shard {path}"], ["tp"]))
    return steps


@generator
def grid(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Blocks, embedding and head on a grid of two axes, if sizes divide."""
    rows, columns = sizes.get("dp", 0), sizes.get("tp", 0)
    steps: list[Step] = []
    least_multiple = math.lcm(rows, columns) if rows and columns else 0
    if not least_multiple or config.width % least_multiple:
        return []
    for index, block in enumerate(config.blocks):
        path, claim = _at(index), [f"shard {_at(index)}", f"kernel {_at(index)}"]
        norm = block.pre and block.norm in ("layer", "rms")
        norm_rows = [f"{path}.norm  grid(summa, over=(dp, tp))"] if norm else []
        inner, heads = block.heads * block.size, block.groups * block.size
        if block.paired and block.hidden % least_multiple == 0:
            pair = [
                f"{path}.up  grid(summa, over=(dp, tp))",
                f"{path}.down  grid(summa, output=R, over=(dp, tp))",
            ]
            steps += [
                step("grid", grid_rows, claim, ["tp"]) for grid_rows in ([*norm_rows, *pair], pair)
            ]
        divides = block.heads % columns == 0 and block.groups % columns == 0
        if block.kind == "attention" and divides and inner % least_multiple == 0:
            ups = [f"{path}.{{q,k,v}}  grid(summa, over=(dp, tp))"]
            if block.fused:
                blocks = f"[{inner}, {heads}, {heads}]"
                ups = [f"{path}.qkv  grid(summa, blocks={blocks}, over=(dp, tp))"]
            last = f"{path}.o  grid(summa, output=R, over=(dp, tp))"
            steps.append(step("grid", [*norm_rows, *ups, last], claim, ["tp"]))
    return steps + _vocab_grid(config, columns)


def _vocab_grid(config: Config, columns: int) -> list[Step]:
    """Embedding and head on a grid, tied or not."""
    if config.entry != "words":
        return []
    pads = [f"embed  pad(vocab, multiple={columns})"] if config.vocab % columns else []
    embed_row = "embed  grid(summa, output=R, over=(dp, tp))"
    head = "head  grid(summa, output=S(vocab), over=(dp, tp))"
    if config.tied:
        claims = ["shard embed", "shard head", "head whole"]
        return [step("grid", [*pads, embed_row, head], claims, ["tp"])]
    head_pads = [f"head  pad(out, multiple={columns})"] if config.vocab % columns else []
    return [
        step("grid", [*pads, embed_row], ["shard embed"], ["tp"]),
        step("grid", [*head_pads, head], ["shard head", "head whole"], ["tp"]),
    ]


@generator
def expert_parallel(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Expert parallelism of stacked experts, if divisible; data axes are left to `zero`."""
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
            [f"{_at(index)}.experts  expert_parallel(over={axis}, inner=tp)"],
            [f"shard {_at(index)}"],
            ["tp"],
        )
        for index, block in enumerate(config.blocks)
        for axis in ("dp", "ep")
        if block.kind == "routed"
        and block.count % sizes.get(axis, block.count + 1) == 0
        and "tp" in sizes
        and block.hidden % sizes["tp"] == block.hidden % 2 == 0  # it is probed in halves
    ]
    return halves + [
        step(
            "expert_parallel",
            [f"{_at(index)}.experts  expert_parallel(over={axis}{option})"],
            [f"shard {_at(index)}"],
            [axis] if axis in ("tp", "up") else [],
        )
        for index, block in enumerate(config.blocks)
        for axis in ("dp", "ep", "tp", "up")
        for option in options
        if block.kind == "routed" and block.count % sizes.get(axis, block.count + 1) == 0
    ]
