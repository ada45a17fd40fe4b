"""Drawn schedules: meshes of unequal axes, and small steps from a generator for each primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from schedlang.orders import ORDERS, Size, chunks_of
from tests.properties.models import Block, Config, Short, configs

# verbs in the order in which their rows may stand
PHASES = (
    *("tie", "untie", "freeze"),
    *("replace", "replace_kernel", "fuse", "pad", "shard", "grid", "complete"),
    *("context_parallel", "expert_parallel"),
    *("checkpoint", "offload", "unroll"),
    *("pipeline_split", "split_backward", "zero", "compress", "overlap", "pipeline", "verify"),
)
# what the step of a verb must allow
RELAX = {"freeze": "updates", "tie": "model", "untie": "model", "compress": "lossy"}
Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, order=True)
class Step:
    """Some rows that belong together.  Two steps with a claim in common exclude each other."""

    verb: str
    rows: tuple[str, ...]
    claims: frozenset[str] = field(compare=False)
    axes: frozenset[str] = field(default=frozenset(), compare=False)

    def __str__(self) -> str:
        return "\n".join(self.rows)


def step(verb: str, rows: Sequence[str], claims: Sequence[str], axes: Sequence[str] = ()) -> Step:
    """A step in few words."""
    return Step(verb, tuple(rows), frozenset(claims), frozenset(axes))


@dataclass(frozen=True, repr=False)
class Drawn(Short):
    """A model and a schedule for it.

    `rows` and `length` are of the first batch; the second, equal-sized, has one row more.
    """

    config: Config
    axes: Axes
    steps: tuple[Step, ...] = ()
    spare: int = 0  # rows above one for each part
    length: int = 3
    illegal: str = ""  # a row that must be refused

    @property
    def micro(self) -> int:
        """Microbatches of a step."""
        said = [s.rows[0] for s in self.steps if s.verb == "pipeline"]
        return int(said[0].split("micro=")[1].split(",")[0].rstrip(")")) if said else 1

    @property
    def parts(self) -> int:
        """Into how many parts a batch is split."""
        verbs = ("zero", "compress")  # the second brings a row of the first with it
        used = {axis for s in self.completed if s.verb in verbs for axis in s.axes}
        count = self.micro
        for axis, size in self.axes:
            count *= size if axis in used else 1
        return count

    @property
    def refused(self) -> str:
        """The code of the refusal that this must end in, or "": statistics over the batch need
        one part, averages over forwards one microbatch."""
        kinds = [(b.kind, b.norm == "batch", b.average) for b in self.config.blocks]
        whole = any(kind == "conv" and batch for kind, batch, _ in kinds) and self.parts > 1
        once = any(kind == "counting" and average for kind, _, average in kinds) and self.micro > 1
        return "S703" if whole else "S708" if once else ""

    @property
    def rows(self) -> int:
        """Rows of the first batch: enough for every part, mostly not divisible by their number."""
        return self.parts + self.spare

    @property
    def completed(self) -> tuple[Step, ...]:
        """The steps, and a row for each axis that they leave idle."""
        used = {axis for s in self.steps for axis in s.axes}
        idle = [axis for axis, size in self.axes if size > 1 and axis not in used]
        more = [step("zero", [f"zero(stage=0, over={a})"], [f"zero {a}"], [a]) for a in idle]
        return tuple(sorted((*self.steps, *more), key=lambda s: PHASES.index(s.verb)))

    @property
    def text(self) -> str:
        """The schedule file."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.axes)
        rows = [row for s in self.completed for row in s.rows]
        if self.illegal:
            rows.append(self.illegal)
        body = "\n".join(f"  {row}" for row in rows)
        names = sorted({RELAX[s.verb] for s in self.completed if s.verb in RELAX})
        relax = f"relax({', '.join(names)}) " if names else ""
        return f'schedule 1 for Drawn\n\nmesh({mesh})\n\nstep "all" {relax}{{\n{body}\n}}\n'

    @property
    def world(self) -> int:
        """The number of ranks."""
        out = 1
        for _, size in self.axes:
            out *= size
        return out


Generator = Callable[[Config, dict[str, int], int], list[Step]]
GENERATORS: dict[str, Generator] = {}


def generator(make: Generator) -> Generator:
    """Register the steps of the primitive of this name."""
    GENERATORS[make.__name__.rstrip("_")] = make
    return make


