"""Rows drawn for any model: what `init` offers on each axis, bent a little, and rows at random."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.model import ModelFacts
from schedlang.passes.autoshard.propose import propose
from schedlang.passes.reduce_model.blocks import Blocks, blocks_of, leaf_kind
from schedlang.pipeline.schedules import ORDERS, OrderError, checked_size
from tests.drawn.models import subject
from tests.properties.drawn import PHASES, RELAX, Axes

MESHES: tuple[str, ...] = (
    "",
    "dp=2",
    "tp=2",
    "pp=2",
    "cp=2",
    "ep=2",
    "dp=2 tp=2",
    "dp=2 pp=2",
    "pp=2 tp=2",
    "dp=3",
    "pp=3",
    "tp=3",
    "tp=4",
    "dp=4",
    "pp=4",
    "dp=1 tp=2",
    "dp=2 cp=2",
    "dp=2 ep=2",
    "tp=2 cp=2",
    "ep=2 tp=2",
    "dp=3 tp=2",
    "dp=2 ep=2 tp=2",
    "dp=2 pp=2 tp=2",
    "dp=2 pp=2 cp=2",
    "dp=2 pp=4",
)
COMMON = (2, 6, 6, 8, 3, 3, 6, 6, 5, 2, 2, 1, 1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 3, 1, 1)
KERNELS = (
    "rms_norm",
    "layer_norm",
    "add_norm",
    "gated",
    "rope",
    "sdpa",
    "flex_attention",
    "grouped",
    "cross_entropy",
    "linear_cross_entropy",
)
LOSSY = ("int8, block=8", "powersgd, rank=2", "onebit, block=16", "int8, error_feedback=false")


@dataclass(frozen=True)
class Row:
    """One row, and the verb by which it is put in order."""

    verb: str
    text: str


def row(text: str) -> Row:
    """A row of text; its verb is the name before the first bracket."""
    verb = re.findall(r"(?:^|\s)(\w+)\(", text)[0]
    return Row("compress activations" if "compress(activations" in text else verb, text)


def mesh(rng: Random) -> Axes:
    """Axes with their sizes, eight ranks at most."""
    chosen = rng.choices(MESHES, COMMON)[0]
    return tuple((one.split("=")[0], int(one.split("=")[1])) for one in chosen.split())


@cache
def facts_of(name: str) -> tuple[ModelFacts, Blocks]:
    """A model's modules, and its lists of blocks."""
    facts = ModelFacts(subject(name).model())
    return facts, blocks_of(facts)


@cache
def offered(name: str, axis: str, size: int) -> tuple[Row, ...]:
    """The rows that `init` writes for one axis; none where it refuses it."""
    one = subject(name)
    try:
        text = propose(one.model(), one.batch(0), {axis: size}, one.loss, one.weight).text
    except Refusal:
        return ()
    return tuple(row(line) for line in _flat(text))


def _flat(text: str) -> Iterator[str]:
    """The rows of a text without its blocks, each with its whole path."""
    text = re.sub(r" *#.*", "", text)
    text = re.sub(r",?\s*\n\s*\)", ")", re.sub(r"([(,])\n\s+", r"\1", text))
    head = ""
    for line in map(str.strip, text.split("\n")):
        if line.startswith("at "):
            head = line.removeprefix("at ").removesuffix("{").strip() + "."
        elif line == "}":
            head = ""
        elif re.match(r"[^\s].*\(", line) and not re.match(r"(step|mesh|verify|require)\b", line):
            path, gap, call = line.partition("  ")
            names = [f"{head}{one.strip()}" for one in re.split(r",\s*(?![^{]*})", path)]
            yield f"{', '.join(names)}  {call.strip()}" if gap else line


