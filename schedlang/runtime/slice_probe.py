"""Whether a model may run on slices of its sequences, tried on a small stand-in before it trains.

Whole and by slices, on one process, the losses and every gradient must be equal. A model for which
no way is found is refused, with the first module that gives something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime.carry_calls import Watch
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient
from schedlang.runtime.parts import rows_of, shares
from schedlang.runtime.random import LogicalDropout, Window
from schedlang.runtime.record import loss_of
from schedlang.runtime.scope import Scope, entered, named_sites, visit
from schedlang.runtime.sliced import Loss, Slices, run, windows
from schedlang.runtime.slices import Place, Slicing, Weight, length_of
from schedlang.runtime.small_model import small_copy
from schedlang.runtime.trace import LabelRule
from schedlang.runtime.training import Training

TOKENS = (3, 2, 4)  # of the slices: lengths and ends all differ
Tags = Mapping[tuple[str, int], tuple[str, ...]]


@dataclass(frozen=True)
class Trial:
    """A small model, a small batch, and how the parts of it are weighed."""

    model: nn.Module
    batch: Mapping[str, Any]
    lengths: tuple[int, ...]
    loss: Loss | None
    weight: Weight
    rule: LabelRule | None
    random: bool
    alike: Mapping[str, str] = field(default_factory=dict)  # see small_model.Small


@dataclass
class Seen:
    """What one pass over the trial's model showed."""

    loss: Tensor
    gradients: dict[str, Tensor]
    draws: dict[Any, tuple[int, ...]]


class Differs(Exception):
    """Slices give something else than the whole; the message says what."""


def probe(trial: Trial, count: int) -> Slicing:
    """How the model of a trial runs on slices; raises Refusal S655 where it cannot.

    `count` is the number of slices of the program; the trial has those of its lengths.
    """
    from schedlang.runtime.slice_faults import fault

    whole = watched(trial)
    first: tuple[Slicing, Exception] | None = None
    for slicing in candidates(trial):
        try:
            tagged = _tagged(trial, slicing, whole)
            _compare(whole, sliced(trial, tagged))
        except (Differs, LookupError, RuntimeError, ValueError, TypeError, Refusal) as error:
            first = first or (slicing, error)
            continue
        return replace(tagged, count=count, left=_left(trial, tagged))
    assert first is not None, "there is always a candidate"
    raise fault(trial, *first)


def guess(trial: Trial, count: int) -> Slicing:
    """How a model without values would run, untried: it can be shown, not trained."""
    style = shift_of(trial)
    cache = has_cache(trial.model)
    given = cache and style == "padded" and trial.loss is None
    shift = "given" if given else "none" if style == "none" else "head"
    source = trial.rule.source if trial.rule else ""
    return Slicing(count, "cache" if cache else "calls", source, shift)


def trial_of(
    model: nn.Module,
    sample: Mapping[str, Any],
    count: int,
    *,
    loss: Loss | None,
    weight: Weight,
    rule: LabelRule | None,
    random: bool,
    short: bool = True,
) -> Trial:
    """A trial from a microbatch: its first rows and tokens, on a short model."""
    total = length_of(sample)
    lengths = TOKENS if total >= sum(TOKENS) and short else _lengths(total, count)
    batch = _small(model, sample, sum(lengths), rule)
    small = small_copy(model, short=short)
    return Trial(small.model, batch, lengths, loss, weight, rule, random, small.alike)


def _lengths(total: int, count: int) -> tuple[int, ...]:
    return tuple(len(run) for run in shares(total, min(count, total)))


