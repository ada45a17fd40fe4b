"""Random legal schedules: meshes, and steps of rows from a generator for each primitive."""

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


TIED_WEIGHTS = {"mlp": '"up.weight", "up.bias"', "chain": '"lin.weight"', "custom": '"up.weight"'}


@generator
def tie(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Tie equal blocks, adjacent or not; both are then stored in the same way."""
    steps = []
    for index, block in enumerate(config.blocks):
        for other in range(index + 1, len(config.blocks)):
            path, other_path = _at(index), _at(other)
            equal = config.blocks[other] == block and config.use != "same"
            if equal and not config.frozen.startswith("blocks"):
                claims = [
                    "tie",
                    *(
                        f"{verb} {module_path}"
                        for verb in ("shard", "late", "kernel", "parameters")
                        for module_path in (
                            path,
                            other_path,
                            f"{path}.experts.*",
                            f"{other_path}.experts.*",
                        )
                    ),
                ]
                for names in ("", TIED_WEIGHTS.get(block.kind, "")):
                    steps.append(
                        step("tie", [f"{path}, {other_path}  tie({names})"], [*claims, "freeze"])
                    )
    return steps


@generator
def untie(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Untie the head, if it shares the embedding's weight."""
    return [
        step("untie", ["head  untie(weight)"], ["untie", "shard embed", "shard head", "freeze"])
        for _ in range(config.tied)
    ]


@generator
def freeze(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Freeze a block, or all but the head; not what the model has frozen itself."""
    steps = []
    late = [f"late {_at(index)}" for index in range(len(config.blocks))]
    for index, wait in enumerate(late):  # its weights have no delayed gradient
        if config.frozen != ("blocks.0" if config.use == "same" else _at(index)):
            for names in ("", '"*bias", "norm.*"'):
                row = f"{_at(index)}  freeze({names if config.blocks[index].kind == 'mlp' else ''})"
                steps += [step("freeze", [row], ["freeze", wait])]
    return [*steps, step("freeze", ['freeze(keep="head.*")'], ["freeze", *late])]


@generator
def adapt(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Add adapters to the projections of a block; the head is trained too, or nothing else is."""
    steps = []
    late = [f"late {_at(index)}" for index in range(len(config.blocks))]
    for index, block in enumerate(config.blocks):
        if block.kind == "mlp" and not config.frozen:
            path = _at(index)
            verbs = ("replace", "kernel", "decompose", "parameters", "terms")
            claims = [f"{verb} {path}" for verb in verbs]
            for arguments in (
                'lora, rank=2, keep="head.*"',
                "lora, rank=1, alpha=3, dropout=0.25",
                "dora, rank=2, seed=3",
                "lora, rank=2, base=int8, block=2",
                "lora, rank=1, base=int4",
                "dora, rank=2, base=nf4",
            ):
                row = f"{path}.up, {path}.down  adapt({arguments})"
                steps.append(step("adapt", [row], [*claims, "tie", "freeze", *late]))
    return steps


@generator
def pad(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Pad the vocabulary without need; padding that a shard needs comes with its step."""
    if config.entry != "words":
        return []
    return [
        step("pad", [f"embed  pad(vocab, multiple={k})"], ["shard embed", "shard head"])
        for k in (4, 7)
    ]


@generator
def checkpoint(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Checkpoint blocks or modules inside them, except those that write buffers."""
    steps = []
    for index, block in enumerate(config.blocks):
        if block.kind == "counting" or (block.kind == "conv" and block.norm == "batch"):
            continue
        path = _at(index)
        inner = {
            "mlp": "up",
            "used": block.up,
            "attention": "o",
            "experts": "experts.0",
            "conv": "conv",
            "custom": "down",
        }.get(block.kind)
        rows = [
            f"{path}  checkpoint()",
            f"{path}  checkpoint(save=[linear])",
            f"{path}  checkpoint(save=[linear, attention, collective])",
        ]
        rows += [f"{path}.{inner}  checkpoint()"] if inner else []
        steps += [step("checkpoint", [row], [f"checkpoint {path}"]) for row in rows]
    return steps + _region_checkpoints(config, sizes)


def _region_checkpoints(config: Config, sizes: dict[str, int]) -> list[Step]:
    """Checkpoint all blocks in groups, every second, or by a plan; no stage cut splits a group."""
    count = len(config.blocks)
    fits = not any(b.kind == "counting" or b.norm == "batch" for b in config.blocks)
    if count < 2 or not fits:
        return []
    claims = [f"{verb} {_at(index)}" for verb in ("checkpoint", "unroll") for index in range(count)]
    options = ["every=2", "plan=rotor, memory=1MiB", "plan=pareto, memory=1MiB"]
    if sizes.get("pp", 1) == 1:
        options += ["plan=adapipe, memory=1MiB"]  # with stages the cut may split a group
        options += ["group=2", "group=sqrt", "group=2, every=2, save=[linear]"]
    steps = [step("checkpoint", [f"blocks.*  checkpoint({option})"], claims) for option in options]
    extra_claims = [
        f"{verb} {_at(index)}" for verb in ("offload", "parameters") for index in range(count)
    ]
    rows = [
        "blocks.*  checkpoint(plan=dtr, memory=1MiB)",
        "blocks.*  checkpoint(plan=pofo, memory=1MiB, bandwidth=9TiB, tflops=9)",
    ]
    return [*steps, *(step("checkpoint", [row], [*claims, *extra_claims]) for row in rows)]


@generator
def offload(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Offload activations of blocks, parameters of blocks or all, gradients and optimizer state.

    State on a peer excludes streamed parameters and files; activations on a peer need full
    sequences and orders that evict nothing themselves.
    """
    steps, all_claims = [], [f"parameters {_at(index)}" for index in range(len(config.blocks))]
    for index, claim in enumerate(all_claims):
        path = _at(index)
        for options in (", to=cpu", ", prefetch=0", ", to=disk, prefetch=2"):
            steps.append(
                step("offload", [f"{path}  offload(activations{options})"], [f"offload {path}"])
            )
        for options in (", to=peer, over=pp", ", to=peer, over=pp, prefetch=0")[
            : 2 * ("pp" in sizes)
        ]:
            row = f"{path}  offload(activations{options})"
            steps.append(step("offload", [row], [f"offload {path}", f"lent {path}"], ["pp"]))
        for options in ("", ", to=disk"):
            steps.append(step("offload", [f"{path}  offload(parameters{options})"], [claim]))
    return [
        *steps,
        step("offload", ["offload(parameters)"], all_claims),
        *(
            step("offload", [f"offload(gradients{target})"], ["leaving"])
            for target in ("", ", to=disk")
        ),
        *(
            step("offload", [f"offload(optimizer{target})"], ["optimizer"])
            for target in ("", ", to=disk")
        ),
        *(
            step(
                "offload",
                ["offload(optimizer, to=peer, over=pp)"],
                ["optimizer", *all_claims],
                ["pp"],
            )
            for _ in range("pp" in sizes)
        ),
    ]


@generator
def fuse(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Fuse blocks without custom functions, or patterns in them; in float64 an inductor region
    runs eagerly and a rowwise chain runs as torch operators."""
    steps = []
    for index, block in enumerate(config.blocks):
        path, claim = _at(index), [f"kernel {_at(index)}"]
        if block.kind in ("mlp", "chain", "twice", "writing"):
            for options in ("", "backend=inductor", "rounding=eager"):
                steps.append(step("fuse", [f"{path}  fuse({options})"], claim))
        if block.kind == "mlp":
            rows = [f"{path}.up  decompose(bias)", f'{path}  fuse("p(x, b) {{ gelu(x + b) }}")']
            steps.append(step("fuse", rows, [*claim, f"replace {path}", f"decompose {path}"]))
            for options in ("", ", backend=rowwise"):
                rows = [f'{path}  fuse("p(x, y) {{ x + dropout(y) }}"{options})']
                steps.append(step("fuse", rows, [*claim, f"replace {path}"]))
            rows = [f"{path}.norm  fuse(backend=rowwise)"]
            steps.append(step("fuse", rows, [*claim, f"replace {path}"]))
    return steps


@generator
def decompose(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Decompose linear layers with a bias, unless the chain is replaced."""
    steps = []
    for index, block in enumerate(config.blocks):
        path = _at(index)
        if block.paired:
            steps.append(step("decompose", [f"{path}.up  decompose(bias)"], [f"decompose {path}"]))
        if block.kind == "chain":
            claims = [f"decompose {path}", f"replace {path}"]
            steps.append(step("decompose", [f"{path}.lin  decompose(bias)"], claims))
    return steps


@generator
def replace_(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Replace pairs of layers (same parameter names) or single layers (new names, not sharded)."""
    names = {"mlp": "other_mlp", "chain": "other_chain"}
    return [
        step(
            "replace",
            [f"{_at(index)}  replace({names[block.kind]})"],
            [f"replace {_at(index)}", *([f"shard {_at(index)}"] if block.kind == "chain" else [])],
        )
        for index, block in enumerate(config.blocks)
        if block.kind in names
    ]


@generator
def replace_kernel(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Replace kernels of norms, sums with norms, stacked experts, torch or rotary attention,
    and heads whose loss the model computes."""
    steps = [
        step("replace_kernel", rows, [f"kernel {_at(index)}"])
        for index, block in enumerate(config.blocks)
        for rows in _kernel_rows(_at(index), block, config.width, "cp" in sizes)
    ]
    if config.entry == "words" and config.returns != "tuple":
        for kernel, claim in (
            ("linear_cross_entropy", "head whole"),
            ("linear_cross_entropy, chunk=64B", "head whole"),
            ("cross_entropy", "shard head"),
        ):
            steps.append(
                step("replace_kernel", [f"head  replace_kernel({kernel})"], ["kernel head", claim])
            )
    return steps


def _kernel_rows(path: str, block: Block, width: int, context: bool) -> list[list[str]]:
    """Return the rows of each possible step for one block."""
    row_groups = []
    # a layer norm of two numbers keeps only the sign: its gradients are rounding errors
    detectable = width > 2 or block.norm == "rms"
    if (block.paired or block.kind == "attention") and detectable:
        row_groups.append([f"{path}.norm  replace_kernel({block.norm}_norm)"])
    sums = block.kind == "mlp" or (block.kind == "attention" and block.flag)
    if not block.pre and sums and detectable:
        row_groups.append([f"{path}  replace_kernel(add_norm)"])
    if block.kind == "routed":
        row_groups.append([f"{path}.experts  replace_kernel(grouped)"])
    flex = f"{path}  replace_kernel(flex_attention)"
    attends = block.kind == "attention" and (block.flag or not block.plain) and not context
    if attends:
        row_groups.append([flex])
    if block.turns:
        rope = f"{path}  replace_kernel(rope)"
        row_groups += [[rope], [rope, flex], [flex, rope]][: 3 if attends else 1]
    return row_groups


@generator
def cast(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Cast the model or a block, with and without its norm; in float64 nothing is rounded.

    Gradients of a scaled loss are not compressed.
    """
    steps = [
        step("cast", [row], ["cast", *(["compress"] if "fp16" in row else [])])
        for row in ("cast(bf16)", "cast(fp16, scale=1024, growth=1)", "cast(bf16, params=true)")
    ]
    for index, block in enumerate(config.blocks):
        path, claims = _at(index), [f"replace {_at(index)}", "cast"]
        steps.append(step("cast", [f"{path}  cast(fp16, params=true)"], [*claims, "compress"]))
        if block.kind in ("mlp", "attention"):
            rows = ["cast(bf16, params=true)", f"{path}.norm  cast(fp32)"]
            steps.append(step("cast", rows, claims))
    return steps


@generator
def unroll(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Unroll a module that is called twice, so that stages can be cut inside; and single calls."""
    steps = []
    for index, block in enumerate(config.blocks):
        path = _at(index)
        row = f"{path}.lin  unroll(2)" if block.kind == "twice" else f"{path}  unroll(1)"
        # a recomputed or fused region cannot be cut
        steps.append(
            step("unroll", [row], [f"unroll {path}", f"checkpoint {path}", f"kernel {path}"])
        )
    return steps


@generator
def pipeline_split(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Split the list of blocks into stages, or at given blocks."""
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
    # an unrolled block would be cut at its calls
    unroll_claims = [f"unroll {_at(index)}" for index in range(count)]
    steps = [
        step("pipeline_split", [row], ["cut", *(unroll_claims if "[" in row else ())], ["pp"])
        for row in rows
    ]
    if not config.tied:  # excludes rows that tie weights
        row = "blocks  pipeline_split(over=pp, tied=refuse)"
        steps.append(step("pipeline_split", [row], ["cut", "tie"], ["pp"]))
    return steps


@generator
def pipeline(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Every order that is exact except rounding, if there are enough blocks for its stages."""
    steps = []
    ranks, peer_claims = (
        sizes.get("pp", 1),
        [f"lent {_at(index)}" for index in range(len(config.blocks))],
    )
    for order in ORDERS:
        fits = default_chunks(order.name) * ranks <= len(config.blocks)
        if order.relaxed or order.sliced or not fits:
            continue
        for micro in (1, 2, 3, 4):
            if ranks == 1 or order.problem(Size(ranks, micro, default_chunks(order.name))) is None:
                row = f'pipeline(order="{order.name}", micro={micro})'
                claims = peer_claims if _evicts(order.name, ranks, micro) else []
                steps.append(step("pipeline", [row], ["order", *claims]))
    return steps


@cache
def _evicts(name: str, ranks: int, micro: int) -> bool:
    """Return whether an order itself evicts, offloads or recomputes activations."""
    kinds = make_order(name, ranks, micro).kind.tolist() if ranks > 1 else ()
    return any(kind in kinds for kind in (Kind.EVICT, Kind.OFFLOAD, Kind.RECOMPUTE))


@generator
def split_backward(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Delay the weight gradients of a block."""
    return [
        step("split_backward", [f"{_at(index)}  split_backward()"], [f"late {_at(index)}"])
        for index in range(len(config.blocks))
    ]


@generator
def overlap(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Overlap transfers if there are stages; gradients always."""
    steps = [step("overlap", ["overlap(gradients)"], ["overlap"])]
    if sizes.get("pp", 1) > 1:
        rows = ["overlap(transfers, ahead=0)", "overlap(transfers, gradients, ahead=3)"]
        steps += [step("overlap", [row], ["overlap"], ["pp"]) for row in rows]
    return steps


STAGE3_OPTIONS = ("3, prefetch=1", "3, reshard=false", "3, prefetch=2, reshard=false")


def _uneven_stages(ranks: int) -> tuple[str, str]:
    """Return ZeRO options with unequal numbers of rows per rank."""
    return f"1, rows={[2, *[1] * (ranks - 1)]}", f"3, rows={[*[1] * (ranks - 1), 2]}"


@generator
def zero(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Every ZeRO stage over each data axis, and over both together."""
    data = [axis for axis in ("dp", "ep") if axis in sizes]
    steps = [
        step(
            "zero",
            [f"zero(stage={stage}, over={axis})"],
            [f"zero {axis}", *(["sliced"] if stage else [])],
            [axis],
        )
        for axis in data
        for stage in (0, "0, bucket=1KiB", 1, 2, 3, *STAGE3_OPTIONS, *_uneven_stages(sizes[axis]))
    ]
    if len(data) == 2:
        both_axes, claims = ", ".join(data), ["zero dp", "zero ep", "sliced"]
        steps += [
            step("zero", [f"zero(stage={stage}, over=({both_axes}))"], claims, data)
            for stage in (3, 1)
        ]
    return steps


@generator
def compress(config: Config, sizes: dict[str, int], length: int) -> list[Step]:
    """Compress gradients of each data axis with a rank so high that nothing is lost."""
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


def activation_compression(config: Config) -> list[Step]:
    """Compress saved activations of blocks.  Not for properties that compare layouts: the error
    depends on how the batch is split."""
    steps = []
    for index in range(len(config.blocks)):
        path = _at(index)
        claims = [f"{verb} {path}" for verb in ("checkpoint", "kernel", "replace")]
        claims += [f"{verb} {path}" for verb in ("decompose", "unroll", "parameters")]
        codes = ("int8", "int4", "int2", "adaptive", "adaptive, bits=3")
        rows = [f"{path}  compress(activations, {code}, block=8)" for code in codes]
        with_checkpoint = [f"{path}  checkpoint()", f"{path}  compress(activations, int4, block=8)"]
        steps += [step("compress activations", [row], claims) for row in rows]
        steps.append(step("compress activations", with_checkpoint, claims))
    return steps


def gradient_compression(config: Config, sizes: dict[str, int]) -> list[Step]:
    """Lossy compression of gradients over each data axis."""
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
    """Add `verify` rows, which change nothing."""
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


# possible for few meshes, sizes or blocks only
RARE_VERBS = ("context_parallel", "expert_parallel", "complete", "tie", "grid", "adapt")
UNEVEN = ("pad", "replicate")


def allowed(candidates: Sequence[Step], config: Config, axes: Axes) -> tuple[Step, ...]:
    """Return compatible steps: of two that exclude each other, the first."""
    accepted: list[Step] = []
    for candidate in candidates:
        if not any(candidate.claims & other.claims for other in accepted):
            accepted.append(candidate)
    sizes = dict(axes)
    if sizes.get("pp", 1) > 1 and not any(s.verb == "pipeline_split" for s in accepted):
        accepted.append(pipeline_split(config, sizes, 0)[0])
    return tuple(accepted)


@st.composite
def legal(
    draw: st.DrawFn, meshes: Sequence[Axes] = MESHES, most: int = 8, *, used: bool = False
) -> Drawn:
    """Draw a model, a mesh and legal rows; `used`: the model uses something twice, rows may shard
    one of the uses, which may be refused (`Drawn.may`)."""
    axes = draw(st.sampled_from(list(meshes)))
    sizes = dict(axes)
    widest = max(sizes.get("tp", 1), sizes.get("up", 1))
    config = draw(configs(widest, sizes.get("pp", 1), context="cp" in sizes, used=used))
    length = draw(st.sampled_from([3, 4, 5]))
    offers = {verb: make(config, sizes, length) for verb, make in GENERATORS.items()}
    verbs = [verb for verb, steps in offers.items() if steps]
    any_step = st.sampled_from(verbs).flatmap(lambda verb: st.sampled_from(offers[verb]))
    drawn_steps = draw(st.lists(any_step, max_size=most))
    for axis in ("tp", "up"):  # mostly use these axes for tensor parallelism
        axis_steps = [s for s in offers["shard"] if axis in s.axes]
        if sizes.get(axis, 1) > 1 and axis_steps and draw(st.integers(0, 4)) < 4:
            drawn_steps.insert(0, draw(st.sampled_from(axis_steps)))
    all_blocks = [s for s in offers["checkpoint"] if s.rows[0].startswith("blocks.*")]
    sequence_steps = splits.sequence_slices(config, sizes, length) if used else []
    uneven_steps = [
        [s for s in offers["shard"] if f"uneven={mode}" in s.rows[0]] for mode in UNEVEN
    ]
    for steps_ in (
        *(offers[verb] for verb in RARE_VERBS),
        all_blocks,
        *uneven_steps,
        sequence_steps,
    ):
        if steps_ and draw(st.booleans()):
            drawn_steps.insert(0, draw(st.sampled_from(steps_)))
    steps = allowed(drawn_steps, config, axes)
    spare = draw(st.sampled_from([0, 1, 2]))
    return Drawn(config, axes, steps, spare, length, used=used)


def without(drawn: Drawn, removed: Step) -> Drawn:
    """Return the drawn schedule without one step."""
    remaining = tuple(s for s in drawn.steps if s != removed)
    return replace(drawn, steps=allowed(remaining, drawn.config, drawn.axes))
