"""A batch: what a model takes of it, the loss, rows of ranks, microbatches, what parts weigh.

* Which keys of a batch the forward of a model takes: what else is there is for the loss.
* A batch in parts: the rows of this rank, its microbatches, and what each part weighs.
* No loss: how one would be had of what the model gives.
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


def called(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """The output of a model for a batch, of which it is given what its forward takes."""
    return model(**taken(model, batch))


def taken(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a forward: the keys that it names, or all if it has `**kwargs`."""
    names = named_arguments(model)
    return {key: value for key, value in batch.items() if names is None or key in names}


def named_arguments(model: nn.Module | None) -> frozenset[str] | None:
    """The arguments that a forward takes by name; None if it takes any.

    A wrapper that says nothing but `*args, **kwargs` speaks for the forward of its class.
    """
    if model is None:
        return None
    own = vars(model).get("forward")
    if own is None:
        return _of_class(type(model).forward)
    # a method: its function is that of many calls, and of many modules
    found = _of_class(own.__func__) if isinstance(own, MethodType) else _named(own)
    return found if found is not None else _of_class(type(model).forward)


def _named(forward: Callable[..., Any], skipped: int = 0) -> frozenset[str] | None:
    try:
        given = list(inspect.signature(forward).parameters.values())[skipped:]
    except (TypeError, ValueError):  # compiled code that tells nothing
        return None
    if any(one.kind is one.VAR_KEYWORD for one in given):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(one.name for one in given if one.kind in by_name)


_of_class = lru_cache(maxsize=256)(partial(_named, skipped=1))


Batch = Mapping[str, Any]
Shares = int | tuple[int, ...]  # so many that get as many rows, or one for each weight


@dataclass(frozen=True)
class Part:
    """Some rows of a batch, or tokens of them, as keyword arguments; and the rows' numbers."""

    inputs: dict[str, Any]
    rows: tuple[int, ...]
    shard: Any = None  # where its tokens stand, if ranks split sequences
    weighed: dict[str, Any] | None = None  # what its weight is taken from; None: its inputs


def named_tensors(batch: Batch, inside: bool = True) -> dict[str, Tensor]:
    """The tensors of a batch by name; those inside of dicts and lists by path: `side.scale.0`.

    `inside`: those of objects of many samples, too.
    """
    whole = dict(batch)
    if pytree.flat(whole):
        return {str(name): value for name, value in whole.items() if isinstance(value, Tensor)}
    closed = None if inside else pytree.separable
    leaves, _ = pytree.tree_flatten_with_path(whole, closed)
    return {dotted(keys): value for keys, value in leaves if isinstance(value, Tensor)}


def dotted(keys: Sequence[Any]) -> str:
    """A place in nested dicts and lists, as pytree gives it, by its words: `side.scale.0`."""
    words = (
        [getattr(k, word) for word in ("key", "idx", "name") if hasattr(k, word)] for k in keys
    )
    return ".".join(str(word[0]) for word in words)


