"""Features of the support matrix: their mesh axes, and their rows on each small model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from tests.support.matrix_models import LLAMA, MIXTRAL, PICTURES, WHISPER, Subject

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
LLAMA_ONLY = {"rope", "add norm", "held head", "rowwise"}  # only Llama has modules for these


def feature_named(name: str) -> Feature:
    """The feature with this name."""
    return FEATURES[NAMES.index(name)]


def in_order(names: Iterable[str]) -> Combination:
    """The names in the order of the matrix."""
    return tuple(sorted(names, key=NAMES.index))


def combinations_of() -> Iterator[Combination]:
    """Yield each feature alone, all pairs, and the chosen triples."""
    for count in (1, 2):
        for names in combinations(NAMES, count):
            if can_combine(names) and is_needed(names):
                yield names
    for triple in TRIPLES:
        yield in_order(triple)


def can_combine(names: Combination) -> bool:
    """Whether one schedule can have them: at most one of each group."""
    groups = [feature_named(name).group for name in names]
    return len(set(groups)) == len(groups)


def is_needed(names: Combination) -> bool:
    """Whether the matrix has this pair: local features are only paired with `SPLITS`."""
    return all(set(names) - {name} <= SPLITS for name in names if feature_named(name).local)


def model_for(names: Combination) -> Subject | None:
    """The small model that has what all features need, or None."""
    attends = {"tensor", "sequence", "ring", "ulysses", "grid"} & set(names)
    convolves = {"channels", "spatial"} & set(names)
    llama_only = LLAMA_ONLY & set(names)
    if llama_only and convolves:
        return None
    if "expert" in names:
        return None if convolves else MIXTRAL
    if convolves:
        return WHISPER if attends else PICTURES
    return LLAMA


def layer_count(names: Combination) -> int:
    """The number of layers that the stages need."""
    return 4 if "interleaved" in names else 2


def schedule_text(names: Combination) -> str:
    """The text of a schedule with these features, for their model."""
    model = model_for(names)
    assert model is not None, names
    axes = dict.fromkeys(a for n in names for a in feature_named(n).mesh.split(", ") if a)
    relaxed = sorted(feature_named(name).relaxes for name in names if feature_named(name).relaxes)
    head = f"mesh({', '.join(axes)})\n\n" if axes else ""
    relax = f" relax({', '.join(relaxed)})" if relaxed else ""
    lines = [line for row in schedule_rows(model, names) for line in row.strip().splitlines()]
    text = "\n".join(f"  {line.strip()}" for line in lines)
    return f'schedule 1\n\n{head}step "all"{relax} {{\n{text}\n}}\n'


KERNELS = {
    "rope": "{trunk}.*.self_attn replace_kernel(rope)",
    "add norm": "{trunk}.* replace_kernel(add_norm)",
    "held head": "lm_head replace_kernel(cross_entropy)",
    "rowwise": "{trunk}.*.input_layernorm fuse(backend=rowwise, rounding=eager)",
}


def schedule_rows(model: Subject, names: Combination) -> Iterator[str]:
    """Yield the rows of the features, in the order of a schedule."""
    from tests.support.splits import split_rows

    trunk = model.trunk
    yield from (row.format(trunk=trunk) for name, row in KERNELS.items() if name in names)
    if "tie" in names:
        yield f"{trunk}.* tie()"
    if "freeze" in names:
        yield f"{model.frozen} freeze()\n{trunk}.0 freeze()"
    if "cast" in names:
        yield f"{trunk}.* cast(bf16)"
    yield from split_rows(model, names)
    if "checkpoint" in names:
        yield f"{trunk}.* checkpoint()"
    if "rotor" in names:
        yield f"{trunk}.* checkpoint(plan=rotor, memory=1MiB)"
    if "coded" in names:
        yield f"{trunk}[-1] compress(activations, int8)"
    if "offload" in names:
        # one block only: recomputed blocks store no activations to offload
        yield f"{trunk}[-1] offload(activations, to=cpu)"
    yield from _pipeline_and_data(trunk, names)


def _pipeline_and_data(trunk: str, names: Combination) -> Iterator[str]:
    if "peer" in names:
        yield f"{trunk}.0 offload(optimizer, to=peer, over=pp)"
    has_pipeline = {"1F1B", "interleaved", "peer"} & set(names)
    if has_pipeline:
        yield f"{trunk} pipeline_split(over=pp)"
    axes_of_batch = data_axes(names)
    stage = next((name[-1] for name in names if name.startswith("zero")), "0")
    if axes_of_batch:
        axes = axes_of_batch[0] if len(axes_of_batch) == 1 else f"({', '.join(axes_of_batch)})"
        yield f"zero(stage={stage}, over={axes})"
    if "compress" in names:
        yield "compress(gradients, powersgd, rank=2, over=dp)"
    if has_pipeline:
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
