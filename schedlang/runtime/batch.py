"""A batch of a step: inputs of the model, the loss, rows of ranks, microbatches, stacked outputs.

* Which keys of a batch a model's forward accepts; other keys are for the loss.
* Split a batch by rows into parts: rows of each rank, and microbatches of these.
* Put the outputs of parts together.
* The loss of an output; where there is none, a diagnostic with a proposal for one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, kind_of
from schedlang.ir import pytree
from schedlang.runtime.row_lists import is_row_list


def run_model(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Run a model on the keys of a batch that its forward accepts; return its output."""
    return model(**accepted_inputs(model, batch))


def accepted_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a batch that a forward accepts; all of them if it has `**kwargs`."""
    names = named_arguments(model)
    return {key: value for key, value in batch.items() if names is None or key in names}


def named_arguments(model: nn.Module | None) -> frozenset[str] | None:
    """Return the arguments that a forward accepts by name; None if it accepts any.

    For a wrapper with `*args, **kwargs` only, the forward of its class decides.
    """
    if model is None:
        return None
    forward = vars(model).get("forward")
    if forward is None:
        return _of_class(type(model).forward)
    # a method: its function is shared by many calls and many modules, so the cache serves them
    names = _of_class(forward.__func__) if isinstance(forward, MethodType) else _named(forward)
    return names if names is not None else _of_class(type(model).forward)


def _named(forward: Callable[..., Any], skipped: int = 0) -> frozenset[str] | None:
    try:
        parameters = list(inspect.signature(forward).parameters.values())[skipped:]
    except (TypeError, ValueError):  # compiled code without a signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)


_of_class = lru_cache(maxsize=256)(partial(_named, skipped=1))


Batch = Mapping[str, Any]
RowShares = int | tuple[int, ...]  # a number of equal shares, or one weight for each share


@dataclass(frozen=True)
class BatchPart:
    """Some rows of a batch, or some tokens of these rows, as keyword arguments; and row numbers."""

    inputs: dict[str, Any]
    rows: tuple[int, ...]
    token_shard: Any = None  # the layout of its tokens, if ranks split sequences
    # what its weight is computed from; None: its inputs
    weight_inputs: dict[str, Any] | None = None
    means: Any = None  # how the means of its loss are weighted, if it has several


def named_tensors(batch: Batch, inside: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a batch by name; tensors in dicts and lists by path: `side.scale.0`.

    `inside`: also the tensors of objects that hold several samples.
    """
    values = dict(batch)
    if pytree.is_flat(values):
        return {str(name): value for name, value in values.items() if isinstance(value, Tensor)}
    closed = None if inside else pytree.is_sample_batch
    leaves, _ = pytree.tree_flatten_with_path(values, closed)
    return {dotted_path(keys): value for keys, value in leaves if isinstance(value, Tensor)}


def dotted_path(keys: Sequence[Any]) -> str:
    """Return the path that pytree gives for a nested value as dotted text: `side.scale.0`."""
    attributes = ("key", "idx", "name")
    labels = ([getattr(key, attr) for attr in attributes if hasattr(key, attr)] for key in keys)
    return ".".join(str(attr[0]) for attr in labels)


def with_leaf_tensors(batch: Batch, grad: bool = True) -> dict[str, Any]:
    """Copy a batch with its float tensors as new leaves, which get gradients if `grad`."""

    def as_leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().clone().requires_grad_(grad)

    leaves: dict[str, Any] = pytree.tree_map(as_leaf, dict(batch))
    return leaves


