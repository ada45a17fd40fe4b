"""Random rows for any model: rows that `init` writes for each axis, varied, and random ones."""

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
from tests.drawn.models import load_subject
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
MESH_WEIGHTS = (2, 6, 6, 8, 3, 3, 6, 6, 5, 2, 2, 1, 1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 3, 1, 1)
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
    """One row, and its verb, which decides its position."""

    verb: str
    text: str


def make_row(text: str) -> Row:
    """Make a Row from text; its verb is the name before the first bracket."""
    verb = re.findall(r"(?:^|\s)(\w+)\(", text)[0]
    return Row("compress activations" if "compress(activations" in text else verb, text)


def draw_mesh(rng: Random) -> Axes:
    """Draw a mesh of at most eight ranks."""
    axes_text = rng.choices(MESHES, MESH_WEIGHTS)[0]
    return tuple(
        (axis_text.split("=")[0], int(axis_text.split("=")[1])) for axis_text in axes_text.split()
    )


@cache
def facts_of(name: str) -> tuple[ModelFacts, Blocks]:
    """Return a model's facts, and its lists of blocks."""
    model_facts = ModelFacts(load_subject(name).model())
    return model_facts, blocks_of(model_facts)


@cache
def init_rows(name: str, axis: str, size: int) -> tuple[Row, ...]:
    """Return the rows that `init` writes for one axis; none if it refuses."""
    tested_model = load_subject(name)
    try:
        text = propose(
            tested_model.model(),
            tested_model.batch(0),
            {axis: size},
            tested_model.loss,
            tested_model.weight,
        ).text
    except Refusal:
        return ()
    return tuple(make_row(line) for line in _flat_rows(text))


def _flat_rows(text: str) -> Iterator[str]:
    """Yield all rows of a text with their full paths."""
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
            names = [
                f"{head}{module_name.strip()}" for module_name in re.split(r",\s*(?![^{]*})", path)
            ]
            yield f"{', '.join(names)}  {call.strip()}" if gap else line