class Drawing:
    """The rows of one schedule, drawn one kind after the other."""

    def __init__(self, name: str, rng: Random, axes: Axes) -> None:
        self.name, self.rng, self.sizes = name, rng, dict(axes)
        self.facts, self.blocks = facts_of(name)
        self.sites = [fqn for fqn in self.facts.sites if fqn]
        self.rows: list[Row] = []
        self.method = rng.choice(("ring", "gather", "ulysses", "ring, layout=zigzag"))
        self.units = 0  # stages that the cut allows

    def often(self, share: float) -> bool:
        """True in this share of the draws."""
        return self.rng.random() < share

    def add(self, *texts: str) -> None:
        """More rows."""
        self.rows += [row(text) for text in texts]

    # -- which modules ------------------------------------------------------------------------

    def trunks(self) -> list[str]:
        """The lists of blocks as they are called in the model."""
        return [
            fqn
            for one in sorted(self.blocks.lists)
            for fqn in self.blocks.modules_by_name.get(one, ())
        ]

    def somewhere(self) -> str:
        """A module, one place in all blocks, a block or several of them."""
        trunks = self.trunks()
        if trunks and self.often(0.6):
            trunk = self.rng.choice(trunks)
            children = self.facts.children(trunk)
            ways = [f"{trunk}.*", f"{trunk}[0]", f"{trunk}[-1]", f"{trunk}[::2]"]
            return self.rng.choice([*ways, f"{trunk}.{self.rng.choice(children)}"])
        fqn = self.rng.choice(self.sites)
        return self.blocks.common_name(fqn) if self.often(0.5) else fqn

    def named(self, *words: str, common: bool = True) -> str | None:
        """A module whose class has one of these in its name."""
        found = [
            f for f in self.sites if any(w in self.facts.sites[f].class_name.lower() for w in words)
        ]
        if not found:
            return None
        fqn = self.rng.choice(found)
        return self.blocks.common_name(fqn) if common and self.often(0.6) else fqn

    def linear(self) -> str | None:
        """A projection, a table or a convolution, in all blocks or in one."""
        found = [
            f
            for f in self.sites
            if leaf_kind(self.facts.sites[f]) or self.facts.sites[f].class_name.startswith("Conv")
        ]
        fqn = self.rng.choice(found) if found else None
        return self.blocks.common_name(fqn) if fqn and self.often(0.5) else fqn

    # -- rows ---------------------------------------------------------------------------------

    def parts(self) -> None:
        """Rows over axes that split tensors, tokens or experts."""
        for axis in ("tp", "ep", "cp"):
            size = self.sizes.get(axis, 1)
            if size == 1:
                continue
            mine = [r for r in offered(self.name, axis, size) if r.verb != "zero"]
            if mine and self.often(0.15):
                mine.remove(self.rng.choice(mine))
            self.rows += [self._bent(r) for r in mine]
            if axis == "tp" and self.often(0.15):
                self.sequence()
            if axis == "tp" and (not mine or self.often(0.12)):
                self.alone(axis)

    def _bent(self, one: Row) -> Row:
        text = one.text
        if "context_parallel(ring" in text:
            text = text.replace("ring", self.method)
        elif "shard(col" in text and self.often(0.05):
            text = text.replace("over=", "output=R, over=")
        elif "expert_parallel(" in text and self.often(0.4):
            more = self.rng.choice(["chunks=2", "dispatch=fetch", "dispatch=gather", "shadow=[0]"])
            text = f"{text[:-1]}, {more})"
        elif "uneven" not in text and "shard(" in text and self.often(0.03):
            text = f"{text[:-1]}, uneven=pad)"
        return Row(one.verb, text)

    def sequence(self) -> None:
        """Norms and the sums before them along the sequence."""
        norms = [
            self.blocks.common_name(f)
            for f in self.sites
            if "norm" in self.facts.sites[f].class_name.lower()
        ]
        self.rows = [
            Row(r.verb, r.text.replace("shard(row, over=tp", "shard(row, output=S(seq), over=tp"))
            for r in self.rows
        ]
        inside = [n for n in dict.fromkeys(norms) if self.blocks.is_inside(n)]
        self.add(*(f"{name}  shard(input=S(seq), output=S(seq), over=tp)" for name in inside))
        for trunk in self.trunks():
            last = self.facts.children(trunk)[-1]
            self.add(
                f"{trunk}.0  shard(input=S(seq), over=tp)",
                f"{trunk}.{last}  shard(output=R, over=tp)",
            )

    def alone(self, axis: str) -> None:
        """One projection by itself."""
        if (fqn := self.linear()) is not None:
            style = self.rng.choice(["col, output=R", "row", "col", "weight=S(0), bias=S(0)"])
            more = self.rng.choice(["", "", ", uneven=pad"])
            self.add(f"{fqn}  shard({style}, over={axis}{more})")

    def data(self) -> None:
        """Data axes: every stage of `zero`, folded or apart, and coarser sums."""
        axes = [axis for axis in ("dp", "ep") if self.sizes.get(axis, 1) > 1]
        if not axes:
            return
        stage = self.rng.choice(
            ["0", "0, bucket=1KiB", "1", "1", "2", "3", "3", "3, prefetch=1", "3, reshard=false"]
        )
        if len(axes) == 2 and self.often(0.5):
            self.add(f"zero(stage={stage}, over=({', '.join(axes)}))")
        else:
            for k, axis in enumerate(axes):
                self.add(f"zero(stage={stage if k == 0 else 0}, over={axis})")
        if stage == "0" and self.often(0.4):
            self.add(f"compress(gradients, {self.rng.choice(LOSSY)}, over={axes[0]})")
        if "dp" in axes and "cp" in self.sizes and self.often(0.4):
            self.rows = [
                Row(r.verb, r.text.replace("over=dp", "over=(dp, cp)")) if r.verb == "zero" else r
                for r in self.rows
            ]

    def stages(self) -> None:
        """Where the model is cut, in which order stages run, and what waits."""
        ranks = self.sizes.get("pp", 1)
        if ranks > 1:
            self.add(self._cut(ranks))
        if ranks > 1 or self.often(0.12):
            order, micro = self._order(ranks)
            self.add(f'pipeline(order="{order}", micro={micro})')
        if self.often(0.1):
            self.add(f"{self.named('linear') or self.somewhere()}  split_backward()")
        if ranks > 1 and self.often(0.15):
            self.add(
                self.rng.choice(
                    [
                        "overlap(transfers)",
                        "overlap(transfers, ahead=0)",
                        "overlap(transfers, gradients)",
                    ]
                )
            )

    def _cut(self, ranks: int) -> str:
        mine = [r.text for r in offered(self.name, "pp", ranks) if r.verb == "pipeline_split"]
        trunks = self.trunks()
        if trunks and (not mine or self.often(0.15)):
            trunk = self.rng.choice(trunks)
            count = len(self.facts.children(trunk))
            self.units = count
            if count >= ranks and self.often(0.6):
                self.units = ranks
                places = sorted(self.rng.sample(range(1, count), ranks - 1))
                return f"{trunk}[{', '.join(map(str, places))}]  pipeline_split(over=pp)"
            return f"{trunk}  pipeline_split(over=pp)"
        self.units = sum(len(self.facts.children(trunk)) for trunk in trunks)
        if not mine:
            return f"{self.rng.choice(self.sites)}  pipeline_split(over=pp)"
        how = self.rng.choice(
            ["", "", "", ", balance=params", ", balance=time", ", balance=memory"]
        )
        return mine[0].replace("over=pp)", f"over=pp{how})")

    def _order(self, ranks: int) -> tuple[str, int]:
        """An order and a number of microbatches that it has; seldom one that it has not."""
        micro = self.rng.choice([1, 2, 2, 3, 4, 4])
        fits = []
        for known in ORDERS:
            if known.sliced or known.searched or (ranks == 1 and known.name not in ONE):
                continue
            try:
                stages = checked_size(known, ranks, micro).chunks * ranks
            except OrderError:
                continue
            if ranks == 1 or stages <= self.units:
                fits.append(known.name)
        if self.often(0.03):
            return self.rng.choice(ORDERS).name, micro
        return self.rng.choice(["1F1B", *fits]), micro

    def memory(self) -> None:
        """Recomputation, and what lies elsewhere."""
        for _ in range(self.rng.choice([0, 0, 1, 1, 2])):
            where, kind = self.somewhere(), self.rng.random()
            if kind < 0.5:
                ways = ["", "", "save=[linear]", "save=[attention, collective]", "every=2"]
                more = self.rng.choice([*ways, "group=2", "plan=rotor, memory=1MiB"])
                self.add(f"{where}  checkpoint({more})")
            elif kind < 0.75:
                more = self.rng.choice(["", ", to=cpu", ", prefetch=0", ", to=disk"])
                self.add(f"{where}  offload(activations{more})")
            else:
                what = self.rng.choice(["parameters", "gradients", "optimizer"])
                self.add(f"offload({what})" if self.often(0.7) else f"{where}  offload({what})")

    def kernels(self) -> None:
        """Kernels by name, fused regions and what they are made of."""
        if self.often(0.15):
            kernel = self.rng.choice(KERNELS)
            words = {
                "rms_norm": ("rmsnorm",),
                "layer_norm": ("layernorm",),
                "sdpa": ("attention",),
                "rope": ("attention",),
                "flex_attention": ("attention",),
                "gated": ("mlp",),
                "grouped": ("experts",),
            }.get(kernel)
            where = self.named(*words) if words else self.rng.choice(self.sites)
            if where:
                self.add(f"{where}  replace_kernel({kernel})")
        if self.often(0.04):
            self.add(f"{self.named('linear') or self.somewhere()}  decompose(bias)")
        if self.often(0.02):
            self.add(f"{self.named('norm', 'mlp') or self.somewhere()}  fuse()")

    def numbers(self) -> None:
        """What changes numbers: casts, codes, frozen and tied weights, padding."""
        if self.often(0.12):
            how = self.rng.choice(["bf16", "bf16", "fp16, scale=1024", "bf16, params=true"])
            self.add(f"cast({how})" if self.often(0.5) else f"{self.somewhere()}  cast({how})")
        if self.often(0.07):
            more = self.rng.choice(['"*bias"', "", '"*weight"'])
            self.add(f"{self.somewhere()}  freeze({more})")
        if self.often(0.05):
            how = self.rng.choice(["int8", "int4", "int2", "adaptive"])
            self.add(f"{self.somewhere()}  compress(activations, {how}, block=8)")
        if self.often(0.03) and (table := self.named("embedding")):
            self.add(f"{table}  pad(vocab, multiple={self.rng.choice([4, 7])})")
        if self.often(0.03) and self.trunks():
            self.add(f"{self.rng.choice(self.trunks())}.*  tie()")
        if self.often(0.03):
            self.add(f"{self.somewhere()}  unroll({self.rng.choice([1, 3])})")