def batch_to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Return the batch with its tensors on a device, copied only if they are elsewhere."""

    def to_device(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    moved: dict[str, Any] = pytree.tree_map(to_device, dict(batch))
    return moved


def check_batch(batch: object) -> None:
    """Refuse (S619) a batch that is not a dict with names as keys."""
    if not isinstance(batch, Mapping):
        help_ = "give the model's keyword arguments: `{'input_ids': ids}`"
        if callable(batch):
            help_ = "call it: `batch(0)`"
        raise Refusal.of("S619", f"a batch is a dict, not {kind_of(batch)}", helps=(help_,))
    bad_key = next((key for key in batch if not isinstance(key, str)), None)
    if bad_key is not None:
        message = f"the keys of a batch are names, not {kind_of(bad_key)}"
        helps = ("name the model's arguments: `{'input_ids': ids}`",)
        raise Refusal.of("S619", message, notes=(f"this one is {bad_key!r}",), helps=helps)


def row_count(batch: Batch) -> int:
    """Return the rows of a batch: dim 0 of its first tensor with dims; refuse (S605) if none."""
    if pytree.is_flat(batch):
        for value in batch.values():
            if isinstance(value, Tensor) and value.ndim:
                return value.shape[0]
    _check_lists(batch)
    for value in pytree.tree_leaves(dict(batch), is_leaf=pytree.is_sample_batch):
        if pytree.is_sample_batch(value):
            return int(value.num_graphs)
    for value in named_tensors(batch).values():
        if value.ndim:
            return value.shape[0]
    objects = _closed(batch)
    if objects:
        key, sample, _ = objects[0]
        raise Refusal.of(
            "S605",
            f"the batch has no rows: `{key}` is made of `{type(sample).__name__}`",
            notes=(
                "the batch is split by rows, dim 0 of its tensors; objects of this class"
                " cannot be split",
            ),
            helps=_APART,
        )
    raise Refusal.of(
        "S605",
        "the batch has no rows",
        notes=("none of its values is a tensor whose dim 0 is the samples",),
        helps=("return a dict of tensors from `batch(seed)`: `{'input_ids': ...}`",),
    )


_APART = (
    "pass `forward` the tensors inside, by name: `{'x': data.x, 'edges': data.edge_index}`",
    "to split them by rows, pad samples to one size: tensors of [samples, ...]",
    "or make one object of them that is split by samples: torch_geometric's `Batch.from_data_list`",
)


def _closed(batch: Batch) -> list[tuple[str, Any, int | None]]:
    """List unsplittable objects with tensors: key, object (a list's first), samples if known."""
    objects: list[tuple[str, Any, int | None]] = []
    for key, value in () if pytree.is_flat(batch) else batch.items():
        listed = isinstance(value, (list, tuple)) and len(value) > 0
        sample = value[0] if listed else value
        if pytree.is_opaque(sample):
            counts = (getattr(sample, attr, None) for attr in ("num_graphs", "batch_size"))
            count = len(value) if listed else next((c for c in counts if isinstance(c, int)), None)
            objects.append((key, sample, count))
    return objects


def _check_closed(batch: Batch, count: int) -> None:
    """Refuse (S670) objects with a sample per row that cannot be split: each part would get all."""
    for key, sample, samples in _closed(batch):
        if samples == count:
            raise Refusal.of(
                "S670",
                f"the batch cannot be split by rows: `{key}` is made of `{type(sample).__name__}`",
                notes=(
                    f"it has {samples} samples, as many as the batch has rows, but objects of"
                    " this class cannot be split",
                ),
                helps=(
                    *_APART,
                    "or do not split the batch: 1 rank on the axes of `zero`, 1 microbatch",
                ),
            )


def _check_lists(batch: Batch) -> None:
    """Refuse (S605) a batch of lists of samples, one tensor each: their first dims are not rows."""
    lists = {key: value for key, value in batch.items() if isinstance(value, (list, tuple))}
    if len(lists) < len(batch) or not lists:
        return
    sizes = {value.shape[:1] for value in named_tensors(batch).values()}
    if len(sizes) > 1:
        key, value = next(iter(lists.items()))
        raise Refusal.of(
            "S605",
            "the batch has no rows: it is made of lists of samples",
            notes=(
                f"`{key}` is a list of {len(value)}, and the tensors in the lists have first dims"
                f" of {', '.join(str(s[0]) if s else 'none' for s in sorted(sizes))}",
                "the batch is split by rows, dim 0 of its tensors",
            ),
            helps=("stack the samples, padded to one size: `torch.stack(images)`",),
        )


def select_rows(batch: Batch, rows: Sequence[int], count: int) -> dict[str, Any]:
    """Take consecutive rows of each tensor with as many rows as the batch; keep all else as it is.

    count: the rows of the batch. Tensors in dicts and lists are included, and lists with an entry
    for each row. Objects with as many samples are rebuilt from the selected ones.
    """
    start, stop = rows[0], rows[-1] + 1

    def part(value: Any) -> Any:
        if pytree.is_sample_batch(value):
            return _of_samples(value, start, stop) if value.num_graphs == count else value
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count
        return value[start:stop] if has_rows or is_row_list(value, count) else value

    def is_leaf(value: Any) -> bool:
        return pytree.is_sample_batch(value) or is_row_list(value, count)

    values = dict(batch)
    if pytree.is_flat(values):  # nothing in it is made of samples
        if len(rows) == count:
            return values
        return {
            name: value[start:stop]
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count
            else value
            for name, value in values.items()
        }
    selected: dict[str, Any] = pytree.tree_map(part, values, is_leaf=is_leaf)
    return selected


def _of_samples(value: Any, start: int, stop: int) -> Any:
    """Return an object of some samples of another; raise Refusal S670 if it does not return them.

    Graphs keep their edges, with new numbers.
    """
    if (start, stop) == (0, value.num_graphs):
        return value
    kind = type(value)
    keys: list[str] = list(value.keys()) if hasattr(value, "keys") else []
    followed = [key.removesuffix("_batch") for key in keys if key.endswith("_batch")]
    options = {"follow_batch": followed} if followed else {}
    root: Any = next(base for base in reversed(kind.__mro__) if hasattr(base, "from_data_list"))
    try:
        return root.from_data_list(value.to_data_list()[start:stop], **options)
    except Exception as error:
        raise Refusal.of(
            "S670",
            f"the batch cannot be split by samples: `{kind.__name__}` does not return them",
            notes=(f"{type(error).__name__}: {error}",),
            helps=("build it by `from_data_list`, or by a loader that does",),
        ) from error


def split_rows(count: int, parts: RowShares) -> list[range]:
    """Split `count` rows into consecutive ranges that differ by at most one row, larger ones first.

    With weights, there is one range for each weight; remaining rows go to the weights with the
    largest remainders (Hamilton's method).
    """
    if isinstance(parts, int):
        base, extra = divmod(count, parts)
        starts = [index * base + min(index, extra) for index in range(parts + 1)]
        return [range(a, b) for a, b in zip(starts, starts[1:])]
    total = sum(parts)
    sizes = [count * weight // total for weight in parts]
    short = sorted(range(len(parts)), key=lambda index: -(count * parts[index] % total))
    for index in short[: count - sum(sizes)]:
        sizes[index] += 1
    ends = list(accumulate(sizes, initial=0))
    return [range(a, b) for a, b in zip(ends, ends[1:])]


def split_batch(batch: Batch, replicas: RowShares, micro: int) -> list[list[BatchPart]]:
    """Split a batch among `replicas` data-parallel ranks, and the rows of each into microbatches.

    `micro` is the number of microbatches. Raises Refusal S606 if there are fewer rows than parts.
    """
    count = _enough(batch, replicas, micro)
    split = _rows(count, replicas, micro)
    return [[BatchPart(select_rows(batch, rows, count), rows) for rows in parts] for parts in split]


@lru_cache(maxsize=8)  # most steps have as many rows as the step before
def _rows(count: int, replicas: RowShares, micro: int) -> list[list[tuple[int, ...]]]:
    """Return the row numbers of each part; the result is shared, do not change it."""
    shares = split_rows(count, replicas)
    return [
        [tuple(part[k.start : k.stop]) for k in split_rows(len(part), micro)] for part in shares
    ]


def largest_part(batch: Batch, replicas: RowShares, micro: int) -> dict[str, Any]:
    """Return the first of the largest parts, without making the others. Raises Refusal S606."""
    count = _enough(batch, replicas, micro)
    if isinstance(replicas, int):
        share = range((count + replicas - 1) // replicas)
    else:
        share = max(split_rows(count, replicas), key=len)
    end = share.start + (len(share) + micro - 1) // micro
    return select_rows(batch, range(share.start, end), count)


def splits_evenly(batch: Batch, replicas: RowShares, micro: int) -> bool:
    """Return whether all parts have the same number of rows."""
    if isinstance(replicas, int):
        return row_count(batch) % (replicas * micro) == 0
    sizes = {len(share) for share in split_rows(row_count(batch), replicas)}
    return len(sizes) == 1 and sizes.pop() % micro == 0


def _enough(batch: Batch, shares: RowShares, micro: int) -> int:
    """Return the rows of a batch; raise Refusal S606 if a replica has fewer than `micro` rows."""
    count, dealt_text = row_count(batch), ""
    if isinstance(shares, int):
        replicas, fewest, needed = shares, count // shares, shares * micro
    else:
        least_rows = (min(map(len, split_rows(rows, shares))) for rows in itertools.count(count))
        replicas, fewest = len(shares), next(least_rows)
        larger = (n for n, k in enumerate(least_rows, count + 1) if k >= micro)
        needed = count if fewest >= micro else next(larger)
        dealt_text = f", rows dealt {' : '.join(map(str, shares))}"
    if replicas * micro > 1:
        _check_closed(batch, count)
    if fewest < micro:
        parts = f"{micro} microbatch{'es' * (micro > 1)} each"
        raise Refusal.of(
            "S606",
            f"the batch has {count} row{'s' * (count != 1)}, but {needed} are needed",
            notes=(f"{replicas} data-parallel ranks with {parts}{dealt_text}",),
            helps=(f"use a batch of at least {needed} rows",),
        )
    return count


@dataclass(frozen=True)
class MissingOutput:
    """Placeholder in an output for a value that cannot be put together from the parts."""

    reason: str
    place: str = ""  # if more than this leaf is missing: the path of all that is missing


def can_stack(value: Any) -> bool:
    """Return whether a leaf of an output can be put together."""
    return isinstance(value, (Tensor, MissingOutput, bool, int, float, str, type(None)))


def stack_outputs(outputs: Sequence[Any], rows: Sequence[int], weights: Sequence[float]) -> Any:
    """Put the outputs of parts together to the output for the whole batch.

    Tensors with one row per sample, or equally many, are concatenated, and so are lists with an
    entry for each sample. Other floating-point numbers (losses) are averaged by weight. Any other
    value is kept if it is equal in all parts; else it is `MissingOutput`.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
    weights = weights if sum(weights) > 0 else [1.0] * len(rows)
    spec = flat[0][1]
    if any(other_spec != spec for _, other_spec in flat[1:]) or _listed(spec, rows[0]):
        return _nested(outputs, rows, weights)
    leaves = zip(*(leaves for leaves, _ in flat))
    stacked = [_stacked(values, rows, weights) for values in leaves]
    return pytree.tree_unflatten(stacked, spec)


def _listed(spec: Any, count: int) -> bool:
    """Return whether a nest contains a list with as many entries as a part has rows."""
    if spec.type in (list, tuple) and spec.num_children == count > 1:
        return True
    return any(_listed(child, count) for child in spec.children())


def _nested(values: Sequence[Any], rows: Sequence[int], weights: Sequence[float]) -> Any:
    """Put nests together whose lists may have an entry for each sample."""
    first = values[0]
    if len(values) > 1 and type(first) in (list, tuple):
        lengths = [len(v) if type(v) is type(first) else -1 for v in values]
        if lengths == list(rows) and len(set(rows)) > 1:
            return type(first)(child for value in values for child in value)
        if lengths == list(rows) and any(_of_one(child, rows[0]) for child in first):
            return MissingOutput("it is not known whether its entries belong to samples")
    flat = [_one_level(value) for value in values]
    spec = flat[0][1]
    if any(other_spec != spec for _, other_spec in flat[1:]):
        return MissingOutput(f"parts of a `{type(first).__name__}` are not of one length")
    if spec.is_leaf():
        return _stacked(values, rows, weights)
    children = zip(*(leaves for leaves, _ in flat))
    return pytree.tree_unflatten([_nested(child, rows, weights) for child in children], spec)


def _one_level(value: Any) -> tuple[list[Any], Any]:
    """Flatten a value by one level; return its children and the spec that rebuilds it."""
    return pytree.tree_flatten(value, lambda node: node is not value)


def _of_one(entry: Any, count: int) -> bool:
    """Return whether a list entry may belong to one sample: it has dims, and none of rows."""
    return isinstance(entry, Tensor) and entry.ndim > 0 and entry.shape[0] != count > 1


def _stacked(values: Sequence[Any], rows: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    absent = next((v for v in values if isinstance(v, MissingOutput)), None)
    if absent is not None or len(values) == 1:
        return absent or first
    if all(isinstance(v, Tensor) for v in values):
        if _by_rows(values, rows):
            if _either_dim(values, rows):
                return MissingOutput("it is not known which of its dims has the rows")
            return torch.cat(list(values))
        same_shape = all(v.shape == first.shape for v in values)
        if same_shape and first.is_floating_point():
            return _mean(values, weights)
        if same_shape and all(torch.equal(v, first) for v in values):
            return first
        return MissingOutput("its parts cannot be concatenated")
    if all(isinstance(v, float) for v in values):
        return _mean(values, weights)
    is_plain = isinstance(first, (bool, int, str, type(None)))
    if is_plain and all(type(v) is type(first) and v == first for v in values):
        return first
    return MissingOutput(f"parts of a `{type(first).__name__}` cannot be concatenated")


def _either_dim(values: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Return whether dim 0 has several entries for each row, and another dim has exactly one."""
    if values[0].shape[0] == rows[0]:
        return False
    other_sizes = zip(*(v.shape[1:] for v in values))
    return any(sizes == tuple(rows) for sizes in other_sizes)


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean by weight; a part with weight 0 may have NaN (the mean over no label)."""
    total = sum(weights)
    return sum(value * (weight / total) for value, weight in zip(values, weights) if weight)


def _by_rows(values: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Return whether dim 0 holds the same number of rows for each sample, in all parts."""
    if any(not v.ndim or v.shape[0] % count for v, count in zip(values, rows)):
        return False
    per_row = {v.shape[0] // count for v, count in zip(values, rows)}
    return len(per_row) == 1 and per_row != {0} and len({v.shape[1:] for v in values}) == 1


def run_forward(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None,
) -> tuple[Any, Tensor | None]:
    """Run a model on a batch; return its output and its loss."""
    output = run_model(model, batch)
    return output, loss_of(output, batch, loss)


def loss_of(
    output: Any, batch: Mapping[str, Any], loss: Callable[[Any, Mapping[str, Any]], Tensor] | None
) -> Tensor | None:
    """Return the loss: by `loss`, else the model's own, else the output if it is a scalar."""
    if loss is not None:
        return loss(output, batch)
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return value if isinstance(value, Tensor) else None


LABEL_NAMES = ("labels", "label", "targets", "target", "y")
OUTPUT_NAMES = ("logits", "sample", "prediction", "last_hidden_state")


def no_loss_diagnostic(model: Any, output: Any, batch: Mapping[str, Any]) -> Diagnostic:
    """Return the diagnostic (S615) of a model without a loss, and propose a loss function."""
    return Diagnostic(
        "S615",
        "the model returns no loss",
        notes=(
            f"it returns {kind_of(output)}, and there is no `loss(output, batch)`",
            *_absent(model, batch),
        ),
        helps=(
            "add to the model file:\n      def loss(output, batch):\n"
            f"          return {_loss(model, output, batch)}",
            "or let the model return one: put labels into the batch",
        ),
    )


def bad_loss_diagnostic(
    value: Any, model: Any = None, batch: Mapping[str, Any] | None = None
) -> Diagnostic:
    """Return the diagnostic (S615) of a loss function that does not return one number."""
    if isinstance(value, Tensor) and value.is_complex():
        returned, help_ = "a complex number", "return a real one: `value.real`, or `value.abs()`"
    elif isinstance(value, Tensor):
        returned = f"a tensor of shape {list(value.shape)}"
        help_ = "return one number: its mean, `value.mean()`"
    else:
        returned = "None" if value is None else kind_of(value)
        help_ = "return a tensor of one number"
    return Diagnostic(
        "S615",
        f"`loss(output, batch)` returns {returned}, not one number that has a gradient",
        notes=tuple(_absent(model, batch)) if batch is not None else (),
        helps=(help_,),
    )


def is_loss(value: Any) -> bool:
    """Return whether a loss function returned one real number, from which a backward can begin."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _absent(model: Any, batch: Mapping[str, Any]) -> list[str]:
    """Return notes on arguments of the forward that look like labels and are not in the batch."""
    names = named_arguments(model) if model is not None else None
    return [
        f"its forward takes `{name}`, which is not in the batch"
        for name in LABEL_NAMES
        if name in (names or ()) and name not in batch
    ]


def _loss(model: Any, output: Any, batch: Mapping[str, Any]) -> str:
    leaves, _ = pytree.tree_flatten_with_path(output)
    floats = [(path, v) for path, v in leaves if isinstance(v, Tensor) and v.is_floating_point()]
    scalar = next((path for path, v in floats if v.dim() == 0 and v.requires_grad), None)
    if scalar is not None:
        return _place(scalar, output)
    if not floats:
        return 'torch.nn.functional.mse_loss(output, batch["target"])'
    path, value = next((entry for entry in floats if _word(entry[0]) in OUTPUT_NAMES), floats[0])
    expression, key = _place(path, output), _labels(model, batch)
    label = batch.get(key)
    if isinstance(label, Tensor) and label.is_floating_point():
        return f'torch.nn.functional.mse_loss({expression}, batch["{key}"])'
    flat = value.dim() > 2 and (not isinstance(label, Tensor) or label.dim() > 1)
    if flat:
        expression = f"{expression}.flatten(0, -2)"
    return f'torch.nn.functional.cross_entropy({expression}, batch["{key}"]{".flatten()" * flat})'


def _labels(model: Any, batch: Mapping[str, Any]) -> str:
    """Return the key of the labels: by a usual name, or the first key that the forward rejects."""
    names = named_arguments(model)
    remaining = [key for key in batch if names is not None and key not in names]
    default = (remaining or LABEL_NAMES)[0]
    return next((key for key in LABEL_NAMES if key in batch), default)


def _word(path: Any) -> str:
    return str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""


def _place(path: Any, output: Any) -> str:
    """Return the Python expression for a leaf of `output`: attributes where it has them."""
    expression, value = "output", output
    for key in path:
        attr = getattr(key, "key", getattr(key, "name", None))
        if isinstance(attr, str) and attr.isidentifier() and hasattr(value, attr):
            expression, value = f"{expression}.{attr}", getattr(value, attr)
        else:
            index = attr if attr is not None else key.idx
            expression, value = f"{expression}[{index!r}]".replace("'", '"'), value[index]
    return expression
