"""Whether a model may run on slices of its sequences, and the module at which it may not.

* Why a model cannot be cut along its sequences: the module that gives a slice something else.
* Whether a model may run on slices of its sequences, tried on a small stand-in before it trains.
  Whole and by slices, on one process, the losses and every gradient must be equal. A model for
  which no way is found is refused, with the first module that gives something else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.inside import hooked
from schedlang.runtime.modes import ambient
from schedlang.runtime.sequence_pipelining.carry import Place, Watch, cache_argument
from schedlang.runtime.sequence_pipelining.slices import Slicing, masks_of
from schedlang.runtime.sequence_pipelining.trial import (
    Outputs,
    Seen,
    Trial,
    forward,
    noted,
    sliced,
    tokens_of,
    watched,
)
from schedlang.runtime.tracing.meta import meta_model, without_values


def fault(trial: Trial, slicing: Slicing, error: Exception) -> Refusal:
    """The refusal of a model for which slices failed with `error` when run as `slicing` says."""
    total, first = sum(trial.lengths), trial.lengths[0]
    kind = type(trial.model).__name__
    whole = _outputs(trial, trial.batch)
    changed = _outputs(trial, _changed(trial.batch, first, total))
    ahead = [
        (name, not near(plain[:, :first], changed[name][:, :first]))
        for name, plain in whole.items()
        if name in changed and plain.dim() > 1 and plain.shape[1] == total
    ]
    if ahead and ahead[-1][1]:  # something inside may look ahead and be masked afterwards
        name = next(name for name, differs in ahead if differs)
        return refusal(
            f"`{kind}` cannot be split into slices",
            f"it is not causal: in `{name}` the first {first} tokens depend on later ones",
            "a slice has only the tokens before it",
        )
    if isinstance(error, Refusal):
        return error
    found: Outputs = {}
    try:
        with noted(trial.model) as found:
            sliced(trial, slicing)
    except Exception as raised:  # the model's own code, on a slice: whatever it raises
        said = f"{type(raised).__name__}: {raised}".splitlines()[0]
        return refusal(f"`{kind}` does not run on a slice of a sequence", said, *_where(found))
    for name, output in whole.items():
        if output.dim() < 2 or output.shape[1] != total:
            continue
        parts = found.get(name, {})
        joined = _joined(output, [*parts.values()], trial.lengths)  # in the order in which they ran
        if joined is None or not near(joined, output):
            return refusal(
                f"`{kind}` cannot be split into slices",
                f"`{name}` computes a slice differently than in the full sequence",
                "positions counted from shapes, and tokens mixed outside of attention"
                " (convolutions, sums), start again in every slice",
            )
    return refusal(f"`{kind}` cannot be split into slices", str(error))


def _joined(whole: Tensor, parts: list[Tensor], lengths: Sequence[int]) -> Tensor | None:
    """Join the outputs of slices along dim 1; None if they do not fit together."""
    parts = [part[:, :length] for part, length in zip(parts, lengths) if part.dim() > 1]
    sizes = [(whole.shape[0], length, *whole.shape[2:]) for length in lengths]
    return torch.cat(parts, 1) if [tuple(part.shape) for part in parts] == sizes else None


def _where(found: Outputs) -> list[str]:
    """The module that ended last before a slice failed."""
    upto = max((len(outputs) for outputs in found.values()), default=0)
    done = [name for name, outputs in found.items() if len(outputs) == upto]
    return [f"in slice {upto - 1}, after `{done[-1]}`"] if upto > 1 else []


def near(a: Tensor, b: Tensor) -> bool:
    """Tell whether two outputs are equal but for rounding."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


def _changed(batch: Mapping[str, Any], first: int, total: int) -> dict[str, Any]:
    """The batch with other tokens after the first slice."""

    def other(name: str, value: Any) -> Any:
        ids = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == total
        if not ids or "mask" in name or "position" in name or "label" in name:
            return value
        copied = value.clone()
        copied[:, first:] = (
            copied[:, first:].flip(1) if not value.is_floating_point() else (copied[:, first:] + 1)
        )
        return copied

    return {name: other(name, value) for name, value in batch.items()}