def followed(batch: Batch, grad: bool = True) -> dict[str, Any]:
    """The batch with its float tensors as leaves of their own, which get gradients if `grad`."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().clone().requires_grad_(grad)

    out: dict[str, Any] = pytree.tree_map(leaf, dict(batch))
    return out


def moved(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on a device; those that are there already are the same."""

    def leaf(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    out: dict[str, Any] = pytree.tree_map(leaf, dict(batch))
    return out


def check_mapping(batch: object) -> None:
    """Refuse (S619) a step that is given something else than a dict."""
    if not isinstance(batch, Mapping):
        help_ = "give the model's keyword arguments: `{'input_ids': ids}`"
        if callable(batch):
            help_ = "call it: `batch(0)`"
        raise Refusal.of("S619", f"a batch is a dict, not {kind_of(batch)}", helps=(help_,))
    other = next((key for key in batch if not isinstance(key, str)), None)
    if other is not None:
        title = f"the keys of a batch are names, not {kind_of(other)}"
        helps = ("name the model's arguments: `{'input_ids': ids}`",)
        raise Refusal.of("S619", title, notes=(f"this one is {other!r}",), helps=helps)


def rows_of(batch: Batch) -> int:
    """Return the number of rows (samples) of a batch: the size of dim 0 of its first tensor with
    dims.

    Raises Refusal S605 for a batch that has none.
    """
    if pytree.flat(batch):
        for value in batch.values():
            if isinstance(value, Tensor) and value.ndim:
                return value.shape[0]
    _check_lists(batch)
    for value in pytree.tree_leaves(dict(batch), is_leaf=pytree.separable):
        if pytree.separable(value):
            return int(value.num_graphs)
    for value in named_tensors(batch).values():
        if value.ndim:
            return value.shape[0]
    objects = _closed(batch)
    if objects:
        key, one, _ = objects[0]
        raise Refusal.of(
            "S605",
            f"the batch has no rows: `{key}` is made of `{type(one).__name__}`",
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
    """Objects with tensors inside that cannot be cut, alone or in lists, by the key they are at;
    and of how many samples they are, where that can be told."""
    found: list[tuple[str, Any, int | None]] = []
    for key, value in () if pytree.flat(batch) else batch.items():
        listed = isinstance(value, (list, tuple)) and len(value) > 0
        one = value[0] if listed else value
        if pytree.closed(one):
            counts = (getattr(one, word, None) for word in ("num_graphs", "batch_size"))
            count = len(value) if listed else next((c for c in counts if isinstance(c, int)), None)
            found.append((key, one, count))
    return found


def _check_closed(batch: Batch, count: int) -> None:
    """Refuse (S670) objects that have as many samples as the batch has rows: each part would be
    given all of them."""
    for key, one, samples in _closed(batch):
        if samples == count:
            raise Refusal.of(
                "S670",
                f"the batch cannot be split by rows: `{key}` is made of `{type(one).__name__}`",
                notes=(
                    f"it has {samples} samples, as many as the batch has rows, but"
                    f" objects of"
                    " this class cannot be split",
                ),
                helps=(
                    *_APART,
                    "or do not split the batch: 1 rank on the axes of `zero`, 1 microbatch",
                ),
            )


def _check_lists(batch: Batch) -> None:
    """Refuse (S605) lists of samples, one tensor each: their first dims are no rows."""
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


def cut(batch: Batch, rows: Sequence[int], count: int) -> dict[str, Any]:
    """Consecutive rows of each tensor that has as many rows as the batch; the rest as it is.

    Tensors inside of dicts and lists are cut, too.  Objects of as many samples, as a `Batch` of
    torch_geometric, are made anew of some of them.
    """
    first, last = rows[0], rows[-1] + 1

    def part(value: Any) -> Any:
        if pytree.separable(value):
            return _of_samples(value, first, last) if value.num_graphs == count else value
        whole = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count
        return value[first:last] if whole else value

    given = dict(batch)
    if pytree.flat(given):  # nothing in it is made of samples
        if len(rows) == count:
            return given
        return {
            name: value[first:last]
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count
            else value
            for name, value in given.items()
        }
    whole: dict[str, Any] = pytree.tree_map(part, given, is_leaf=pytree.separable)
    return whole


def _of_samples(value: Any, first: int, last: int) -> Any:
    """An object of some of the samples of another: graphs keep their edges, numbered anew.

    Raises Refusal S670 where it does not give its samples back.
    """
    if (first, last) == (0, value.num_graphs):
        return value
    kind = type(value)
    held: list[str] = list(value.keys()) if hasattr(value, "keys") else []
    followed = [key.removesuffix("_batch") for key in held if key.endswith("_batch")]
    more = {"follow_batch": followed} if followed else {}
    root: Any = next(one for one in reversed(kind.__mro__) if hasattr(one, "from_data_list"))
    try:
        return root.from_data_list(value.to_data_list()[first:last], **more)
    except Exception as error:
        raise Refusal.of(
            "S670",
            f"the batch cannot be split by samples: `{kind.__name__}` does not return them",
            notes=(f"{type(error).__name__}: {error}",),
            helps=("build it by `from_data_list`, or by a loader that does",),
        ) from error


def shares(count: int, parts: Shares) -> list[range]:
    """`count` rows in `parts` runs that differ by at most one row, larger ones first.

    Of weights there is a run for each: what is left of whole rows goes to those that lack most of
    one (Hamilton's method).
    """
    if isinstance(parts, int):
        base, extra = divmod(count, parts)
        starts = [place * base + min(place, extra) for place in range(parts + 1)]
        return [range(a, b) for a, b in zip(starts, starts[1:])]
    whole = sum(parts)
    sizes = [count * weight // whole for weight in parts]
    lacking = sorted(range(len(parts)), key=lambda place: -(count * parts[place] % whole))
    for place in lacking[: count - sum(sizes)]:
        sizes[place] += 1
    ends = list(accumulate(sizes, initial=0))
    return [range(a, b) for a, b in zip(ends, ends[1:])]


def split(batch: Batch, replicas: Shares, micro: int) -> list[list[Part]]:
    """Split a batch among `replicas` data-parallel ranks, each rank's rows into `micro`
    microbatches.

    Raises Refusal S606 if there are fewer rows than parts.
    """
    count = _enough(batch, replicas, micro)
    every = _rows(count, replicas, micro)
    return [[Part(cut(batch, rows, count), rows) for rows in parts] for parts in every]


@lru_cache(maxsize=8)  # most steps have as many rows as the last one
def _rows(count: int, replicas: Shares, micro: int) -> list[list[tuple[int, ...]]]:
    """The numbers of the rows of each part; nobody changes the lists."""
    every = shares(count, replicas)
    return [[tuple(one[k.start : k.stop]) for k in shares(len(one), micro)] for one in every]


def sample_of(batch: Batch, replicas: Shares, micro: int) -> dict[str, Any]:
    """The first of the largest parts, found without the others.  Or S606."""
    count = _enough(batch, replicas, micro)
    if isinstance(replicas, int):
        share = range((count + replicas - 1) // replicas)
    else:
        share = max(shares(count, replicas), key=len)
    return cut(batch, range(share.start, share.start + (len(share) + micro - 1) // micro), count)


def even(batch: Batch, replicas: Shares, micro: int) -> bool:
    """Return whether all parts have as many rows."""
    if isinstance(replicas, int):
        return rows_of(batch) % (replicas * micro) == 0
    sizes = {len(share) for share in shares(rows_of(batch), replicas)}
    return len(sizes) == 1 and sizes.pop() % micro == 0


def _enough(batch: Batch, among: Shares, micro: int) -> int:
    """The rows of a batch, of which each replica gets one for each microbatch at least (S606)."""
    count, dealt = rows_of(batch), ""
    if isinstance(among, int):
        replicas, least, needed = among, count // among, among * micro
    else:
        each = (min(map(len, shares(rows, among))) for rows in itertools.count(count))
        replicas, least = len(among), next(each)
        needed = (
            count
            if least >= micro
            else next(n for n, k in enumerate(each, count + 1) if k >= micro)
        )
        dealt = f", rows dealt {' : '.join(map(str, among))}"
    if replicas * micro > 1:
        _check_closed(batch, count)
    if least < micro:
        raise Refusal.of(
            "S606",
            f"the batch has {count} row{'s' * (count != 1)}, but {needed} are needed",
            notes=(
                f"{replicas} data-parallel ranks with {micro} microbatch{'es' * (micro > 1)} each"
                + dealt,
            ),
            helps=(f"use a batch of at least {needed} rows",),
        )
    return count


@dataclass(frozen=True)
class Absent:
    """Stands in an output for what the whole batch has and its parts do not give."""

    reason: str
    place: str = ""  # if more than this leaf is lost: what, by path


def is_output(value: Any) -> bool:
    """Return whether a leaf of an output is one that can be put together, or says why not."""
    return isinstance(value, (Tensor, Absent, bool, int, float, str, type(None)))


def stack(outputs: Sequence[Any], rows: Sequence[int], weights: Sequence[float]) -> Any:
    """The output for the whole batch from the outputs of its parts.

    Tensors with one row per sample, or the same number of rows, are put one after the other, and so
    are lists with an entry for each sample; other floating-point numbers (losses) are averaged by
    weight.  Of anything else one stands for all if they are equal; if not it is Absent.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
    weights = weights if sum(weights) > 0 else [1.0] * len(rows)
    spec = flat[0][1]
    if any(other != spec for _, other in flat[1:]) or _listed(spec, rows[0]):
        return _nested(outputs, rows, weights)
    leaves = zip(*(leaves for leaves, _ in flat))
    whole = [_stacked(values, rows, weights) for values in leaves]
    return pytree.tree_unflatten(whole, spec)


def _listed(spec: Any, count: int) -> bool:
    """Return whether a nest has a list with as many entries as a part has rows."""
    if spec.type in (list, tuple) and spec.num_children == count > 1:
        return True
    return any(_listed(child, count) for child in spec.children())


def _nested(values: Sequence[Any], rows: Sequence[int], weights: Sequence[float]) -> Any:
    """The whole of nests, some of whose lists may have an entry for each sample."""
    first = values[0]
    if len(values) > 1 and type(first) in (list, tuple):
        lengths = [len(v) if type(v) is type(first) else -1 for v in values]
        if lengths == list(rows) and len(set(rows)) > 1:
            return type(first)(one for value in values for one in value)
        if lengths == list(rows) and any(_of_one(one, rows[0]) for one in first):
            return Absent("it is not known whether its entries belong to samples")
    flat = [_one_level(value) for value in values]
    spec = flat[0][1]
    if any(other != spec for _, other in flat[1:]):
        return Absent(f"parts of a `{type(first).__name__}` are not of one length")
    if spec.is_leaf():
        return _stacked(values, rows, weights)
    children = zip(*(leaves for leaves, _ in flat))
    return pytree.tree_unflatten([_nested(one, rows, weights) for one in children], spec)


def _one_level(value: Any) -> tuple[list[Any], Any]:
    """Flatten a value by one level: what it holds itself, and how that is put together."""
    return pytree.tree_flatten(value, lambda one: one is not value)


def _of_one(entry: Any, count: int) -> bool:
    """Return whether an entry of a list may be that of one sample: it has dims, and no rows."""
    return isinstance(entry, Tensor) and entry.ndim > 0 and entry.shape[0] != count > 1


def _stacked(values: Sequence[Any], rows: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    absent = next((v for v in values if isinstance(v, Absent)), None)
    if absent is not None or len(values) == 1:
        return absent or first
    if all(isinstance(v, Tensor) for v in values):
        if _by_rows(values, rows):
            if _either_dim(values, rows):
                return Absent("it is not known which of its dims has the rows")
            return torch.cat(list(values))
        alike = all(v.shape == first.shape for v in values)
        if alike and first.is_floating_point():
            return _mean(values, weights)
        if alike and all(torch.equal(v, first) for v in values):
            return first
        return Absent("its parts cannot be concatenated")
    if all(isinstance(v, float) for v in values):
        return _mean(values, weights)
    plain = isinstance(first, (bool, int, str, type(None)))
    if plain and all(type(v) is type(first) and v == first for v in values):
        return first
    return Absent(f"parts of a `{type(first).__name__}` cannot be concatenated")


def _either_dim(values: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Return whether dim 0 has several entries for each row, and another dim has exactly one."""
    if values[0].shape[0] == rows[0]:
        return False
    others = zip(*(v.shape[1:] for v in values))
    return any(sizes == tuple(rows) for sizes in others)


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean by weight; a part that weighs nothing may have no number (the mean of no label)."""
    total = sum(weights)
    return sum(value * (weight / total) for value, weight in zip(values, weights) if weight)


def _by_rows(values: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Return whether dim 0 holds the same number of rows for each sample, in all parts."""
    if any(not v.ndim or v.shape[0] % count for v, count in zip(values, rows)):
        return False
    each = {v.shape[0] // count for v, count in zip(values, rows)}
    return len(each) == 1 and each != {0} and len({v.shape[1:] for v in values}) == 1


def forward(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None,
) -> tuple[Any, Tensor | None]:
    """The output of a model, and its loss."""
    output = called(model, batch)
    return output, loss_of(output, batch, loss)


def loss_of(
    output: Any,
    batch: Mapping[str, Any],
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None,
) -> Tensor | None:
    """The loss of a forward: by the function given, by the model, or the output if a scalar."""
    if loss is not None:
        return loss(output, batch)
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) else None


LABELS = ("labels", "label", "targets", "target", "y")
OUTPUTS = ("logits", "sample", "prediction", "last_hidden_state")


def no_loss(model: Any, output: Any, batch: Mapping[str, Any]) -> Diagnostic:
    """A model without a loss (S615), and a function for its file, made for what it returns."""
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


def not_a_loss(value: Any, model: Any = None, batch: Mapping[str, Any] | None = None) -> Diagnostic:
    """A loss function that returns something else than one number (S615)."""
    if isinstance(value, Tensor) and value.is_complex():
        said, help_ = "a complex number", "return a real one: `value.real`, or `value.abs()`"
    elif isinstance(value, Tensor):
        said = f"a tensor of shape {list(value.shape)}"
        help_ = "return one number: its mean, `value.mean()`"
    else:
        said = "None" if value is None else kind_of(value)
        help_ = "return a tensor of one number"
    return Diagnostic(
        "S615",
        f"`loss(output, batch)` returns {said}, not one number that has a gradient",
        notes=tuple(_absent(model, batch)) if batch is not None else (),
        helps=(help_,),
    )


def is_loss(value: Any) -> bool:
    """Return whether a loss function gave what a backward can begin from."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _absent(model: Any, batch: Mapping[str, Any]) -> list[str]:
    """Return notes on arguments of the forward that look like labels and are not in the batch."""
    names = named_arguments(model) if model is not None else None
    return [
        f"its forward takes `{name}`, which is not in the batch"
        for name in LABELS
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
    path, value = next((one for one in floats if _word(one[0]) in OUTPUTS), floats[0])
    said, key = _place(path, output), _labels(model, batch)
    label = batch.get(key)
    if isinstance(label, Tensor) and label.is_floating_point():
        return f'torch.nn.functional.mse_loss({said}, batch["{key}"])'
    flat = value.dim() > 2 and (not isinstance(label, Tensor) or label.dim() > 1)
    if flat:
        said = f"{said}.flatten(0, -2)"
    return f'torch.nn.functional.cross_entropy({said}, batch["{key}"]{".flatten()" * flat})'


def _labels(model: Any, batch: Mapping[str, Any]) -> str:
    """The key that looks like labels: by its name, or as one that the forward does not take."""
    names = named_arguments(model)
    left = [key for key in batch if names is not None and key not in names]
    return next((key for key in LABELS if key in batch), left[0] if left else LABELS[0])


def _word(path: Any) -> str:
    return str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""


def _place(path: Any, output: Any) -> str:
    """A place in an output as Python says it: an attribute, where there is one."""
    said, held = "output", output
    for key in path:
        word = getattr(key, "key", getattr(key, "name", None))
        if isinstance(word, str) and word.isidentifier() and hasattr(held, word):
            said, held = f"{said}.{word}", getattr(held, word)
        else:
            index = word if word is not None else key.idx
            said, held = f"{said}[{index!r}]".replace("'", '"'), held[index]
    return said
