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
    trials_ignoring_a_label,
)
from schedlang.runtime.submodules import remove_hooks_after
from schedlang.runtime.tracing.meta_runs import meta_model, without_values


def find_fault(trial: Trial, slicing: Slicing, error: Exception) -> Refusal:
    """Return the refusal of a model whose run by slices, as `slicing` describes, gave `error`."""
    total, first_length = sum(trial.lengths), trial.lengths[0]
    kind = type(trial.model).__name__
    full = _outputs(trial, trial.batch)
    changed = _outputs(trial, _change_later_tokens(trial.batch, first_length, total))
    ahead = [
        (name, not is_close(full_output[:, :first_length], changed[name][:, :first_length]))
        for name, full_output in full.items()
        if name in changed and full_output.dim() > 1 and full_output.shape[1] == total
    ]
    if ahead and ahead[-1][1]:  # something inside may look ahead and be masked afterwards
        name = next(name for name, differs in ahead if differs)
        return split_refusal(
            f"`{kind}` cannot be split into slices",
            f"it is not causal: in `{name}` the first {first_length} tokens depend on later ones",
            "a slice has only the tokens before it",
        )
    if isinstance(error, Refusal):
        return error
    outputs: Outputs = {}
    try:
        with record_outputs(trial.model) as outputs:
            run_by_slices(trial, slicing)
    except Exception as raised:  # the model's own code may raise anything
        message = f"{type(raised).__name__}: {raised}".splitlines()[0]
        return split_refusal(
            f"`{kind}` does not run on a slice of a sequence", message, *_describe_place(outputs)
        )
    for name, output in full.items():
        if output.dim() < 2 or output.shape[1] != total:
            continue
        parts = outputs.get(name, {})
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


def _join_slices(full: Tensor, parts: list[Tensor], lengths: Sequence[int]) -> Tensor | None:
    """Join the outputs of slices along dim 1; None if they do not fit together."""
    parts = [part[:, :length] for part, length in zip(parts, lengths) if part.dim() > 1]
    sizes = [(full.shape[0], length, *full.shape[2:]) for length in lengths]
    return torch.cat(parts, 1) if [tuple(part.shape) for part in parts] == sizes else None


def _describe_place(by_module: Outputs) -> list[str]:
    """Describe the slice that failed, and the last module that ended before."""
    upto = max((len(outputs) for outputs in by_module.values()), default=0)
    ended = [name for name, outputs in by_module.items() if len(outputs) == upto]
    return [f"in slice {upto - 1}, after `{ended[-1]}`"] if upto > 1 else []


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
    with record_outputs(trial.model) as recorded:
        run_forward(trial, trial.model, batch)
    return {name: outputs[None] for name, outputs in recorded.items()}


def split_refusal(message: str, *notes: str) -> Refusal:
    """Return the refusal S655 of a model that cannot be split along its sequences."""
    return Refusal.of(
        "S655",
        message,
        notes=notes,
        helps=(
            "leave `slices` out: `slices=1`",
            'or use an order without slices: `pipeline(order="1F1B", micro=...)`',
        ),
    )


Tags = Mapping[tuple[str, int], tuple[str, ...]]


class RunsDiffer(Exception):
    """Raised if the run by slices differs from the run of full sequences."""


class LossesDiffer(RunsDiffer):
    """Raised if the losses of the two runs differ."""


def probe(trial: Trial, count: int) -> Slicing:
    """Find how a trial's model runs on slices; raise Refusal S655 if it cannot.

    `count` is the program's number of slices; the trial has one slice for each of its lengths.
    """
    full = run_full(trial)
    first_failure: tuple[Slicing, Exception] | None = None
    for slicing in list_candidates(trial):
        try:
            tagged = _with_draws(trial, slicing, full)
            compare_runs(full, run_by_slices(trial, tagged))
            check_ignored_labels(trial, partial(run_by_slices, slicing=tagged))
        except Exception as error:  # the model's own code may raise anything
            first_failure = first_failure or (slicing, error)
            continue
        return replace(tagged, count=count, allows_left_padding=_allows_left_padding(trial, tagged))
    assert first_failure is not None, "there is always a candidate"
    raise find_fault(trial, *first_failure)


def guess_slicing(trial: Trial, count: int) -> Slicing:
    """Return how a model without values would probably run: for plans, not for training."""
    style = label_shift(trial)
    cache = cache_argument(trial.model)
    is_given = cache and style == "padded" and trial.loss is None
    shift = "given" if is_given else "none" if style == "none" else "head"
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
    label_args = {"labels": rule.source, "ignore": rule.ignore_index} if rule else {}
    return {"along": trial.along, **label_args}


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
    labels = numbers.flatten().tolist()
    shifted = list(range(2, total + 1))
    if labels == [1, *shifted]:
        return "none"
    if labels == shifted:
        return "cut"
    if len(labels) == total and labels[:-1] == shifted:
        return "padded"
    raise split_refusal(
        f"`{type(trial.model).__name__}` cannot be split into slices",
        "its loss selects labels in a way that slices cannot reproduce",
    )


def find_head(trial: Trial) -> str:
    """Return the last called module, except the model, whose output has a dim of all tokens."""
    total, names = sum(trial.lengths), [""]

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() > 2 and output.shape[1] == total:
            names.append(name)

    submodules = [(name, module) for name, module in trial.model.named_modules() if name]
    with remove_hooks_after(
        module.register_forward_hook(partial(note, name)) for name, module in submodules
    ):
        _run_once(trial, trial.batch)
    return names[-1]


