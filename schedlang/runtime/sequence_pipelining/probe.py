"""Probe of sequence pipelining: run a small copy of a model by slices on one process.

The loss and every gradient must equal those of the full sequences.  `probe` tries candidates of
`Slicing` and returns the first that passes; if none passes, the model is refused with the first
module that computes a slice differently.
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
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.sequence_pipelining.carried_keys import Place, PositionLines, cache_argument
from schedlang.runtime.sequence_pipelining.slices import Slicing, token_masks
from schedlang.runtime.sequence_pipelining.trial import (
    Outputs,
    RunResult,
    Trial,
    record_outputs,
    run_by_slices,
    run_forward,
    run_full,
    take_tokens,
)
from schedlang.runtime.submodules import remove_hooks_after
from schedlang.runtime.tracing.meta_runs import meta_model, without_values


def find_fault(trial: Trial, slicing: Slicing, error: Exception) -> Refusal:
    """Return the refusal of a model whose run by slices, as `slicing` describes, gave `error`."""
    total, first = sum(trial.lengths), trial.lengths[0]
    kind = type(trial.model).__name__
    whole = _outputs(trial, trial.batch)
    changed = _outputs(trial, _change_later_tokens(trial.batch, first, total))
    ahead = [
        (name, not is_close(plain[:, :first], changed[name][:, :first]))
        for name, plain in whole.items()
        if name in changed and plain.dim() > 1 and plain.shape[1] == total
    ]
    if ahead and ahead[-1][1]:  # something inside may look ahead and be masked afterwards
        name = next(name for name, differs in ahead if differs)
        return split_refusal(
            f"`{kind}` cannot be split into slices",
            f"it is not causal: in `{name}` the first {first} tokens depend on later ones",
            "a slice has only the tokens before it",
        )
    if isinstance(error, Refusal):
        return error
    found: Outputs = {}
    try:
        with record_outputs(trial.model) as found:
            run_by_slices(trial, slicing)
    except Exception as raised:  # the model's own code may raise anything
        message = f"{type(raised).__name__}: {raised}".splitlines()[0]
        return split_refusal(
            f"`{kind}` does not run on a slice of a sequence", message, *_describe_place(found)
        )
    for name, output in whole.items():
        if output.dim() < 2 or output.shape[1] != total:
            continue
        parts = found.get(name, {})
        # the outputs are in the order in which the slices ran
        joined = _join_slices(output, [*parts.values()], trial.lengths)
        if joined is None or not is_close(joined, output):
            return split_refusal(
                f"`{kind}` cannot be split into slices",
                f"`{name}` computes a slice differently than in the full sequence",
                "positions counted from shapes, and tokens mixed outside of attention"
                " (convolutions, sums), start again in every slice",
            )
    return split_refusal(f"`{kind}` cannot be split into slices", str(error))


def _join_slices(whole: Tensor, parts: list[Tensor], lengths: Sequence[int]) -> Tensor | None:
    """Join the outputs of slices along dim 1; None if they do not fit together."""
    parts = [part[:, :length] for part, length in zip(parts, lengths) if part.dim() > 1]
    sizes = [(whole.shape[0], length, *whole.shape[2:]) for length in lengths]
    return torch.cat(parts, 1) if [tuple(part.shape) for part in parts] == sizes else None


def _describe_place(found: Outputs) -> list[str]:
    """Describe the slice that failed, and the last module that ended before."""
    upto = max((len(outputs) for outputs in found.values()), default=0)
    done = [name for name, outputs in found.items() if len(outputs) == upto]
    return [f"in slice {upto - 1}, after `{done[-1]}`"] if upto > 1 else []


def is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two outputs are equal up to rounding."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


def _change_later_tokens(batch: Mapping[str, Any], first: int, total: int) -> dict[str, Any]:
    """Return the batch with other tokens after the first slice."""

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
    with record_outputs(trial.model) as found:
        run_forward(trial, trial.model, batch)
    return {name: outputs[None] for name, outputs in found.items()}


def split_refusal(title: str, *notes: str) -> Refusal:
    """Return the refusal S655 of a model that cannot be split along its sequences."""
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


class RunsDiffer(Exception):
    """Raised if the run by slices differs from the run of full sequences."""


def probe(trial: Trial, count: int) -> Slicing:
    """Find how a trial's model runs on slices; raise Refusal S655 if it cannot.

    `count` is the program's number of slices; the trial has one slice for each of its lengths.
    """
    whole = run_full(trial)
    first: tuple[Slicing, Exception] | None = None
    for slicing in list_candidates(trial):
        try:
            tagged = _with_draws(trial, slicing, whole)
            compare_runs(whole, run_by_slices(trial, tagged))
        except Exception as error:  # the model's own code may raise anything
            first = first or (slicing, error)
            continue
        return replace(tagged, count=count, allows_left_padding=_allows_left_padding(trial, tagged))
    assert first is not None, "there is always a candidate"
    raise find_fault(trial, *first)


def guess_slicing(trial: Trial, count: int) -> Slicing:
    """Return how a model without values would probably run: for plans, not for training."""
    style = label_shift(trial)
    cache = cache_argument(trial.model)
    given = cache and style == "padded" and trial.loss is None
    shift = "given" if given else "none" if style == "none" else "head"
    carrier, masks = "cache" if cache else "calls", token_masks(trial.batch)
    return Slicing(count, carrier, masks, shift=shift, **label_fields(trial))


# -- candidates ----------------------------------------------------------------------------------


def list_candidates(trial: Trial) -> Iterator[Slicing]:
    """Yield the candidates of how a model may run on slices, the likeliest first."""
    style, count = label_shift(trial), len(trial.lengths)
    masks = token_masks(trial.batch)
    base = Slicing(count, "calls", masks, **label_fields(trial))
    head = replace(base, shift="head", head=find_head(trial)) if style != "none" else base
    if cache_argument(trial.model):
        if style == "padded" and trial.loss is None:
            yield replace(base, carrier="cache", shift="given")
        yield replace(head, carrier="cache")
        return
    head = replace(head, places=find_position_lines(trial))
    yield head
    if masks:
        yield replace(head, keys=frozenset())


def label_fields(trial: Trial) -> dict[str, Any]:
    """Return the fields of `SplitSequences` that a trial's batch and loss decide alone."""
    rule = trial.rule
    known = {"labels": rule.source, "ignore": rule.ignore_index} if rule else {}
    return {"along": trial.along, **known}


