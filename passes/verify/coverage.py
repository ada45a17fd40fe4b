"""Coverage: which conditions were not exercised, and what that could hide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from schedlang.ir.features import Tried
from schedlang.passes.verify.observe import Batch, Observation
from schedlang.passes.verify.variants import POSITIONS, TOKENS, Batches, integers, shapes
from schedlang.report import Gap

if TYPE_CHECKING:
    from schedlang.ir.plan import Plan


def gaps(
    seen: Batches,
    *,
    sizes: Mapping[str, int],
    drawn: int | None = None,
    parameters: Mapping[str, int] | None = None,
) -> tuple[Gap, ...]:
    """What was not exercised.

    `sizes` are the mesh axes, `drawn` how many dropout masks were drawn, `parameters` the numbers
    of elements by name.
    """
    found = [*_batches(seen), *_labels(seen), *_inputs(seen)]
    if drawn == 0:
        found.append(Gap("no dropout", "masks that differ between copies or on recomputation"))
    axes = {name: size for name, size in sizes.items() if size > 1}
    if len(axes) > 1 and len(set(axes.values())) == 1:
        size = next(iter(axes.values()))
        found.append(Gap(f"all axes have size {size}", "sums over or divisions by the wrong axis"))
    if parameters and axes and not any(n % s for n in parameters.values() for s in axes.values()):
        found.append(
            Gap("every axis divides every parameter", "elements dropped behind an even cut")
        )
    return tuple(found)


def unoffered(seen: Observation) -> tuple[Gap, ...]:
    """Kinds that the program does not offer for comparison, and values that could not be read."""
    kinds = [Gap(f"{kind} (not offered)", f"wrong {kind}") for kind in sorted(seen.missing)]
    types = [Gap(f"`{name}` in the output", "wrong values in it") for name in sorted(seen.unread)]
    left = [
        Gap(f"`{k}` in the output: {v}", "wrong values in it") for k, v in seen.left_out.items()
    ]
    return (*kinds, *types, *left)


def idle(expected: Observation) -> tuple[Gap, ...]:
    """Parameters on which the loss did not depend in any step: their gradients say nothing."""
    asked: dict[str, bool] = {}
    for key, value in expected.tensors.items():
        if key.kind == "gradients":
            asked[key.name] = asked.get(key.name, False) or bool(value is not None and value.any())
    never = [name for name, found in asked.items() if not found]
    if not never:
        return ()
    more = f" and {len(never) - 1} more" if len(never) > 1 else ""
    return (Gap(f"no gradient of `{never[0]}`{more}", "wrong gradients there"),)


def apart(plan: Plan, tried: bool) -> tuple[Gap, ...]:
    """What ran as it stands within the program, and by itself at most."""
    said = {}
    for _, row in plan.rows_with(Tried):
        if row.apart and tried:
            hides = "what it keeps from one microbatch, step or module to the next"
            said[f"`{row}` {row.apart} within the program: only by itself, call after call"] = hides
        elif row.apart:
            said[f"`{row}` {row.apart}: without a working dtype it ran as it stands"] = "all of it"
    return tuple(Gap(condition, hides) for condition, hides in said.items())


def repeating(plan: Plan) -> tuple[Gap, ...]:
    """A pattern of blocks that repeats with every stage hides blocks that count from 0 again."""
    trunks = {trunk for cut in plan.cuts for trunk in cut.trunks if plan.model.children(trunk)}
    stages = 1
    for cut in plan.cuts:
        stages *= plan.mesh.size(cut.axis) * (plan.order.chunks if plan.order else 1)
    found = []
    for trunk in sorted(trunks):
        kinds = [_pattern(block) for block in plan.model.model.get_submodule(trunk).children()]
        each, rest = divmod(len(kinds), stages)
        varied = len(set(kinds)) > 1
        if stages > 1 and not rest and varied and kinds[:each] * stages == kinds:
            said = f"the pattern of `{trunk}` repeats with every stage"
            found.append(Gap(said, "blocks that are counted from 0 again"))
    return tuple(found)


def _pattern(block: Any) -> tuple[Any, ...]:
    """What makes blocks differ beside their weights, without a number that only counts them."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, type(module).__name__, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, plain) and key not in ("layer_idx", "training") and key[0] != "_"
    )


def _batches(seen: Batches) -> Iterator[Gap]:
    if len(seen.all) < 2 or all(_same(seen.all[0], batch) for batch in seen.all[1:]):
        yield Gap("one batch only", "values kept from one step to the next")
    elif seen.shapes < 2:
        yield Gap("one shape only", "shapes kept from the first batch")
    if len({tuple(s[1:] for s in shapes(batch).values()) for batch in seen.all}) == 1:
        yield Gap("one length only", "sizes of the first batch kept for others")
    if seen.parts > 1 and not seen.ragged:
        yield Gap("no batch with a smaller last part", "parts dropped or weighed alike")
    if seen.parts > 1 and not seen.even:
        yield Gap("no batch of equal parts", "buffers reused while still needed")


def _same(a: Batch, b: Batch) -> bool:
    from torch import equal

    from schedlang.runtime.batch import named_tensors

    one, other = named_tensors(a), named_tensors(b)
    return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())


def _labels(seen: Batches) -> Iterator[Gap]:
    """Uneven numbers of labels that count, which tell a mean of means from a mean."""
    if not seen.uneven:
        yield Gap("no ignored labels", "means of means, counts of padding")
    if not seen.empty:
        yield Gap("no part without labels", "means over nothing, and parts that weigh nothing")


def _inputs(seen: Batches) -> Iterator[Gap]:
    if not seen.padded:
        yield Gap("no padding", "masks that are dropped, shifted or not passed on")
    if not seen.classes and any(TOKENS in integers(batch) for batch in seen.all):
        yield Gap("every row has all kinds of tokens", "a part of the vocabulary that is not asked")
    places = [b[POSITIONS] for b in seen.all if POSITIONS in integers(b)]
    if places and all(p.dim() < 2 or bool((p == p[:1]).all()) for p in places):
        yield Gap("all rows have equal positions", "positions of one row taken for all")
    if not any(_floats(batch) for batch in seen.all):
        yield Gap("no float inputs", "wrong gradients of inputs")


def _floats(batch: Mapping[str, Any]) -> bool:
    from schedlang.runtime.batch import named_tensors

    return any(value.is_floating_point() for value in named_tensors(batch).values())
