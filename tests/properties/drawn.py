"""A random ("drawn") model and schedule as a value, and the generators of rows per primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.properties.models import Config, Short

# verbs in the order of their rows in a schedule
PHASES = (
    *("tie", "untie", "freeze", "adapt"),
    *("replace", "replace_kernel", "decompose", "fuse", "cast", "pad", "shard", "grid", "complete"),
    *("context_parallel", "expert_parallel"),
    *("checkpoint", "offload", "compress activations", "unroll"),
    *("pipeline_split", "split_backward", "zero", "compress", "overlap", "pipeline", "verify"),
)
# what the step of a verb must relax
RELAX = {
    "freeze": "updates",
    "adapt": "model",
    "tie": "model",
    "untie": "model",
    "compress": "lossy",
    "compress activations": "lossy",
    "cast": "dtype",
}
Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, order=True)
class Step:
    """Rows that belong together.  Steps with a common claim exclude each other."""

    verb: str
    rows: tuple[str, ...]
    claims: frozenset[str] = field(compare=False)
    axes: frozenset[str] = field(default=frozenset(), compare=False)

    def __str__(self) -> str:
        return "\n".join(self.rows)


def step(verb: str, rows: Sequence[str], claims: Sequence[str], axes: Sequence[str] = ()) -> Step:
    """Return a Step."""
    return Step(verb, tuple(rows), frozenset(claims), frozenset(axes))


@dataclass(frozen=True, repr=False)
class Drawn(Short):
    """A random model and a schedule for it.

    `rows` and `length` describe the first batch; the second batch has one row more.
    """

    config: Config
    axes: Axes
    steps: tuple[Step, ...] = ()
    spare: int = 0  # rows above one for each part
    length: int = 3
    illegal: str = ""  # a row that must be refused
    used: bool = False  # whether rows may shard one of two uses of a parameter

    @property
    def micro(self) -> int:
        """The number of microbatches."""
        rows_ = [s.rows[0] for s in self.steps if s.verb == "pipeline"]
        return int(rows_[0].split("micro=")[1].split(",")[0].rstrip(")")) if rows_ else 1

    @property
    def little(self) -> bool:
        """Whether it runs with lowered size limits; every second one does."""
        return self.config.seed % 2 == 0

    @property
    def parts(self) -> int:
        """The number of parts into which a batch is split."""
        verbs = ("zero", "compress")  # `compress` includes a `zero` row
        used = {axis for s in self.completed if s.verb in verbs for axis in s.axes}
        count = self.micro
        for axis, size in self.axes:
            count *= size if axis in used else 1
        return count

    @property
    def refused(self) -> str:
        """The code with which this must be refused, or "": statistics over the batch need
        one part, averages over forwards one microbatch."""
        kinds = [(b.kind, b.norm == "batch", b.average) for b in self.config.blocks]
        needs_one_part = (
            any(kind == "conv" and batch for kind, batch, _ in kinds) and self.parts > 1
        )
        needs_one_microbatch = (
            any(kind == "counting" and average for kind, _, average in kinds) and self.micro > 1
        )
        return "S703" if needs_one_part else "S708" if needs_one_microbatch else ""

    @property
    def may(self) -> frozenset[str]:
        """Codes with which this may be refused, where a row may shard one of two uses."""
        codes = ("S405", "S427", "S506", "S601", "S659", "S664")
        return frozenset(codes) if self.used else frozenset()

    @property
    def rows(self) -> int:
        """Rows of the first batch: one per part and some more, mostly not a multiple."""
        return self.parts + self.spare

    @property
    def completed(self) -> tuple[Step, ...]:
        """The steps, and a `zero` row for each unused axis."""
        used = {axis for s in self.steps for axis in s.axes}
        idle = [axis for axis, size in self.axes if size > 1 and axis not in used]
        zero_steps = [step("zero", [f"zero(stage=0, over={a})"], [f"zero {a}"], [a]) for a in idle]
        return tuple(sorted((*self.steps, *zero_steps), key=lambda s: PHASES.index(s.verb)))

    @property
    def text(self) -> str:
        """The text of the schedule."""
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
        product = 1
        for _, size in self.axes:
            product *= size
        return product


Generator = Callable[[Config, dict[str, int], int], list[Step]]
GENERATORS: dict[str, Generator] = {}


def generator(make: Generator) -> Generator:
    """Register a generator of steps for the primitive of its name."""
    GENERATORS[make.__name__.rstrip("_")] = make
    return make


def block_path(index: int) -> str:
    """Return the path of a block."""
    return f"blocks.{index}"
