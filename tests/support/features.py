"""What the matrix combines: each feature with its axes and its rows on each small model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from tests.support.subjects import LLAMA, MIXTRAL, PICTURES, WHISPER, Subject

DATA, TENSOR, GRID, SEQUENCE = "data", "tensor", "grid", "sequence"
CONTEXT, EXPERT, PIPELINE, CONV = "context", "expert", "pipeline", "convolution"


@dataclass(frozen=True)
class Feature:
    """A column of the matrix.

    group    features of one group exclude each other
    mesh     its axes, with sizes
    relaxes  what its schedules give up beyond rounding
    local    what it does stays inside a module: paired with `SPLITS` alone
    """

    name: str
    group: str
    mesh: str = ""
    relaxes: str = ""
    local: bool = False


FEATURES: tuple[Feature, ...] = (
    *(Feature(f"zero {stage}", DATA, "dp=2") for stage in range(4)),
    Feature("tensor", TENSOR, "tp=2"),
    Feature("grid", GRID, "r=2, c=2"),
    Feature("sequence", TENSOR, "tp=2"),
    Feature("ring", CONTEXT, "cp=2"),
    Feature("ulysses", CONTEXT, "cp=2"),
    Feature("expert", EXPERT, "ep=2"),
    Feature("1F1B", PIPELINE, "pp=2"),
    Feature("interleaved", PIPELINE, "pp=2"),
    Feature("checkpoint", "checkpoint"),
    Feature("offload", "offload"),
    Feature("freeze", "freeze", relaxes="updates"),
    Feature("compress", "compress", "dp=2", relaxes="lossy"),
    Feature("tie", "tie", relaxes="model"),
    Feature("channels", CONV, "h=2"),
    Feature("spatial", "spatial", "w=2"),
    Feature("rotor", "checkpoint", local=True),
    Feature("coded", "offload", relaxes="lossy", local=True),
    Feature("peer", "peer", "pp=2", local=True),
    Feature("cast", "cast", relaxes="dtype", local=True),
    Feature("rope", "rope", local=True),
    Feature("add norm", "add norm", local=True),
    Feature("held head", "held head", local=True),
    Feature("rowwise", "rowwise", local=True),
)
NAMES = tuple(feature.name for feature in FEATURES)
Combination = tuple[str, ...]
TRIPLES: tuple[Combination, ...] = (
    ("zero 1", "tensor", "1F1B"),
    ("zero 3", "tensor", "1F1B"),
    ("zero 2", "sequence", "interleaved"),
    ("zero 1", "tensor", "ring"),
    ("zero 3", "tensor", "ulysses"),
    ("zero 1", "tensor", "expert"),
    ("zero 3", "tensor", "expert"),
    ("zero 1", "ring", "1F1B"),
    ("zero 3", "ulysses", "1F1B"),
    ("sequence", "ring", "zero 1"),
    ("sequence", "expert", "1F1B"),
    ("sequence", "1F1B", "zero 1"),
    ("zero 3", "expert", "checkpoint"),
    ("zero 1", "expert", "1F1B"),
    ("tensor", "expert", "1F1B"),
    ("ring", "expert", "zero 1"),
    ("ring", "tensor", "1F1B"),
    ("grid", "1F1B", "checkpoint"),
    ("zero 1", "grid", "checkpoint"),
    ("zero 3", "1F1B", "offload"),
    ("zero 3", "1F1B", "freeze"),
    ("tensor", "freeze", "1F1B"),
    ("compress", "tensor", "1F1B"),
    ("tie", "tensor", "zero 1"),
    ("tie", "1F1B", "zero 1"),
    ("channels", "spatial", "zero 1"),
    ("channels", "1F1B", "zero 3"),
    ("checkpoint", "offload", "1F1B"),
    ("ring", "checkpoint", "zero 3"),
)


SPLITS = {
    "zero 3",
    "tensor",
    "sequence",
    "ring",
    "ulysses",
    "expert",
    "1F1B",
    "interleaved",
    "checkpoint",
}
OF_LLAMA = {"rope", "add norm", "held head", "rowwise"}  # what other models have no place for


def feature(name: str) -> Feature:
    """The feature of a name."""
    return FEATURES[NAMES.index(name)]


def ordered(names: Iterable[str]) -> Combination:
    """The names in the order of the matrix."""
    return tuple(sorted(names, key=NAMES.index))


def combinations_of() -> Iterator[Combination]:
    """Each feature by itself, all pairs, and the chosen triples."""
    for count in (1, 2):
        for names in combinations(NAMES, count):
            if together(names) and asked(names):
                yield names
    for triple in TRIPLES:
        yield ordered(triple)


def together(names: Combination) -> bool:
    """Whether a schedule can hold them: one of each group."""
    groups = [feature(name).group for name in names]
    return len(set(groups)) == len(groups)


def asked(names: Combination) -> bool:
    """Whether the matrix asks for a pair: of what stays inside a module, with splits alone."""
    return all(set(names) - {name} <= SPLITS for name in names if feature(name).local)


def subject(names: Combination) -> Subject | None:
    """The model that has what all of them need, if there is one."""
    attends = {"tensor", "sequence", "ring", "ulysses", "grid"} & set(names)
    convolves = {"channels", "spatial"} & set(names)
    own = OF_LLAMA & set(names)
    if own and convolves:
        return None
    if "expert" in names:
        return None if convolves else MIXTRAL
    if convolves:
        return WHISPER if attends else PICTURES
    return LLAMA


def layers(names: Combination) -> int:
    """As many as stages need."""
    return 4 if "interleaved" in names else 2


def schedule(names: Combination) -> str:
    """The schedule of some features on their model."""
    model = subject(names)
    assert model is not None, names
    axes = dict.fromkeys(a for n in names for a in feature(n).mesh.split(", ") if a)
    relaxed = sorted(feature(name).relaxes for name in names if feature(name).relaxes)
    head = f"mesh({', '.join(axes)})\n\n" if axes else ""
    relax = f" relax({', '.join(relaxed)})" if relaxed else ""
    lines = [line for row in rows(model, names) for line in row.strip().splitlines()]
    text = "\n".join(f"  {line.strip()}" for line in lines)
    return f'schedule 1\n\n{head}step "all"{relax} {{\n{text}\n}}\n'


KERNELS = {
    "rope": "{trunk}.*.self_attn replace_kernel(rope)",
    "add norm": "{trunk}.* replace_kernel(add_norm)",
    "held head": "lm_head replace_kernel(cross_entropy)",
    "rowwise": "{trunk}.*.input_layernorm fuse(backend=rowwise, rounding=eager)",
}


def rows(model: Subject, names: Combination) -> Iterator[str]:
    """In the order in which a file has them."""
    from tests.support.splits import splits

    trunk = model.trunk
    yield from (row.format(trunk=trunk) for name, row in KERNELS.items() if name in names)
    if "tie" in names:
        yield f"{trunk}.* tie()"
    if "freeze" in names:
        yield f"{model.frozen} freeze()\n{trunk}.0 freeze()"
    if "cast" in names:
        yield f"{trunk}.* cast(bf16)"
    yield from splits(model, names)
    if "checkpoint" in names:
        yield f"{trunk}.* checkpoint()"
    if "rotor" in names:
        yield f"{trunk}.* checkpoint(plan=rotor, memory=1MiB)"
    if "coded" in names:
        yield f"{trunk}[-1] compress(activations, int8)"
    if "offload" in names:
        # one block only: what is recomputed has nothing to be moved
        yield f"{trunk}[-1] offload(activations, to=cpu)"
    yield from _pipeline_and_data(trunk, names)


def _pipeline_and_data(trunk: str, names: Combination) -> Iterator[str]:
    if "peer" in names:
        yield f"{trunk}.0 offload(optimizer, to=peer, over=pp)"
    piped = {"1F1B", "interleaved", "peer"} & set(names)
    if piped:
        yield f"{trunk} pipeline_split(over=pp)"
    over = data_axes(names)
    stage = next((name[-1] for name in names if name.startswith("zero")), "0")
    if over:
        axes = over[0] if len(over) == 1 else f"({', '.join(over)})"
        yield f"zero(stage={stage}, over={axes})"
    if "compress" in names:
        yield "compress(gradients, powersgd, rank=2, over=dp)"
    if piped:
        order = "Interleaved1F1B" if "interleaved" in names else "1F1B"
        yield f'pipeline(order="{order}", micro=2)'


def data_axes(names: Combination) -> list[str]:
    """The axes over which the batch is split: those of experts and sequences are among them."""
    axes = []
    if any(name.startswith("zero") or name == "compress" for name in names):
        axes.append("dp")
    if "grid" in names:
        axes.append("r")
    if axes and "expert" in names:
        axes.append("ep")
    if axes and {"ring", "ulysses"} & set(names):
        axes.append("cp")
    return axes