def _at(place: int) -> str:
    return f"blocks.{place}"


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
                case "mlp" | "custom" if block.hidden % n == 0:
                    found += _pair(at, ["up"], "down", axis)
                case "experts" if block.hidden % n == 0:
                    found += _pair(f"{at}.experts.*", ["up", "gate"], "down", axis)
                case "attention" if block.heads % n == 0 and block.groups % n == 0:
                    if block.fused:
                        q, k = block.heads * block.size, block.groups * block.size
                        rows = [f"{at}.qkv  shard(col, blocks=[{q}, {k}, {k}], over={axis})",
                                f"{at}.o  shard(row, over={axis})"]  # fmt: skip
                        found += [step("shard", rows, claim, [axis]),
                                  step("shard", rows[1:], claim, [axis])]  # fmt: skip
                    else:
                        found += _pair(at, ["q", "k", "v"], "o", axis)
                case "chain" | "twice" if wide:
                    found += _pair(at, ["lin"], "lin", axis)[1:]
            if length % n == 0 and block.kind == "mlp":
                found += _sequence(at, block, axis, n)
        found += _ends(config, axis, n)
    return found


def _sequence(at: str, block: Block, axis: str, n: int) -> list[Step]:
    """The norm, or the whole block, on parts of the sequence."""
    norm = f"{at}.norm  shard(input=S(seq), output=S(seq), over={axis})"
    rows = [norm, f"{at}.up  shard(col, over={axis})",
            f"{at}.down  shard(row, output=S(seq), over={axis})",
            f"{at}  shard(input=S(seq), output=R, over={axis})"]  # fmt: skip
    found = [step("shard", [f"{at}.norm  shard(input=S(seq), output=R, over={axis})"],
                  [f"shard {at}"], [axis])]  # fmt: skip
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
        found.append(step("shard", [gathered], ["shard head"], [axis]))
    return found


TOKENWISE = ("chain", "mlp", "experts", "twice", "custom")  # kinds that mix no tokens