def label_shift(trial: Trial) -> str:
    """Return a model's shift of its labels: "none"; "padded" or "cut", by one token.

    Raises Refusal S655 for another selection of labels.
    """
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
    raise split_refusal(
        f"`{type(trial.model).__name__}` cannot be split into slices",
        "its loss selects labels in a way that slices cannot reproduce",
    )


def find_head(trial: Trial) -> str:
    """Return the last called module, except the model, whose output has a dim of all tokens."""
    total, found = sum(trial.lengths), [""]

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() > 2 and output.shape[1] == total:
            found.append(name)

    named = [(name, module) for name, module in trial.model.named_modules() if name]
    with remove_hooks_after(
        module.register_forward_hook(partial(note, name)) for name, module in named
    ):
        _run_once(trial, trial.batch)
    return found[-1]


def find_position_lines(trial: Trial) -> frozenset[Place]:
    """Return the lines of the model that count positions."""
    tables = {id(t) for t in (*trial.model.parameters(), *trial.model.buffers())}
    return find_lines(trial, lambda length: PositionLines(length, tables))


def find_lines(trial: Trial, watching: Callable[[int], Any]) -> frozenset[Place]:
    """Return the lines that the mode `watching(length)` finds with all tokens and with one less."""
    total = sum(trial.lengths)
    found: list[set[Place]] = []
    for length in (total, total - 1):
        watch, batch = watching(length), take_tokens(trial.batch, total, torch.arange(length))
        with enter_modes(watch):
            _run_once(trial, batch)
        found.append(watch.found - watch.others)
    return frozenset(found[0] & found[1])


def _run_once(trial: Trial, batch: Mapping[str, Any]) -> None:
    """Run the model on a batch; on the meta device if it has no values."""
    model = trial.model
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        run_forward(trial, trial.model, batch)
        return
    with without_values(batch) as (given, _):
        run_forward(trial, meta_model(trial.model, {}), given)