def find_position_lines(trial: Trial) -> frozenset[Place]:
    """Return the lines of the model that count positions."""
    tables = {id(t) for t in (*trial.model.parameters(), *trial.model.buffers())}
    return find_lines(trial, lambda length: PositionLines(length, tables))


def find_lines(trial: Trial, watching: Callable[[int], Any]) -> frozenset[Place]:
    """Return the lines that the mode `watching(length)` finds with all tokens and with one less."""
    total = sum(trial.lengths)
    line_sets: list[set[Place]] = []
    for length in (total, total - 1):
        watch, batch = watching(length), take_tokens(trial.batch, total, torch.arange(length))
        with enter_modes(watch):
            _run_once(trial, batch)
        line_sets.append(watch.found - watch.others)
    return frozenset(line_sets[0] & line_sets[1])


def _run_once(trial: Trial, batch: Mapping[str, Any]) -> None:
    """Run the model on a batch; on the meta device if it has no values."""
    model = trial.model
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        run_forward(trial, trial.model, batch)
        return
    with without_values(batch) as (inputs, _):
        run_forward(trial, meta_model(trial.model, {}), inputs)


# -- comparing -----------------------------------------------------------------------------------


def compare_runs(full: RunResult, parts: RunResult) -> None:
    """Raise Differs unless losses and all gradients are equal up to rounding."""
    compare_losses(full, parts)
    gate = _gate(full)
    if parts.gradients.keys() != full.gradients.keys():
        name = min(parts.gradients.keys() ^ full.gradients.keys())
        raise RunsDiffer(f"only one of the two has a gradient of `{name}`")
    largest = max((float(g.norm()) for g in full.gradients.values()), default=0.0)
    for name, full_gradient in full.gradients.items():
        gap = float((parts.gradients[name] - full_gradient).norm())
        if not gap <= gate * float(full_gradient.norm()) + 1e-3 * gate * largest:
            raise RunsDiffer(
                f"the gradient of `{name}` differs by {gap / float(full_gradient.norm()):.1g}"
            )


def compare_losses(full: RunResult, parts: RunResult) -> None:
    """Raise LossesDiffer unless losses are equal up to rounding."""
    if not torch.allclose(parts.loss, full.loss, rtol=_gate(full), atol=0.0):
        raise LossesDiffer(f"the loss is {parts.loss:.6g} in slices, {full.loss:.6g} without")


def _gate(full: RunResult) -> float:
    return 1e-9 if full.loss.dtype == torch.float64 else 1e-3


def check_ignored_labels(trial: Trial, run_parts: Callable[[Trial], RunResult]) -> None:
    """Raise LossesDiffer if parts have another loss where a label does not count.

    Later batches may have such labels: with counts of their own, parts are not weighted by tokens.
    """
    for ignoring in trials_ignoring_a_label(trial):
        try:
            full = run_full(ignoring)
            parts = run_parts(ignoring) if full.loss.isfinite() else full
        except Exception:
            # the model's own code refuses this number: these are not labels. Should parts alone
            # refuse it, so will a step with such a batch: nothing is trained wrongly
            continue
        if full.loss.isfinite():
            compare_losses(full, parts)


def _with_draws(trial: Trial, slicing: Slicing, full: RunResult) -> Slicing:
    if not trial.random or not full.draws:
        return slicing
    stops = list(itertools.accumulate(trial.lengths))
    return replace(slicing, draws=draws_along(trial, full, run_by_slices(trial, slicing), stops))


def draws_along(trial: Trial, full: RunResult, split: RunResult, stops: Sequence[int]) -> Tags:
    """Return the dims of random draws along the sequence, from their shapes in a run by parts.

    whole  the run of full sequences
    seen   the run by parts
    stops  for each part, the number of keys that it sees
    """
    tags, parts = {}, split.draws
    for (_, site, call), shape in full.draws.items():
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
    all_tags = dict(tags)
    for block, representative in representatives.items():
        for (site, call), dims in tags.items():
            if site == representative or site.startswith(f"{representative}."):
                all_tags[(block + site[len(representative) :], call)] = dims
    return all_tags


def _dims_of(
    site: str,
    shape: tuple[int, ...],
    shapes: Sequence[tuple[int, ...] | None],
    lengths: Sequence[int],
    stops: Sequence[int],
) -> tuple[str, ...]:
    """Return "rows" for a dim of the slice's tokens, "keys" for one of all keys so far, else ""."""
    part_shapes = [s for s in shapes if s is not None]
    if len(part_shapes) < len(shapes) or any(len(s) != len(shape) for s in part_shapes):
        raise RunsDiffer(f"`{site}` does not draw its random numbers equally in every slice")
    roles = []
    for dim, size in enumerate(shape):
        sizes = [s[dim] for s in part_shapes]
        kinds = {"": [size] * len(sizes), "rows": list(lengths), "keys": list(stops)}
        fits = [kind for kind, expected in kinds.items() if sizes == expected]
        if not fits:
            raise RunsDiffer(f"`{site}` draws random numbers that no slice can reproduce")
        roles.append(fits[0])
    return tuple(roles)


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
        padded_trial = replace(trial, batch=padded)
        compare_runs(run_full(padded_trial), run_by_slices(padded_trial, slicing))
    except Exception:  # the model's own code fails with padding on the left
        return False
    return True
