"""Drawn schedules: meshes of unequal axes, and small steps from a generator for each primitive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from schedlang.pipeline.schedules import ORDERS, Size, default_chunks, make_order
from schedlang.pipeline.timeline.table import Kind
from tests.properties import splits
from tests.properties.drawn import GENERATORS, PHASES, RELAX, Axes, Drawn, Step, generator, step
from tests.properties.drawn import block_path as _at
from tests.properties.models import Block, Config, configs
from tests.properties.splits import context_parallel

__all__ = [
    "GENERATORS",
    "MESHES",
    "PHASES",
    "RELAX",
    "Axes",
    "Config",
    "Drawn",
    "Step",
    "allowed",
    "context_parallel",
    "generator",
    "legal",
    "splits",
    "step",
    "without",
]


TIED = {"mlp": '"up.weight", "up.bias"', "chain": '"lin.weight"', "custom": '"up.weight"'}


@generator
def tie(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Blocks that are alike, next to each other or not; both then lie as one does."""
    found = []
    for place, block in enumerate(config.blocks):
        for other in range(place + 1, len(config.blocks)):
            at, to = _at(place), _at(other)
            alike = config.blocks[other] == block and config.use != "same"
            if alike and not config.frozen.startswith("blocks"):
                claims = [
                    "tie",
                    *(
                        f"{verb} {one}"
                        for verb in ("shard", "late", "kernel", "parameters")
                        for one in (at, to, f"{at}.experts.*", f"{to}.experts.*")
                    ),
                ]
                for names in ("", TIED.get(block.kind, "")):
                    found.append(step("tie", [f"{at}, {to}  tie({names})"], [*claims, "freeze"]))
    return found