@generator
def context_parallel(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """All attentions together, where nothing else mixes tokens and the loss is a mean over them."""
    mixing = [(k, b) for k, b in enumerate(config.blocks) if b.kind not in TOKENWISE]
    own = config.returns == "tuple" and config.entry == "floats"
    fit = [block.kind == "attention" and block.flag for _, block in mixing]
    if "cp" not in sizes or not mixing or own or not all(fit):
        return []
    whole = all(block.heads % sizes["cp"] == 0 for _, block in mixing)
    ways = ["gather, over=cp", "ring, over=cp, layout=zigzag", "ring, over=cp, layout=striped"]
    ways += ["ulysses, over=cp"] * whole
    return [
        step("context_parallel", [f"{_at(k)}  context_parallel({way})" for k, _ in mixing],
             ["zero cp"], ["cp"])
        for way in ways
    ]  # fmt: skip


@generator
def complete(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """One row of a block, and what follows from it."""
    found, n = [], sizes.get("tp", 0)
    alike = len(config.blocks) > 1 and len(set(config.blocks)) == 1  # so that pairs are of a block
    for place, block in enumerate(config.blocks if n and alike else ()):
        at, first = _at(place), ""
        if block.kind in ("mlp", "custom") and block.hidden % n == 0:
            first = "up"
        elif block.kind == "attention" and block.heads % n == 0 and block.groups % n == 0:
            first = "" if block.fused else "k"
        if first:
            rows = [f"{at}.{first}  shard(col, over=tp)", "complete(over=tp)"]
            found.append(step("complete", rows, ["complete", f"shard {at}"], ["tp"]))
    return found


@generator
def tie(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Blocks that are alike, next to each other or not; both then lie as one does."""
    found = []
    for place, block in enumerate(config.blocks):
        for other in range(place + 1, len(config.blocks)):
            at, to = _at(place), _at(other)
            if config.blocks[other] == block and not config.frozen.startswith("blocks"):
                claims = [
                    "tie",
                    *(f"{verb} {one}" for verb in ("shard", "late", "kernel") for one in (at, to)),
                ]
                found.append(step("tie", [f"{at}, {to}  tie()"], [*claims, "freeze"]))
    return found


@generator
def untie(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """The head, where it shares the embedding's weight."""
    return [step("untie", ["head  untie(weight)"], ["untie", "shard embed", "shard head", "freeze"])
            for _ in range(config.tied)]  # fmt: skip


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
        if block.kind == "mlp" and block.hidden % whole == 0:
            pair = [f"{at}.up  grid(summa, over=(dp, tp))",
                    f"{at}.down  grid(summa, output=R, over=(dp, tp))"]  # fmt: skip
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
        return [step("grid", [*pads, words, head], ["shard embed", "shard head"], ["tp"])]
    more = [f"head  pad(out, multiple={columns})"] if config.vocab % columns else []
    return [step("grid", [*pads, words], ["shard embed"], ["tp"]),
            step("grid", [*more, head], ["shard head"], ["tp"])]  # fmt: skip


@generator
def freeze(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """A block, or all but the head; not what the model has frozen itself."""
    found = []
    late = [f"late {_at(place)}" for place in range(len(config.blocks))]
    for place, wait in enumerate(late):  # no gradient of its weights waits
        if config.frozen != _at(place):
            found += [step("freeze", [f"{_at(place)}  freeze()"], ["freeze", wait])]
    return [*found, step("freeze", ['freeze(keep="head.*")'], ["freeze", *late])]


@generator
def pad(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Padding that nothing needs; what a split needs comes with the split."""
    if config.entry != "words":
        return []
    return [step("pad", [f"embed  pad(vocab, multiple={k})"], ["shard embed", "shard head"])
            for k in (4, 7)]  # fmt: skip


@generator
def expert_parallel(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Stacked experts, where their number divides; an axis of data is left to `zero`."""
    options = ("", ", chunks=2", ", dispatch=fetch", ", shadow=[1, 2]")
    return [
        step("expert_parallel", [f"{_at(place)}.experts  expert_parallel(over={axis}{more})"],
             [f"shard {_at(place)}"], [axis] if axis in ("tp", "up") else [])
        for place, block in enumerate(config.blocks)
        for axis in ("dp", "ep", "tp", "up")
        for more in options
        if block.kind == "routed" and block.count % sizes.get(axis, block.count + 1) == 0
    ]  # fmt: skip


@generator
def checkpoint(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """At blocks, and inside of them; not where buffers are written."""
    found = []
    for place, block in enumerate(config.blocks):
        if block.kind == "counting" or (block.kind == "conv" and block.norm == "batch"):
            continue
        at = _at(place)
        inner = {"mlp": "up", "attention": "o", "experts": "experts.0", "conv": "conv",
                 "custom": "down"}.get(block.kind)  # fmt: skip
        rows = [f"{at}  checkpoint()", f"{at}  checkpoint(save=[linear])",
                f"{at}  checkpoint(save=[linear, attention, collective])"]  # fmt: skip
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
    ways = ["every=2", "plan=rotor, memory=1MiB"]
    if sizes.get("pp", 1) == 1:
        ways += ["group=2", "group=sqrt", "group=2, every=2, save=[linear]"]
    return [step("checkpoint", [f"blocks.*  checkpoint({way})"], claims) for way in ways]


@generator
def offload(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """At blocks, with and without looking ahead."""
    return [
        step("offload", [f"{_at(place)}  offload(activations{more})"], [f"offload {_at(place)}"])
        for place in range(len(config.blocks))
        for more in (", to=cpu", ", prefetch=0")
    ]


@generator
def fuse(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """At blocks without functions of their own; in float64 a region runs eagerly."""
    return [
        step("fuse", [f"{_at(place)}  fuse()"], [f"kernel {_at(place)}"])
        for place, block in enumerate(config.blocks)
        if block.kind in ("mlp", "chain", "twice")
    ]


@generator
def replace_(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Pairs of layers that keep their names, single layers that get others and stay whole."""
    names = {"mlp": "other_mlp", "chain": "other_chain"}
    return [
        step("replace", [f"{_at(place)}  replace({names[block.kind]})"],
             [f"replace {_at(place)}", *([f"shard {_at(place)}"] if block.kind == "chain" else [])])
        for place, block in enumerate(config.blocks)
        if block.kind in names
    ]  # fmt: skip


@generator
def replace_kernel(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """At every RMSNorm."""
    return [
        step("replace_kernel", [f"{_at(place)}.norm  replace_kernel(rms_norm)"],
             [f"kernel {_at(place)}"])
        for place, block in enumerate(config.blocks)
        if block.kind in ("mlp", "attention") and block.norm == "rms"
    ]  # fmt: skip


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
    rows = ["blocks  pipeline_split(over=pp)", "blocks  pipeline_split(over=pp, balance=params)",
            "blocks  pipeline_split(over=pp, balance=time)",
            "blocks  pipeline_split(over=pp, balance=memory)"]  # fmt: skip
    if stages > 1:
        last = ", ".join(str(k) for k in range(count - stages + 1, count))
        rows.append(f"blocks[{last}]  pipeline_split(over=pp)")
    # a block that is unrolled would be cut by its calls
    once = [f"unroll {_at(place)}" for place in range(count)]
    return [
        step("pipeline_split", [row], ["cut", *(once if "[" in row else ())], ["pp"])
        for row in rows
    ]


@generator
def pipeline(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Every order that gives up rounding alone, where there are blocks enough for its stages."""
    found = []
    ranks = sizes.get("pp", 1)
    for known in ORDERS:
        fits = chunks_of(known.name) * ranks <= len(config.blocks)
        if known.relaxed or known.sliced or not fits:
            continue
        for micro in (1, 2, 3, 4):
            if ranks == 1 or known.problem(Size(ranks, micro, chunks_of(known.name))) is None:
                found.append(f'pipeline(order="{known.name}", micro={micro})')
    return [step("pipeline", [row], ["order"]) for row in found]


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


@generator
def zero(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Every stage over each data axis, and over both folded."""
    data = [axis for axis in ("dp", "ep") if axis in sizes]
    found = [
        step("zero", [f"zero(stage={stage}, over={axis})"],
             [f"zero {axis}", *(["sliced"] if stage else [])], [axis])
        for axis in data
        for stage in (0, 1, 2, 3)
    ]  # fmt: skip
    if len(data) == 2:
        both, claims = ", ".join(data), ["zero dp", "zero ep", "sliced"]
        found += [step("zero", [f"zero(stage={stage}, over=({both}))"], claims, data)
                  for stage in (3, 1)]  # fmt: skip
    return found


@generator
def compress(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Each data axis, in the limit: a rank so high that nothing is left out."""
    return [
        step("compress", [f"zero(stage=0, over={axis})",
                          f"compress(gradients, powersgd, over={axis}, rank=1000)"],
             ["compress", f"zero {axis}"], [axis])
        for axis in ("dp", "ep") if axis in sizes
    ]  # fmt: skip


@generator
def verify(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Markers, which change nothing."""
    rows = ["verify(forward)", "verify(forward, backward)", "verify(train, steps=3)"]
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
    (("dp", 3), ("tp", 2)),
    (("tp", 3), ("dp", 2)),
    (("pp", 2), ("tp", 3)),
    (("dp", 3), ("pp", 2)),
    (("dp", 1), ("pp", 3), ("tp", 2)),
    (("cp", 2),),
    (("cp", 2), ("tp", 2)),
)


def allowed(chosen: Sequence[Step], config: Config, axes: Axes) -> tuple[Step, ...]:
    """Those that stand together: of two that exclude each other the first."""
    kept: list[Step] = []
    for one in chosen:
        if not any(one.claims & other.claims for other in kept):
            kept.append(one)
    sizes = dict(axes)
    if sizes.get("pp", 1) > 1 and not any(s.verb == "pipeline_split" for s in kept):
        kept.append(pipeline_split(config, sizes, 0)[0])
    cut = any(s.verb == "pipeline_split" for s in kept)
    ranks = sizes.get("pp", 1) if cut else 1
    return tuple(s for s in kept if s.verb != "pipeline" or _runs(s, ranks, len(config.blocks)))


def _runs(one: Step, ranks: int, blocks: int) -> bool:
    return "Interleaved" not in one.rows[0]


@st.composite
def legal(draw: st.DrawFn, meshes: Sequence[Axes] = MESHES, most: int = 8) -> Drawn:
    """A model, a mesh and rows that are legal for it."""
    axes = draw(st.sampled_from(list(meshes)))
    sizes = dict(axes)
    config = draw(configs(max(sizes.get("tp", 1), sizes.get("up", 1)), sizes.get("pp", 1)))
    length = draw(st.sampled_from([3, 4, 5]))
    offers = {verb: make(config, sizes, length) for verb, make in GENERATORS.items()}
    verbs = [verb for verb, steps in offers.items() if steps]
    one = st.sampled_from(verbs).flatmap(lambda verb: st.sampled_from(offers[verb]))
    chosen = draw(st.lists(one, max_size=most))
    for axis in ("tp", "up"):  # mostly used as what they are
        mine = [s for s in offers["shard"] if axis in s.axes]
        if sizes.get(axis, 1) > 1 and mine and draw(st.integers(0, 4)) < 4:
            chosen.insert(0, draw(st.sampled_from(mine)))
    steps = allowed(chosen, config, axes)
    spare = draw(st.sampled_from([0, 1, 2]))
    return Drawn(config, axes, steps, spare, length)


def without(drawn: Drawn, gone: Step) -> Drawn:
    """The same without one step."""
    left = tuple(s for s in drawn.steps if s != gone)
    return replace(drawn, steps=allowed(left, drawn.config, drawn.axes))