ONE = ("GPipe", "1F1B", "ZB-H1", "BFS", "Chimera")  # orders that are also drawn on one rank


ALL = ("parts", "data", "stages", "memory", "kernels", "numbers")  # as methods of Drawing


def text(name: str, rng: Random, axes: Axes, kinds: Sequence[str] = ALL) -> str:
    """The file of a drawn schedule: most of it legal, some of it not."""
    drawing = Drawing(name, rng, axes)
    for kind in kinds:
        getattr(drawing, kind)()
    rows = sorted(drawing.rows, key=lambda r: PHASES.index(r.verb))
    knobs, rows = _knobs(rng, rows)
    relax = _relaxed(rng, rows)
    body = "\n".join(f"  {line}" for r in rows for line in r.text.split("\n"))
    head = f"mesh({', '.join(f'{axis}={size}' for axis, size in axes)})\n\n" if axes else ""
    knob = f"{knobs}\n\n" if knobs else ""
    body = body or "  verify(forward)"
    return f'schedule 1\n\n{knob}{head}step "drawn" {relax}{{\n{body}\n}}\n'


def _relaxed(rng: Random, rows: Sequence[Row]) -> str:
    """What the step must allow; seldom too little, sometimes what no row asks for."""
    names = {RELAX[r.verb] for r in rows if r.verb in RELAX}
    stale = {known.name for known in ORDERS if "staleness" in known.relaxed}
    if any(f'"{name}"' in r.text for r in rows for name in stale):
        names.add("staleness")
    if rng.random() < 0.3:
        names.add("batch_stats")
    if rng.random() < 0.02:
        names = set()
    return f"relax({', '.join(sorted(names))}) " if names else ""


def _knobs(rng: Random, rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """In some schedules numbers of microbatches are knobs, and a row stands under a choice."""
    out, knobs = list(rows), []
    for k, one in enumerate(out):
        if one.verb == "pipeline" and rng.random() < 0.15:
            micro = re.findall(r"micro=(\d+)", one.text)[0]
            knobs.append(f"knob micro: int = {micro} in 1..8")
            out[k] = Row(one.verb, one.text.replace(f"micro={micro}", "micro=micro"))
        elif one.verb == "checkpoint" and rng.random() < 0.15 and not knobs:
            knobs.append("knob recompute: choice = full in [none, full]")
            out[k] = Row(one.verb, f"when recompute == full {{\n  {one.text}\n}}")
    return "\n".join(knobs), out


def drawn(name: str, number: int, seed: int) -> str:
    """The schedule of this number."""
    rng = Random(f"{seed}:{number}:{name}")
    return text(name, rng, mesh(rng))