# -- comparing -----------------------------------------------------------------------------------


def compare_runs(whole: RunResult, parts: RunResult) -> None:
    """Raise Differs unless losses and all gradients are equal up to rounding."""
    gate = 1e-9 if whole.loss.dtype == torch.float64 else 1e-3
    if not torch.allclose(parts.loss, whole.loss, rtol=gate, atol=0.0):
        raise RunsDiffer(f"the loss is {parts.loss:.6g} in slices, {whole.loss:.6g} without")
    if parts.gradients.keys() != whole.gradients.keys():
        name = min(parts.gradients.keys() ^ whole.gradients.keys())
        raise RunsDiffer(f"only one of the two has a gradient of `{name}`")
    largest = max((float(g.norm()) for g in whole.gradients.values()), default=0.0)
    for name, wanted in whole.gradients.items():
        gap = float((parts.gradients[name] - wanted).norm())
        if not gap <= gate * float(wanted.norm()) + 1e-3 * gate * largest:
            raise RunsDiffer(
                f"the gradient of `{name}` differs by {gap / float(wanted.norm()):.1g}"
            )


def _with_draws(trial: Trial, slicing: Slicing, whole: RunResult) -> Slicing:
    if not trial.random or not whole.draws:
        return slicing
    stops = list(itertools.accumulate(trial.lengths))
    return replace(slicing, draws=draws_along(trial, whole, run_by_slices(trial, slicing), stops))


def draws_along(trial: Trial, whole: RunResult, seen: RunResult, stops: Sequence[int]) -> Tags:
    """Return the dims of random draws along the sequence, from their shapes in a run by parts.

    whole  the run of full sequences
    seen   the run by parts
    stops  for each part, the number of keys that it sees
    """
    tags, parts = {}, seen.draws
    for (_, site, call), shape in whole.draws.items():
        shapes = [parts.get((k, site, call)) for k in range(len(trial.lengths))]
        dims = _dims_of(site, shape, shapes, trial.lengths, stops)
        _check_samples(trial, site, call, shape, dims)
        tags[(site, call)] = dims
    return _copy_to_equal_blocks(tags, trial.representatives)


def _check_samples(
    trial: Trial, site: str, call: int, shape: tuple[int, ...], dims: tuple[str, ...]
) -> None:
    """Refuse (S812) a mask of tokens that all samples share.

    In training, ranks with some of the tokens do not draw equal parts of this mask.
    """
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


def _copy_to_equal_blocks(
    tags: Tags, representatives: Mapping[str, str]
) -> dict[tuple[str, int], tuple[str, ...]]:
    """Add the tags of the blocks that the small model leaves out."""
    found = dict(tags)
    for block, stands in representatives.items():
        for (site, call), dims in tags.items():
            if site == stands or site.startswith(f"{stands}."):
                found[(block + site[len(stands) :], call)] = dims
    return found


def _dims_of(
    site: str,
    shape: tuple[int, ...],
    shapes: Sequence[tuple[int, ...] | None],
    lengths: Sequence[int],
    stops: Sequence[int],
) -> tuple[str, ...]:
    """Return "rows" for a dim of the slice's tokens, "keys" for one of all keys so far, else ""."""
    known = [s for s in shapes if s is not None]
    if len(known) < len(shapes) or any(len(s) != len(shape) for s in known):
        raise RunsDiffer(f"`{site}` does not draw its random numbers equally in every slice")
    found = []
    for dim, size in enumerate(shape):
        sizes = [s[dim] for s in known]
        kinds = {"": [size] * len(sizes), "rows": list(lengths), "keys": list(stops)}
        fits = [kind for kind, wanted in kinds.items() if sizes == wanted]
        if not fits:
            raise RunsDiffer(f"`{site}` draws random numbers that no slice can reproduce")
        found.append(fits[0])
    return tuple(found)


def _allows_left_padding(trial: Trial, slicing: Slicing) -> bool:
    """Return whether slices also agree for a row that begins with a slice of padding and more."""
    masks = token_masks(trial.batch)
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
        compare_runs(run_full(other), run_by_slices(other, slicing))
    except Exception:  # the model's own code fails with padding on the left
        return False
    return True