class Drawing:
    """Draws the rows of one schedule, one kind after the other."""

    def __init__(self, name: str, rng: Random, axes: Axes) -> None:
        self.name, self.rng, self.sizes = name, rng, dict(axes)
        self.facts, self.blocks = facts_of(name)
        self.sites = [fqn for fqn in self.facts.sites if fqn]
        self.rows: list[Row] = []
        self.method = rng.choice(("ring", "gather", "ulysses", "ring, layout=zigzag"))
        self.units = 0  # largest number of stages

    def often(self, share: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < share

    def add(self, *texts: str) -> None:
        """Append rows."""
        self.rows += [make_row(text) for text in texts]

    # -- which modules ------------------------------------------------------------------------

    def trunks(self) -> list[str]:
        """Return the paths of the lists of blocks."""
        return [
            fqn
            for list_name in sorted(self.blocks.lists)
            for fqn in self.blocks.modules_by_name.get(list_name, ())
        ]

    def somewhere(self) -> str:
        """Return a path: a module, one place in all blocks, or some blocks."""
        trunks = self.trunks()
        if trunks and self.often(0.6):
            trunk = self.rng.choice(trunks)
            children = self.facts.children(trunk)
            sites = [f"{trunk}.*", f"{trunk}[0]", f"{trunk}[-1]", f"{trunk}[::2]"]
            return self.rng.choice([*sites, f"{trunk}.{self.rng.choice(children)}"])
        fqn = self.rng.choice(self.sites)
        return self.blocks.common_name(fqn) if self.often(0.5) else fqn

    def named(self, *words: str, common: bool = True) -> str | None:
        """Return a module whose class name contains one of the words, or None."""
        matches = [
            f for f in self.sites if any(w in self.facts.sites[f].class_name.lower() for w in words)
        ]
        if not matches:
            return None
        fqn = self.rng.choice(matches)
        return self.blocks.common_name(fqn) if common and self.often(0.6) else fqn

    def linear(self) -> str | None:
        """Return a projection, embedding or convolution, in all blocks or in one."""
        matches = [
            f
            for f in self.sites
            if leaf_kind(self.facts.sites[f]) or self.facts.sites[f].class_name.startswith("Conv")
        ]
        fqn = self.rng.choice(matches) if matches else None
        return self.blocks.common_name(fqn) if fqn and self.often(0.5) else fqn

    # -- rows ---------------------------------------------------------------------------------

    def parts(self) -> None:
        """Add rows over axes that shard tensors, tokens or experts."""
        for axis in ("tp", "ep", "cp"):
            size = self.sizes.get(axis, 1)
            if size == 1:
                continue
            axis_rows = [r for r in init_rows(self.name, axis, size) if r.verb != "zero"]
            if axis_rows and self.often(0.15):
                axis_rows.remove(self.rng.choice(axis_rows))
            self.rows += [self._bent(r) for r in axis_rows]
            if axis == "tp" and self.often(0.15):
                self.sequence()
            if axis == "tp" and (not axis_rows or self.often(0.12)):
                self.alone(axis)

    def _bent(self, init_row: Row) -> Row:
        text = init_row.text
        if "context_parallel(ring" in text:
            text = text.replace("ring", self.method)
        elif "shard(col" in text and self.often(0.05):
            text = text.replace("over=", "output=R, over=")
        elif "expert_parallel(" in text and self.often(0.4):
            option = self.rng.choice(
                ["chunks=2", "dispatch=fetch", "dispatch=gather", "shadow=[0]"]
            )
            text = f"{text[:-1]}, {option})"
        elif "uneven" not in text and "shard(" in text and self.often(0.03):
            text = f"{text[:-1]}, uneven=pad)"
        return Row(init_row.verb, text)

    def sequence(self) -> None:
        """Shard norms and the reductions before them along the sequence."""
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
        """Shard a single projection."""
        if (fqn := self.linear()) is not None:
            style = self.rng.choice(["col, output=R", "row", "col", "weight=S(0), bias=S(0)"])
            option = self.rng.choice(["", "", ", uneven=pad"])
            self.add(f"{fqn}  shard({style}, over={axis}{option})")

    def data(self) -> None:
        """Add `zero` rows for data axes, together or separate, and compressed gradients."""
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
        """Add pipeline rows: cut, order, split backward, overlap."""
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
        cut_rows = [r.text for r in init_rows(self.name, "pp", ranks) if r.verb == "pipeline_split"]
        trunks = self.trunks()
        if trunks and (not cut_rows or self.often(0.15)):
            trunk = self.rng.choice(trunks)
            count = len(self.facts.children(trunk))
            self.units = count
            if count >= ranks and self.often(0.6):
                self.units = ranks
                starts = sorted(self.rng.sample(range(1, count), ranks - 1))
                return f"{trunk}[{', '.join(map(str, starts))}]  pipeline_split(over=pp)"
            return f"{trunk}  pipeline_split(over=pp)"
        self.units = sum(len(self.facts.children(trunk)) for trunk in trunks)
        if not cut_rows:
            return f"{self.rng.choice(self.sites)}  pipeline_split(over=pp)"
        option = self.rng.choice(
            ["", "", "", ", balance=params", ", balance=time", ", balance=memory"]
        )
        return cut_rows[0].replace("over=pp)", f"over=pp{option})")

    def _order(self, ranks: int) -> tuple[str, int]:
        """Draw an order and a valid number of microbatches; rarely an invalid one."""
        micro = self.rng.choice([1, 2, 2, 3, 4, 4])
        fits = []
        for order in ORDERS:
            if order.sliced or order.searched or (ranks == 1 and order.name not in ONE_RANK_ORDERS):
                continue
            try:
                stages = checked_size(order, ranks, micro).chunks * ranks
            except OrderError:
                continue
            if ranks == 1 or stages <= self.units:
                fits.append(order.name)
        if self.often(0.03):
            return self.rng.choice(ORDERS).name, micro
        return self.rng.choice(["1F1B", *fits]), micro

    def memory(self) -> None:
        """Add checkpoint and offload rows."""
        for _ in range(self.rng.choice([0, 0, 1, 1, 2])):
            module_path, kind = self.somewhere(), self.rng.random()
            if kind < 0.5:
                options = ["", "", "save=[linear]", "save=[attention, collective]", "every=2"]
                option = self.rng.choice([*options, "group=2", "plan=rotor, memory=1MiB"])
                self.add(f"{module_path}  checkpoint({option})")
            elif kind < 0.75:
                option = self.rng.choice(["", ", to=cpu", ", prefetch=0", ", to=disk"])
                self.add(f"{module_path}  offload(activations{option})")
            else:
                state = self.rng.choice(["parameters", "gradients", "optimizer"])
                self.add(
                    f"offload({state})" if self.often(0.7) else f"{module_path}  offload({state})"
                )

    def kernels(self) -> None:
        """Add rows that replace, decompose or fuse kernels."""
        if self.often(0.15):
            kernel = self.rng.choice(KERNELS)
            class_words = {
                "rms_norm": ("rmsnorm",),
                "layer_norm": ("layernorm",),
                "sdpa": ("attention",),
                "rope": ("attention",),
                "flex_attention": ("attention",),
                "gated": ("mlp",),
                "grouped": ("experts",),
            }.get(kernel)
            module_path = self.named(*class_words) if class_words else self.rng.choice(self.sites)
            if module_path:
                self.add(f"{module_path}  replace_kernel({kernel})")
        if self.often(0.04):
            self.add(f"{self.named('linear') or self.somewhere()}  decompose(bias)")
        if self.often(0.02):
            self.add(f"{self.named('norm', 'mlp') or self.somewhere()}  fuse()")

    def numbers(self) -> None:
        """Add rows that change numbers: casts, compression, frozen and tied weights, padding."""
        if self.often(0.12):
            option = self.rng.choice(["bf16", "bf16", "fp16, scale=1024", "bf16, params=true"])
            self.add(
                f"cast({option})" if self.often(0.5) else f"{self.somewhere()}  cast({option})"
            )
        if self.often(0.07):
            pattern = self.rng.choice(['"*bias"', "", '"*weight"'])
            self.add(f"{self.somewhere()}  freeze({pattern})")
        if self.often(0.05):
            option = self.rng.choice(["int8", "int4", "int2", "adaptive"])
            self.add(f"{self.somewhere()}  compress(activations, {option}, block=8)")
        if self.often(0.03) and (table := self.named("embedding")):
            self.add(f"{table}  pad(vocab, multiple={self.rng.choice([4, 7])})")
        if self.often(0.03) and self.trunks():
            self.add(f"{self.rng.choice(self.trunks())}.*  tie()")
        if self.often(0.03):
            self.add(f"{self.somewhere()}  unroll({self.rng.choice([1, 3])})")


ONE_RANK_ORDERS = (
    "GPipe",
    "1F1B",
    "ZB-H1",
    "BFS",
    "Chimera",
)  # orders that are also drawn on one rank


ALL_KINDS = ("parts", "data", "stages", "memory", "kernels", "numbers")  # as methods of Drawing


def text(
    name: str,
    rng: Random,
    axes: Axes,
    kinds: Sequence[str] = ALL_KINDS,
    drawing_class: type[Drawing] = Drawing,
) -> str:
    """Draw the text of a schedule: mostly legal, sometimes not."""
    drawing = drawing_class(name, rng, axes)
    for kind in kinds:
        getattr(drawing, kind)()
    rows = sorted(drawing.rows, key=lambda r: PHASES.index(r.verb))
    knobs, rows = _with_knobs(rng, rows)
    relax = _relax_clause(rng, rows)
    body = "\n".join(f"  {line}" for r in rows for line in r.text.split("\n"))
    head = f"mesh({', '.join(f'{axis}={size}' for axis, size in axes)})\n\n" if axes else ""
    knob = f"{knobs}\n\n" if knobs else ""
    body = body or "  verify(forward)"
    return f'schedule 1\n\n{knob}{head}step "drawn" {relax}{{\n{body}\n}}\n'


def _relax_clause(rng: Random, rows: Sequence[Row]) -> str:
    """Return the relax clause of the step; rarely too little, sometimes too much."""
    names = {RELAX[r.verb] for r in rows if r.verb in RELAX}
    stale = {order.name for order in ORDERS if "staleness" in order.relaxed}
    if any(f'"{name}"' in r.text for r in rows for name in stale):
        names.add("staleness")
    if rng.random() < 0.3:
        names.add("batch_stats")
    if rng.random() < 0.02:
        names = set()
    return f"relax({', '.join(sorted(names))}) " if names else ""


def _with_knobs(rng: Random, rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """Sometimes replace a number of microbatches by a knob, or put a row under a condition."""
    new_rows, knobs = list(rows), []
    for k, old_row in enumerate(new_rows):
        if old_row.verb == "pipeline" and rng.random() < 0.15:
            micro = re.findall(r"micro=(\d+)", old_row.text)[0]
            knobs.append(f"knob micro: int = {micro} in 1..8")
            new_rows[k] = Row(old_row.verb, old_row.text.replace(f"micro={micro}", "micro=micro"))
        elif old_row.verb == "checkpoint" and rng.random() < 0.15 and not knobs:
            knobs.append("knob recompute: choice = full in [none, full]")
            new_rows[k] = Row(old_row.verb, f"when recompute == full {{\n  {old_row.text}\n}}")
    return "\n".join(knobs), new_rows


def draw_schedule(name: str, number: int, seed: int) -> str:
    """Draw the schedule of this number."""
    rng = Random(f"{seed}:{number}:{name}")
    return text(name, rng, draw_mesh(rng))