def _small(
    model: nn.Module, sample: Mapping[str, Any], total: int, rule: LabelRule | None
) -> dict[str, Any]:
    """Two rows of `total` tokens; what is constant there is drawn, masks pad the last row."""
    rows, length = rows_of(sample), length_of(sample)
    keep = min(rows, 2)
    generator = torch.Generator().manual_seed(0)
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]

    def small(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        cut = value[:keep] if value.shape[0] == rows else value
        if cut.dim() > 1 and cut.shape[1] == length:
            cut = cut[:, :total]
        if cut.dim() == 4 and cut.shape[-1] == length:
            cut = cut[:, :, :total, :total]
        cut = cut.detach().to("cpu", copy=True)
        if "mask" in name and cut.dim() == 2:
            cut[:] = 1
            cut[-1, total - 2 :] = 0
        elif name == (rule.source if rule else None) or _constant(cut):
            high = max(int(cut.max()) + 1, min((s for s in sizes if s > int(cut.max())), default=2))
            cut = torch.randint(0, high, cut.shape, generator=generator).to(cut.dtype)
        return cut

    return {name: small(name, value) for name, value in sample.items()}


def _constant(value: Tensor) -> bool:
    kinds = value.dtype in (torch.int64, torch.int32) and value.dim() == 2
    return kinds and bool((value == value[:1, :1]).all())


# -- ways ----------------------------------------------------------------------------------------


def candidates(trial: Trial) -> Iterator[Slicing]:
    """Ways that a model of this kind may be run in, the likeliest first."""
    style, count = shift_of(trial), len(trial.lengths)
    source = trial.rule.source if trial.rule else ""
    ignore = trial.rule.ignore_index if trial.rule else -100
    base = Slicing(count, "calls", source, "none", ignore)
    head = replace(base, shift="head", head=_head(trial)) if style != "none" else base
    if has_cache(trial.model):
        if style == "padded" and trial.loss is None:
            yield replace(base, carrier="cache", shift="given")
        yield replace(head, carrier="cache")
        return
    places = _places(trial)
    yield replace(head, places=places)
    yield replace(head, places=places, masks="rows")


def has_cache(model: nn.Module) -> bool:
    """Whether it is a model of transformers that takes a cache of keys and values."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return False
    return "past_key_values" in inspect.signature(model.forward).parameters


def shift_of(trial: Trial) -> str:
    """What a model does to its labels: `none`; `padded` or `cut`, shifted by one token."""
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
    raise Differs("its loss chooses among the labels in a way that slices cannot follow")


def _head(trial: Trial) -> str:
    """The last module, but the model itself, that gives something for every token."""
    total, found = sum(trial.lengths), [""]
    handles = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() > 2 and output.shape[1] == total:
                found.append(name)

        return hook

    for name, module in trial.model.named_modules():
        if name:
            handles.append(module.register_forward_hook(note(name)))
    try:
        forward(trial, trial.model, trial.batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[-1]


def _places(trial: Trial) -> frozenset[Place]:
    """Lines that count positions, at the whole length and at one token less."""
    tables = {id(t) for t in (*trial.model.parameters(), *trial.model.buffers())}
    total = sum(trial.lengths)
    found: list[set[Place]] = []
    for length in (total, total - 1):
        batch = _shorter(trial.batch, total, length)
        watch = Watch(length, tables)
        with ambient(watch):
            forward(trial, trial.model, batch)
        found.append(watch.found - watch.others)
    return frozenset(found[0] & found[1])


def _shorter(batch: Mapping[str, Any], total: int, length: int) -> dict[str, Any]:
    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        if value.dim() == 4 and value.shape[-1] == total:
            return value[:, :, :length, :length].contiguous()
        return value[:, :length].contiguous() if value.shape[1] == total else value

    return {name: part(value) for name, value in batch.items()}


# -- passes --------------------------------------------------------------------------------------


class _Noting(LogicalDropout):
    """Logical masks that note their shapes, by slice, module and turn."""

    def __init__(self, found: dict[Any, tuple[int, ...]], within: Any) -> None:
        super().__init__(0, self._note)
        self.found, self.within = found, within

    def _note(self, site: str, call: int, shape: tuple[int, ...]) -> Window | None:
        part = visit()
        self.found[(part.span.index if part else None, site, call)] = shape
        window: Window | None = self.within(site, call, shape) if self.within else None
        return window


@contextmanager
def running(trial: Trial, draws: dict[Any, tuple[int, ...]], inner: Any = None) -> Iterator[None]:
    """The modes, the scope and the state of random numbers of a pass."""
    wide = next(trial.model.parameters()).dtype == torch.float64
    modes: list[Any] = [Float64()] if wide else []
    modes += [_Noting(draws, inner)] if trial.random else []
    rows = tuple(range(rows_of(trial.batch)))
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(ambient(*modes))
        stack.enter_context(entered(Scope(0, 0, rows)))
        yield


def forward(trial: Trial, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, Tensor]:
    """The whole model on a batch: output and loss."""
    with running(trial, {}):
        output = model(**batch)
        value = loss_of(output, batch, trial.loss)
    assert value is not None, "the model gives no loss"
    return output, value


def watched(trial: Trial) -> Seen:
    """A pass over the whole sequence, in training."""
    model = trial.model
    draws: dict[Any, tuple[int, ...]] = {}
    model.zero_grad(set_to_none=True)
    Training(model).on()
    named_sites(model)
    with running(trial, draws):
        value = loss_of(model(**trial.batch), trial.batch, trial.loss)
        assert value is not None, "the model gives no loss"
        torch.autograd.backward(value)
    return Seen(value.detach(), _gradients(model), draws)


def sliced(trial: Trial, slicing: Slicing) -> Seen:
    """A pass by slices."""
    model = trial.model
    draws: dict[Any, tuple[int, ...]] = {}
    model.zero_grad(set_to_none=True)
    fill = trial.rule.filled if trial.rule else None
    slices = Slices(
        model, slicing, trial.weight, fill=fill, lengths=lambda total, count: trial.lengths
    )
    try:
        with running(trial, draws, windows(slicing, None) if slicing.draws else None):
            value, _ = run(slices, model, trial.batch, trial.loss)
    finally:
        slices.close()
    return Seen(value, _gradients(model), draws)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _compare(whole: Seen, parts: Seen) -> None:
    wide = whole.loss.dtype == torch.float64
    gate = 1e-9 if wide else 1e-3
    if not torch.allclose(parts.loss, whole.loss, rtol=gate, atol=0.0):
        raise Differs(f"the loss of the slices is {parts.loss:.6g}, of the whole {whole.loss:.6g}")
    if parts.gradients.keys() != whole.gradients.keys():
        name = min(parts.gradients.keys() ^ whole.gradients.keys())
        raise Differs(f"only one of both gives `{name}` a gradient")
    largest = max((float(g.norm()) for g in whole.gradients.values()), default=0.0)
    for name, wanted in whole.gradients.items():
        gap = float((parts.gradients[name] - wanted).norm())
        if not gap <= gate * float(wanted.norm()) + 1e-3 * gate * largest:
            raise Differs(f"the gradient of `{name}` differs by {gap / float(wanted.norm()):.1g}")


def _tagged(trial: Trial, slicing: Slicing, whole: Seen) -> Slicing:
    """With the dims of random draws along the sequence, from the shapes of a first pass."""
    if not trial.random or not whole.draws:
        return slicing
    parts = sliced(trial, slicing).draws
    stops = [sum(trial.lengths[: k + 1]) for k in range(len(trial.lengths))]
    tags = {}
    for (_, site, call), shape in whole.draws.items():
        drawn = [parts.get((k, site, call)) for k in range(len(trial.lengths))]
        tags[(site, call)] = _dims(site, shape, drawn, trial.lengths, stops)
    return replace(slicing, draws=_spread(tags, trial.alike))


def _spread(tags: Tags, alike: Mapping[str, str]) -> dict[tuple[str, int], tuple[str, ...]]:
    """The same for the blocks that were left out."""
    found = dict(tags)
    for block, stands in alike.items():
        for (site, call), dims in tags.items():
            if site == stands or site.startswith(f"{stands}."):
                found[(block + site[len(stands) :], call)] = dims
    return found


def _dims(
    site: str,
    shape: tuple[int, ...],
    drawn: Sequence[tuple[int, ...] | None],
    lengths: Sequence[int],
    stops: Sequence[int],
) -> tuple[str, ...]:
    """Per dim whether it is that of the slice, of all keys so far, or another."""
    known = [s for s in drawn if s is not None]
    if len(known) < len(drawn) or any(len(s) != len(shape) for s in known):
        raise Differs(f"`{site}` does not draw its random numbers in every slice alike")
    found = []
    for dim, size in enumerate(shape):
        sizes = [s[dim] for s in known]
        kinds = {"": [size] * len(sizes), "rows": list(lengths), "keys": list(stops)}
        fits = [kind for kind, wanted in kinds.items() if sizes == wanted]
        if not fits:
            raise Differs(f"`{site}` draws random numbers that no slice can find again")
        found.append(fits[0])
    return tuple(found)


def _left(trial: Trial, slicing: Slicing) -> bool:
    """Whether rows that begin with padding, a whole slice of it and more, come out right, too."""
    masks = [n for n, v in trial.batch.items() if "mask" in n and v.dim() == 2]
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
        _compare(watched(other), sliced(other, slicing))
    except (Differs, LookupError, RuntimeError, ValueError, Refusal):
        return False
    return True


def refusal(title: str, *notes: str) -> Refusal:
    """The model cannot be cut along its sequences."""
    return Refusal(
        Diagnostic(
            "S655", title, notes=notes,
            helps=("leave `slices` out: `slices=1`",
                   'other orders cut nothing but the batch: `pipeline(order="1F1B", micro=..)`'),
        )
    )  # fmt: skip