def _outputs(trial: Trial, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    with noted(trial.model) as found:
        forward(trial, trial.model, batch)
    return {name: outputs[None] for name, outputs in found.items()}


def refusal(title: str, *notes: str) -> Refusal:
    """The model cannot be cut along its sequences."""
    return Refusal.of(
        "S655",
        title,
        notes=notes,
        helps=(
            "leave `slices` out: `slices=1`",
            'or use an order without slices: `pipeline(order="1F1B", micro=...)`',
        ),
    )


Tags = Mapping[tuple[str, int], tuple[str, ...]]


class Differs(Exception):
    """Slices give something else than the whole; the message says what."""


def probe(trial: Trial, count: int) -> Slicing:
    """Find how the model of a trial runs on slices; raise Refusal S655 where it cannot.

    `count` is the number of slices of the program; the trial has those of its lengths.
    """
    whole = watched(trial)
    first: tuple[Slicing, Exception] | None = None
    for slicing in candidates(trial):
        try:
            tagged = _tagged(trial, slicing, whole)
            compare(whole, sliced(trial, tagged))
        except Exception as error:  # the model's own code, on what it has not been given before
            first = first or (slicing, error)
            continue
        return replace(tagged, count=count, left=_left(trial, tagged))
    assert first is not None, "there is always a candidate"
    raise fault(trial, *first)


def guess(trial: Trial, count: int) -> Slicing:
    """Return how a model without values would run, untried: it can be shown, not trained."""
    style = shift_of(trial)
    cache = cache_argument(trial.model)
    given = cache and style == "padded" and trial.loss is None
    shift = "given" if given else "none" if style == "none" else "head"
    carrier, masks = "cache" if cache else "calls", masks_of(trial.batch)
    return Slicing(count, carrier, masks, shift=shift, **labelled(trial))


# -- ways ----------------------------------------------------------------------------------------


def candidates(trial: Trial) -> Iterator[Slicing]:
    """Ways that a model of this kind may be run in, the likeliest first."""
    style, count = shift_of(trial), len(trial.lengths)
    masks = masks_of(trial.batch)
    base = Slicing(count, "calls", masks, **labelled(trial))
    head = replace(base, shift="head", head=head_of(trial)) if style != "none" else base
    if cache_argument(trial.model):
        if style == "padded" and trial.loss is None:
            yield replace(base, carrier="cache", shift="given")
        yield replace(head, carrier="cache")
        return
    head = replace(head, places=places_of(trial))
    yield head
    if masks:
        yield replace(head, keys=frozenset())


def labelled(trial: Trial) -> dict[str, Any]:
    """The fields of `SequenceParts` that follow from the batch and the loss of a trial alone."""
    rule = trial.rule
    known = {"labels": rule.source, "ignore": rule.ignore_index} if rule else {}
    return {"along": trial.along, **known}


def shift_of(trial: Trial) -> str:
    """Return a model's shift of its labels: `none`; `padded` or `cut`, by one token; refuse
    others."""
    if trial.rule is None:
        return "none"
    total = sum(trial.lengths)
    numbers = torch.arange(1, total + 1).unsqueeze(0)
    for step in trial.rule.steps:
        numbers = step(numbers)
    seen = numbers.flatten().tolist()
    shifted = list(range(2, total + 1))
    if seen == [1, *shifted]:
        return "none"
    if seen == shifted:
        return "cut"
    if len(seen) == total and seen[:-1] == shifted:
        return "padded"
    raise refusal(
        f"`{type(trial.model).__name__}` cannot be split into slices",
        "its loss selects labels in a way that slices cannot reproduce",
    )


def head_of(trial: Trial) -> str:
    """The last module, but the model itself, that gives something for every token."""
    total, found = sum(trial.lengths), [""]

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() > 2 and output.shape[1] == total:
            found.append(name)

    named = [(name, module) for name, module in trial.model.named_modules() if name]
    with hooked(module.register_forward_hook(partial(note, name)) for name, module in named):
        _shown(trial, trial.batch)
    return found[-1]


def places_of(trial: Trial) -> frozenset[Place]:
    """Lines that count positions."""
    tables = {id(t) for t in (*trial.model.parameters(), *trial.model.buffers())}
    return lines_of(trial, lambda length: Watch(length, tables))


def lines_of(trial: Trial, watching: Callable[[int], Any]) -> frozenset[Place]:
    """Lines that a mode for a length finds, at the whole length and at one token less."""
    total = sum(trial.lengths)
    found: list[set[Place]] = []
    for length in (total, total - 1):
        watch, batch = watching(length), tokens_of(trial.batch, total, torch.arange(length))
        with ambient(watch):
            _shown(trial, batch)
        found.append(watch.found - watch.others)
    return frozenset(found[0] & found[1])


def _shown(trial: Trial, batch: Mapping[str, Any]) -> None:
    """The model on a batch, to be watched; for shapes only where it has no values."""
    model = trial.model
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        forward(trial, trial.model, batch)
        return
    with without_values(batch) as (given, _):
        forward(trial, meta_model(trial.model, {}), given)


# -- comparing -----------------------------------------------------------------------------------


def compare(whole: Seen, parts: Seen) -> None:
    """Raise Differs unless losses and all gradients are equal but for rounding."""
    wide = whole.loss.dtype == torch.float64
    gate = 1e-9 if wide else 1e-3
    if not torch.allclose(parts.loss, whole.loss, rtol=gate, atol=0.0):
        raise Differs(f"the loss is {parts.loss:.6g} in slices, {whole.loss:.6g} without")
    if parts.gradients.keys() != whole.gradients.keys():
        name = min(parts.gradients.keys() ^ whole.gradients.keys())
        raise Differs(f"only one of the two has a gradient of `{name}`")
    largest = max((float(g.norm()) for g in whole.gradients.values()), default=0.0)
    for name, wanted in whole.gradients.items():
        gap = float((parts.gradients[name] - wanted).norm())
        if not gap <= gate * float(wanted.norm()) + 1e-3 * gate * largest:
            raise Differs(f"the gradient of `{name}` differs by {gap / float(wanted.norm()):.1g}")


def _tagged(trial: Trial, slicing: Slicing, whole: Seen) -> Slicing:
    if not trial.random or not whole.draws:
        return slicing
    stops = list(itertools.accumulate(trial.lengths))
    return replace(slicing, draws=draws_along(trial, whole, sliced(trial, slicing), stops))


def draws_along(trial: Trial, whole: Seen, seen: Seen, stops: Sequence[int]) -> Tags:
    """Find the dims of random draws along the sequence, from their shapes in a pass by parts.

    `stops` are the numbers of keys that the parts see.
    """
    tags, parts = {}, seen.draws
    for (_, site, call), shape in whole.draws.items():
        drawn = [parts.get((k, site, call)) for k in range(len(trial.lengths))]
        dims = _dims_of(site, shape, drawn, trial.lengths, stops)
        _check_samples(trial, site, call, shape, dims)
        tags[(site, call)] = dims
    return _spread(tags, trial.alike)


def _check_samples(
    trial: Trial, site: str, call: int, shape: tuple[int, ...], dims: tuple[str, ...]
) -> None:
    """Refuse (S812) a mask of tokens that all samples share: who holds some tokens draws no part
    of it alike in training."""
    if trial.unbatched.get((site, call)) and any(dims):
        raise Refusal.of(
            "S812",
            f"`{site}` draws {shape}: tokens, but no samples",
            notes=("sequences are split, and all samples share this mask of their tokens",),
            helps=(
                "draw it for each sample: a mask whose first dim is that of the batch",
                "or draw it without a dim of tokens: one for the whole sequence",
                "or split no sequences of this model",
            ),
        )


def _spread(tags: Tags, alike: Mapping[str, str]) -> dict[tuple[str, int], tuple[str, ...]]:
    """The same for the blocks that were left out."""
    found = dict(tags)
    for block, stands in alike.items():
        for (site, call), dims in tags.items():
            if site == stands or site.startswith(f"{stands}."):
                found[(block + site[len(stands) :], call)] = dims
    return found


def _dims_of(
    site: str,
    shape: tuple[int, ...],
    drawn: Sequence[tuple[int, ...] | None],
    lengths: Sequence[int],
    stops: Sequence[int],
) -> tuple[str, ...]:
    """Per dim whether it is that of the slice, of all keys so far, or another."""
    known = [s for s in drawn if s is not None]
    if len(known) < len(drawn) or any(len(s) != len(shape) for s in known):
        raise Differs(f"`{site}` does not draw its random numbers equally in every slice")
    found = []
    for dim, size in enumerate(shape):
        sizes = [s[dim] for s in known]
        kinds = {"": [size] * len(sizes), "rows": list(lengths), "keys": list(stops)}
        fits = [kind for kind, wanted in kinds.items() if sizes == wanted]
        if not fits:
            raise Differs(f"`{site}` draws random numbers that no slice can reproduce")
        found.append(fits[0])
    return tuple(found)


def _left(trial: Trial, slicing: Slicing) -> bool:
    """Return whether rows that begin with padding, a whole slice of it and more, come out right,
    too."""
    masks = masks_of(trial.batch)
    if not masks:
        return True
    padded = {name: v.clone() if isinstance(v, Tensor) else v for name, v in trial.batch.items()}
    pad = trial.lengths[0] + 1
    for name in masks:
        padded[name][:] = 1
        padded[name][0, :pad] = 0
    if trial.rule is not None:
        padded[trial.rule.source][0, :pad] = trial.rule.ignore_index
    try:
        other = replace(trial, batch=padded)
        compare(watched(other), sliced(other, slicing))
    except Exception:  # the model's own code: padding in front is what it cannot bear
        return False
    return True