@generator
def untie(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """The head, where it shares the embedding's weight."""
    return [
        step("untie", ["head  untie(weight)"], ["untie", "shard embed", "shard head", "freeze"])
        for _ in range(config.tied)
    ]


@generator
def freeze(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """A block, or all but the head; not what the model has frozen itself."""
    found = []
    late = [f"late {_at(place)}" for place in range(len(config.blocks))]
    for place, wait in enumerate(late):  # no gradient of its weights waits
        if config.frozen != ("blocks.0" if config.use == "same" else _at(place)):
            for names in ("", '"*bias", "norm.*"'):
                row = f"{_at(place)}  freeze({names if config.blocks[place].kind == 'mlp' else ''})"
                found += [step("freeze", [row], ["freeze", wait])]
    return [*found, step("freeze", ['freeze(keep="head.*")'], ["freeze", *late])]


@generator
def adapt(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Adapters at the projections of a block; the head is trained as before, or nothing else is."""
    found = []
    late = [f"late {_at(place)}" for place in range(len(config.blocks))]
    for place, block in enumerate(config.blocks):
        if block.kind == "mlp" and not config.frozen:
            at = _at(place)
            verbs = ("replace", "kernel", "decompose", "parameters", "terms")
            claims = [f"{verb} {at}" for verb in verbs]
            for words in (
                'lora, rank=2, keep="head.*"',
                "lora, rank=1, alpha=3, dropout=0.25",
                "dora, rank=2, seed=3",
                "lora, rank=2, base=int8, block=2",
                "lora, rank=1, base=int4",
                "dora, rank=2, base=nf4",
            ):
                row = f"{at}.up, {at}.down  adapt({words})"
                found.append(step("adapt", [row], [*claims, "tie", "freeze", *late]))
    return found


@generator
def pad(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Padding that nothing needs; what a split needs comes with the split."""
    if config.entry != "words":
        return []
    return [
        step("pad", [f"embed  pad(vocab, multiple={k})"], ["shard embed", "shard head"])
        for k in (4, 7)
    ]


@generator
def checkpoint(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """At blocks, and inside of them; not where buffers are written."""
    found = []
    for place, block in enumerate(config.blocks):
        if block.kind == "counting" or (block.kind == "conv" and block.norm == "batch"):
            continue
        at = _at(place)
        inner = {
            "mlp": "up",
            "used": block.up,
            "attention": "o",
            "experts": "experts.0",
            "conv": "conv",
            "custom": "down",
        }.get(block.kind)
        rows = [
            f"{at}  checkpoint()",
            f"{at}  checkpoint(save=[linear])",
            f"{at}  checkpoint(save=[linear, attention, collective])",
        ]
        rows += [f"{at}.{inner}  checkpoint()"] if inner else []
        found += [step("checkpoint", [row], [f"checkpoint {at}"]) for row in rows]
    return found + _regions(config, sizes)


def _regions(config: Config, sizes: dict[str, int]) -> list[Step]:
    """All blocks in groups, every second of them, or as a plan has it; no cut falls in a group."""
    count = len(config.blocks)
    fits = not any(b.kind == "counting" or b.norm == "batch" for b in config.blocks)
    if count < 2 or not fits:
        return []
    claims = [f"{verb} {_at(place)}" for verb in ("checkpoint", "unroll") for place in range(count)]
    ways = ["every=2", "plan=rotor, memory=1MiB", "plan=pareto, memory=1MiB"]
    if sizes.get("pp", 1) == 1:
        ways += ["plan=adapipe, memory=1MiB"]  # with stages it is the only one that says where
        ways += ["group=2", "group=sqrt", "group=2, every=2, save=[linear]"]
    found = [step("checkpoint", [f"blocks.*  checkpoint({way})"], claims) for way in ways]
    alone = [f"{verb} {_at(place)}" for verb in ("offload", "parameters") for place in range(count)]
    rows = [
        "blocks.*  checkpoint(plan=dtr, memory=1MiB)",
        "blocks.*  checkpoint(plan=pofo, memory=1MiB, bandwidth=9TiB, tflops=9)",
    ]
    return [*found, *(step("checkpoint", [row], [*claims, *alone]) for row in rows)]


@generator
def offload(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """At blocks, with and without looking ahead; parameters also all, gradients and state all.

    State that a peer holds is not that of streamed parameters, nor beside files; activations that
    it holds are of whole sequences, and of orders that park nothing by themselves.
    """
    found, every = [], [f"parameters {_at(place)}" for place in range(len(config.blocks))]
    for place, own in enumerate(every):
        at = _at(place)
        for more in (", to=cpu", ", prefetch=0", ", to=disk, prefetch=2"):
            found.append(step("offload", [f"{at}  offload(activations{more})"], [f"offload {at}"]))
        for more in (", to=peer, over=pp", ", to=peer, over=pp, prefetch=0")[: 2 * ("pp" in sizes)]:
            row = f"{at}  offload(activations{more})"
            found.append(step("offload", [row], [f"offload {at}", f"lent {at}"], ["pp"]))
        for more in ("", ", to=disk"):
            found.append(step("offload", [f"{at}  offload(parameters{more})"], [own]))
    return [
        *found,
        step("offload", ["offload(parameters)"], every),
        *(step("offload", [f"offload(gradients{to})"], ["leaving"]) for to in ("", ", to=disk")),
        *(step("offload", [f"offload(optimizer{to})"], ["optimizer"]) for to in ("", ", to=disk")),
        *(
            step("offload", ["offload(optimizer, to=peer, over=pp)"], ["optimizer", *every], ["pp"])
            for _ in range("pp" in sizes)
        ),
    ]


@generator
def fuse(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """At blocks without functions of their own, and of these what patterns say; in float64 a
    region of inductor runs eagerly, and a chain of rows by torch."""
    found = []
    for place, block in enumerate(config.blocks):
        at, claim = _at(place), [f"kernel {_at(place)}"]
        if block.kind in ("mlp", "chain", "twice", "writing"):
            for how in ("", "backend=inductor", "rounding=eager"):
                found.append(step("fuse", [f"{at}  fuse({how})"], claim))
        if block.kind == "mlp":
            rows = [f"{at}.up  decompose(bias)", f'{at}  fuse("p(x, b) {{ gelu(x + b) }}")']
            found.append(step("fuse", rows, [*claim, f"replace {at}", f"decompose {at}"]))
            for how in ("", ", backend=rowwise"):
                rows = [f'{at}  fuse("p(x, y) {{ x + dropout(y) }}"{how})']
                found.append(step("fuse", rows, [*claim, f"replace {at}"]))
            rows = [f"{at}.norm  fuse(backend=rowwise)"]
            found.append(step("fuse", rows, [*claim, f"replace {at}"]))
    return found


@generator
def decompose(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """At linear layers with a bias, whatever is done to them; a chain that is replaced has none."""
    found = []
    for place, block in enumerate(config.blocks):
        at = _at(place)
        if block.paired:
            found.append(step("decompose", [f"{at}.up  decompose(bias)"], [f"decompose {at}"]))
        if block.kind == "chain":
            claims = [f"decompose {at}", f"replace {at}"]
            found.append(step("decompose", [f"{at}.lin  decompose(bias)"], claims))
    return found


@generator
def replace_(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Pairs of layers that keep their names, single layers that get others and stay whole."""
    names = {"mlp": "other_mlp", "chain": "other_chain"}
    return [
        step(
            "replace",
            [f"{_at(place)}  replace({names[block.kind]})"],
            [f"replace {_at(place)}", *([f"shard {_at(place)}"] if block.kind == "chain" else [])],
        )
        for place, block in enumerate(config.blocks)
        if block.kind in names
    ]


@generator
def replace_kernel(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """At norms, at sums with norms, at experts in one module, at attentions that torch computes or
    that turn their queries, at a head whose loss the model computes."""
    found = [
        step("replace_kernel", rows, [f"kernel {_at(place)}"])
        for place, block in enumerate(config.blocks)
        for rows in _kernels(_at(place), block, config.width, "cp" in sizes)
    ]
    if config.entry == "words" and config.returns != "tuple":
        for kernel, claim in (
            ("linear_cross_entropy", "head whole"),
            ("linear_cross_entropy, chunk=64B", "head whole"),
            ("cross_entropy", "shard head"),
        ):
            found.append(
                step("replace_kernel", [f"head  replace_kernel({kernel})"], ["kernel head", claim])
            )
    return found


def _kernels(at: str, block: Block, width: int, context: bool) -> list[list[str]]:
    """The rows of each step of one block."""
    found = []
    # of two numbers a layer norm keeps the sign: its gradients are roundings, and no probe tells
    tells = width > 2 or block.norm == "rms"
    if (block.paired or block.kind == "attention") and tells:
        found.append([f"{at}.norm  replace_kernel({block.norm}_norm)"])
    sums = block.kind == "mlp" or (block.kind == "attention" and block.flag)
    if not block.pre and sums and tells:
        found.append([f"{at}  replace_kernel(add_norm)"])
    if block.kind == "routed":
        found.append([f"{at}.experts  replace_kernel(grouped)"])
    flex = f"{at}  replace_kernel(flex_attention)"
    attends = block.kind == "attention" and (block.flag or not block.plain) and not context
    if attends:
        found.append([flex])
    if block.turns:
        turn = f"{at}  replace_kernel(rope)"
        found += [[turn], [turn, flex], [flex, turn]][: 3 if attends else 1]
    return found


@generator
def cast(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """In the limit, where nothing is rounded: the model or a block, with and without its norm.

    Gradients of a scaled loss are not compressed.
    """
    found = [
        step("cast", [row], ["cast", *(["compress"] if "fp16" in row else [])])
        for row in ("cast(bf16)", "cast(fp16, scale=1024, growth=1)", "cast(bf16, params=true)")
    ]
    for place, block in enumerate(config.blocks):
        at, claims = _at(place), [f"replace {_at(place)}", "cast"]
        found.append(step("cast", [f"{at}  cast(fp16, params=true)"], [*claims, "compress"]))
        if block.kind in ("mlp", "attention"):
            rows = ["cast(bf16, params=true)", f"{at}.norm  cast(fp32)"]
            found.append(step("cast", rows, claims))
    return found


@generator
def unroll(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """What a block calls twice, so that stages may meet inside it; and blocks called once."""
    found = []
    for place, block in enumerate(config.blocks):
        at = _at(place)
        row = f"{at}.lin  unroll(2)" if block.kind == "twice" else f"{at}  unroll(1)"
        # a region that is recomputed or fused as one cannot be cut
        found.append(step("unroll", [row], [f"unroll {at}", f"checkpoint {at}", f"kernel {at}"]))
    return found


@generator
def pipeline_split(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """The list of blocks, or blocks at which stages start."""
    stages, count = sizes.get("pp", 0), len(config.blocks)
    if not stages or count < stages:
        return []
    rows = [
        "blocks  pipeline_split(over=pp)",
        "blocks  pipeline_split(over=pp, balance=params)",
        "blocks  pipeline_split(over=pp, balance=time)",
        "blocks  pipeline_split(over=pp, balance=memory)",
    ]
    if stages > 1:
        last = ", ".join(str(k) for k in range(count - stages + 1, count))
        rows.append(f"blocks[{last}]  pipeline_split(over=pp)")
    # a block that is unrolled would be cut by its calls
    once = [f"unroll {_at(place)}" for place in range(count)]
    found = [
        step("pipeline_split", [row], ["cut", *(once if "[" in row else ())], ["pp"])
        for row in rows
    ]
    if not config.tied:  # no row may tie weights beside it
        row = "blocks  pipeline_split(over=pp, tied=refuse)"
        found.append(step("pipeline_split", [row], ["cut", "tie"], ["pp"]))
    return found


@generator
def pipeline(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Every order that gives up rounding alone, where there are blocks enough for its stages."""
    found = []
    ranks, lent = sizes.get("pp", 1), [f"lent {_at(place)}" for place in range(len(config.blocks))]
    for known in ORDERS:
        fits = default_chunks(known.name) * ranks <= len(config.blocks)
        if known.relaxed or known.sliced or not fits:
            continue
        for micro in (1, 2, 3, 4):
            if ranks == 1 or known.problem(Size(ranks, micro, default_chunks(known.name))) is None:
                row = f'pipeline(order="{known.name}", micro={micro})'
                claims = lent if _parks(known.name, ranks, micro) else []
                found.append(step("pipeline", [row], ["order", *claims]))
    return found


@cache
def _parks(name: str, ranks: int, micro: int) -> bool:
    """Whether an order says by itself what its forwards keep."""
    kinds = make_order(name, ranks, micro).kind.tolist() if ranks > 1 else ()
    return any(kind in kinds for kind in (Kind.EVICT, Kind.OFFLOAD, Kind.RECOMPUTE))


@generator
def split_backward(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Some blocks, whose weight gradients wait."""
    return [
        step("split_backward", [f"{_at(place)}  split_backward()"], [f"late {_at(place)}"])
        for place in range(len(config.blocks))
    ]


@generator
def overlap(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Transfers, where there are stages; gradients anywhere."""
    found = [step("overlap", ["overlap(gradients)"], ["overlap"])]
    if sizes.get("pp", 1) > 1:
        rows = ["overlap(transfers, ahead=0)", "overlap(transfers, gradients, ahead=3)"]
        found += [step("overlap", [row], ["overlap"], ["pp"]) for row in rows]
    return found


GATHERS = ("3, prefetch=1", "3, reshard=false", "3, prefetch=2, reshard=false")


def _uneven(ranks: int) -> tuple[str, str]:
    """Stages whose ranks get unlike numbers of rows."""
    return f"1, rows={[2, *[1] * (ranks - 1)]}", f"3, rows={[*[1] * (ranks - 1), 2]}"


@generator
def zero(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Every stage over each data axis, and over both folded."""
    data = [axis for axis in ("dp", "ep") if axis in sizes]
    found = [
        step(
            "zero",
            [f"zero(stage={stage}, over={axis})"],
            [f"zero {axis}", *(["sliced"] if stage else [])],
            [axis],
        )
        for axis in data
        for stage in (0, "0, bucket=1KiB", 1, 2, 3, *GATHERS, *_uneven(sizes[axis]))
    ]
    if len(data) == 2:
        both, claims = ", ".join(data), ["zero dp", "zero ep", "sliced"]
        found += [
            step("zero", [f"zero(stage={stage}, over=({both}))"], claims, data) for stage in (3, 1)
        ]
    return found


@generator
def compress(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Each data axis, in the limit: a rank so high that nothing is left out."""
    return [
        step(
            "compress",
            [
                f"zero(stage=0, over={axis})",
                f"compress(gradients, powersgd, over={axis}, rank=1000)",
            ],
            ["compress", f"zero {axis}"],
            [axis],
        )
        for axis in ("dp", "ep")
        if axis in sizes
    ]


def fewer_bits(config: Config) -> list[Step]:
    """What blocks save, where nothing else decides of it.  Of no use where a property compares
    layouts with each other: what is left out depends on how the batch is cut."""
    found = []
    for place in range(len(config.blocks)):
        at = _at(place)
        claims = [f"{verb} {at}" for verb in ("checkpoint", "kernel", "replace")]
        claims += [f"{verb} {at}" for verb in ("decompose", "unroll", "parameters")]
        codes = ("int8", "int4", "int2", "adaptive", "adaptive, bits=3")
        rows = [f"{at}  compress(activations, {code}, block=8)" for code in codes]
        again = [f"{at}  checkpoint()", f"{at}  compress(activations, int4, block=8)"]
        found += [step("compress activations", [row], claims) for row in rows]
        found.append(step("compress activations", again, claims))
    return found


def coarse_sums(config: Config, sizes: dict[str, int]) -> list[Step]:
    """Codes of gradients that leave something out, over each data axis."""
    codes = (
        "int8, block=8",
        "onebit, block=8",
        "powersgd, rank=1",
        "int8, error_feedback=false",
        "onebit, block=16, error_feedback=false",
    )
    return [
        step(
            "compress",
            [f"zero(stage=0, over={axis})", f"compress(gradients, {code}, over={axis})"],
            ["compress", f"zero {axis}"],
            [axis],
        )
        for axis in ("dp", "ep")
        if axis in sizes
        for code in codes
    ]


@generator
def verify(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Markers, which change nothing."""
    rows = [
        "verify(forward)",
        "verify(forward, backward)",
        "verify(train, steps=3)",
        "verify(forward, mode=eval)",
        "verify(forward, rtol=1e-3)",
        "verify(loss, within=0.5, steps=2)",
        "verify(exact)",
    ]
    return [step("verify", [row], ["verify"]) for row in rows]


MESHES: tuple[Axes, ...] = (
    (("tp", 1),),
    (("tp", 2),),
    (("dp", 2),),
    (("pp", 2),),
    (("tp", 3),),
    (("dp", 3),),
    (("pp", 3),),
    (("dp", 1), ("tp", 2)),
    (("tp", 2), ("dp", 1)),
    (("dp", 2), ("tp", 2)),
    (("pp", 2), ("tp", 2)),
    (("pp", 2), ("dp", 2)),
    (("tp", 2), ("up", 2)),
    (("dp", 2), ("ep", 2)),
    (("dp", 4),),
    (("tp", 4),),
    (("dp", 3), ("tp", 2)),
    (("tp", 3), ("dp", 2)),
    (("pp", 2), ("tp", 3)),
    (("dp", 3), ("pp", 2)),
    (("dp", 1), ("pp", 3), ("tp", 2)),
    (("cp", 2),),
    (("cp", 2), ("tp", 2)),
    (("cp", 2), ("cq", 2)),
)


# few meshes, sizes or blocks offer such a row
SELDOM = ("context_parallel", "expert_parallel", "complete", "tie", "grid")
UNEVEN = ("pad", "replicate")


def allowed(chosen: Sequence[Step], config: Config, axes: Axes) -> tuple[Step, ...]:
    """Those that stand together: of two that exclude each other the first."""
    kept: list[Step] = []
    for one in chosen:
        if not any(one.claims & other.claims for other in kept):
            kept.append(one)
    sizes = dict(axes)
    if sizes.get("pp", 1) > 1 and not any(s.verb == "pipeline_split" for s in kept):
        kept.append(pipeline_split(config, sizes, 0)[0])
    return tuple(kept)


@st.composite
def legal(
    draw: st.DrawFn, meshes: Sequence[Axes] = MESHES, most: int = 8, *, used: bool = False
) -> Drawn:
    """A model, a mesh and rows that are legal for it; `used`: of a model that uses something twice,
    with rows that split one of the uses, which may be refused (`Drawn.may`)."""
    axes = draw(st.sampled_from(list(meshes)))
    sizes = dict(axes)
    widest = max(sizes.get("tp", 1), sizes.get("up", 1))
    config = draw(configs(widest, sizes.get("pp", 1), context="cp" in sizes, used=used))
    length = draw(st.sampled_from([3, 4, 5]))
    offers = {verb: make(config, sizes, length) for verb, make in GENERATORS.items()}
    verbs = [verb for verb, steps in offers.items() if steps]
    one = st.sampled_from(verbs).flatmap(lambda verb: st.sampled_from(offers[verb]))
    chosen = draw(st.lists(one, max_size=most))
    for axis in ("tp", "up"):  # mostly used as what they are
        mine = [s for s in offers["shard"] if axis in s.axes]
        if sizes.get(axis, 1) > 1 and mine and draw(st.integers(0, 4)) < 4:
            chosen.insert(0, draw(st.sampled_from(mine)))
    wide = [s for s in offers["checkpoint"] if s.rows[0].startswith("blocks.*")]
    lines = splits.along(config, sizes, length) if used else []
    odd = [[s for s in offers["shard"] if f"uneven={how}" in s.rows[0]] for how in UNEVEN]
    for few in (*(offers[verb] for verb in SELDOM), wide, *odd, lines):
        if few and draw(st.booleans()):
            chosen.insert(0, draw(st.sampled_from(few)))
    steps = allowed(chosen, config, axes)
    spare = draw(st.sampled_from([0, 1, 2]))
    return Drawn(config, axes, steps, spare, length, used=used)


def without(drawn: Drawn, gone: Step) -> Drawn:
    """The same without one step."""
    left = tuple(s for s in drawn.steps if s != gone)
    return replace(drawn, steps=allowed(left, drawn.config, drawn.axes))
