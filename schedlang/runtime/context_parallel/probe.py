"""Probe of context parallelism: run a small copy of a model by shards of its tokens on one process.

The loss and every gradient must equal those of the full sequences.  `probe` tries candidates of
`TokenSplit` and returns the first that passes; if none passes, the model is refused with the first
module that computes some tokens differently.  The shards run in threads, one awake at a time.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import OwnError, Refusal
from schedlang.ir import pytree
from schedlang.runtime.adapters.torch_checkpoint import without_checkpoints
from schedlang.runtime.batch import BatchPart, dotted_path, loss_of, row_count, run_model
from schedlang.runtime.context_parallel.attention_products import ProductLines
from schedlang.runtime.context_parallel.installation import ShardContext, install_context
from schedlang.runtime.context_parallel.local_tokens import (
    AttentionCall,
    AttentionMethod,
    SequenceShard,
    TokenSplit,
)
from schedlang.runtime.context_parallel.plain_run import is_model_fault
from schedlang.runtime.context_parallel.token_layout import SequenceLayout, TokenTags, visible_keys
from schedlang.runtime.grad_reduction.batch_statistics import gather_statistics
from schedlang.runtime.propagation.batch_sums import BatchSum
from schedlang.runtime.sequence_pipelining.probe import (
    LossesDiffer,
    check_ignored_labels,
    compare_runs,
    draws_along,
    find_head,
    find_lines,
    find_position_lines,
    is_close,
    label_fields,
    label_shift,
)
from schedlang.runtime.sequence_pipelining.trial import (
    Outputs,
    RunResult,
    Trial,
    gradients_of,
    labels_are_input,
    record_outputs,
    run_context,
    run_forward,
    run_full,
)
from schedlang.runtime.submodules import remove_hooks_after
from schedlang.runtime.training_mode import TrainingMode
from schedlang.runtime.zero_weight_loss import zero_unlabelled_loss


class RendezvousError(Exception):
    """Raised if some functions reach a rendezvous that others do not reach."""


class Lockstep:
    """Runs functions in threads, of which one at a time is awake, with rendezvous between them.

    So several forwards of the model can build one autograd graph together, in a fixed order.
    """

    def __init__(self, count: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._back = threading.Semaphore(0)
        self._waiting: dict[int, Any] = {}
        self._values: list[Any] = []
        self._failed = False

    def rendezvous(self, index: int, value: Any) -> list[Any]:
        """Wait for all places at a rendezvous; return their values, by place."""
        self._waiting[index] = value
        self._sleep(index)
        return self._values

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the functions in turn, and return their results.

        Raises the first exception of a function, which ends all functions.
        """
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        default = torch.get_default_dtype()  # global to all threads: saved and restored for each

        def body(index: int) -> None:
            self._turns[index].acquire()
            torch.set_default_dtype(default)
            try:
                if not self._failed:
                    results[index] = functions[index]()
            except BaseException as error:  # noqa: BLE001  (raised again below)
                errors.append(error)
                self._failed = True
            self._back.release()

        threads = [threading.Thread(target=body, args=(k,)) for k in range(len(functions))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self._round(threads, results)
        torch.set_default_dtype(default)
        if errors:
            raise errors[0]
        return [results[index] for index in range(len(functions))]

    def _round(self, threads: Sequence[threading.Thread], results: dict[int, Any]) -> None:
        """Wake each unfinished thread in turn, until it waits at a rendezvous or ends."""
        alive = [
            index
            for index, thread in enumerate(threads)
            if index not in results and thread.is_alive()
        ]
        for index in alive:
            self._turns[index].release()
            self._back.acquire()
            if index in results or index not in self._waiting:
                threads[index].join()
        if len(self._waiting) not in (0, len(threads)):
            self._failed = True
        self._values = [self._waiting[index] for index in sorted(self._waiting)]
        self._waiting = {}

    def _sleep(self, index: int) -> None:
        default_dtype = torch.get_default_dtype()
        self._back.release()
        self._turns[index].acquire()
        torch.set_default_dtype(default_dtype)
        if self._failed:
            raise RendezvousError("the parts do not call attention equally often")


@dataclass
class ShardedRun(RunResult):
    """The result of a run by shards: outputs by place, and the common loss and gradients."""

    outputs: Sequence[Any] = ()


def layout_of(kind: str, lengths: Sequence[int]) -> SequenceLayout:
    """Return a layout with these numbers of tokens; not contiguous: tokens of both ends each."""
    if kind == "contiguous":
        starts = [sum(lengths[:k]) for k in range(len(lengths))]
        return SequenceLayout(tuple((range(a, a + n),) for a, n in zip(starts, lengths)))
    low, runs, high = 0, [], sum(lengths)
    for n in lengths:
        front_length, back_length = n - n // 2, n // 2
        pair = (range(low, low + front_length), range(high - back_length, high))
        runs.append(tuple(run for run in pair if run))
        low, high = low + front_length, high - back_length
    return SequenceLayout(tuple(runs))


@dataclass(frozen=True)
class SplitModules:
    """The attentions of a trial, by name, and the sums over all tokens that its shards share."""

    attentions: Sequence[str]
    sums: Sequence[BatchSum] = ()


def run_shards(trial: Trial, tokens: TokenSplit, shared: SplitModules) -> ShardedRun:
    """Run the forward of every shard, in turns up to the next exchange, and one backward."""
    model, count = trial.model, len(trial.lengths)
    layout = layout_of(tokens.kind, trial.lengths)
    lockstep = Lockstep(count)
    draws: dict[Any, tuple[int, ...]] = {}
    full_part = BatchPart(dict(trial.batch), tuple(range(row_count(trial.batch))))
    exchange = _TrialExchange(lockstep)
    parts = [tokens.take_part(full_part, rank, exchange, layout) for rank in range(count)]
    weights = [trial.weight(part.weight_inputs or part.inputs) for part in parts]
    context, inner = ShardContext(tokens), tokens.windows(None) if tokens.draws else None
    total_sum = _TrialSum(lockstep)

    def one(part: BatchPart, weight: float) -> tuple[Any, Tensor]:
        assert part.token_shard is not None
        total_sum.places[threading.get_ident()] = part.token_shard.place
        within_shard = context.enter_shard(part.token_shard, nullcontext())
        counted, saving = zero_unlabelled_loss(weight), without_checkpoints(_reentrant_refusal())
        with run_context(trial, draws, inner), within_shard, counted, saving:
            output = run_model(model, part.inputs)
            value = loss_of(output, part.inputs, trial.loss)
        assert value is not None, "the model returns no loss"
        return output, value

    # what `_ready` installs stays in the model's forward: the sums come last, and go first
    with _ready(trial, tokens, shared.attentions), _shared_sums(model, shared.sums, total_sum):
        results = lockstep.run([partial(one, *shard_args) for shard_args in zip(parts, weights)])
        total = sum(weights) or 1.0
        shares = [v * (w / total) for (_, v), w in zip(results, weights) if w]
        value = torch.stack(shares).sum()
        with run_context(trial, {}):
            torch.autograd.backward(value)
    return ShardedRun(value.detach(), gradients_of(model), draws, [output for output, _ in results])


class ReentrantCheckpoint(Refusal):
    """The refusal of a model with a reentrant checkpoint, however its sequences are split."""


def _reentrant_refusal() -> Refusal:
    """Return the refusal S659 of a reentrant checkpoint: its forward has no graph."""
    return ReentrantCheckpoint.of(
        "S659",
        "the model has reentrant checkpoints",
        notes=("they cannot be tried by shards of tokens: their forward makes no graph",),
        helps=("let the model say `torch.utils.checkpoint.checkpoint(.., use_reentrant=False)`",),
    )


def _ready(trial: Trial, tokens: TokenSplit, sites: Sequence[str]) -> AbstractContextManager[None]:
    """Context in which the trial's model runs by shards."""
    model = trial.model
    model.zero_grad(set_to_none=True)
    TrainingMode(model).train()
    hows: Mapping[str, AttentionMethod] = {site: AttentionMethod("trial") for site in sites}
    # since the run of full sequences the modules report their names
    return remove_hooks_after(install_context(model, tokens, hows))


class _TrialSum:
    """The sum over the shards of a trial, of which each runs in a thread; `places`: thread ->
    place."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.together, self.places = lockstep, dict[int, int]()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack(self.together.rendezvous(self.places[threading.get_ident()], x)).sum(0)


@contextmanager
def _shared_sums(model: nn.Module, sums: Sequence[BatchSum], total: _TrialSum) -> Iterator[None]:
    """Context in which a trial's model takes these sums over all shards."""
    own_forward = vars(model).get("forward")
    if sums:
        gather_statistics(model, sums, total)
    try:
        yield
    finally:
        if own_forward is not None:
            model.forward = own_forward
        elif sums:
            del model.forward


class _TrialExchange:
    """The exchange of a trial: attention by plain products to the keys of all shards."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.together = lockstep

    def __call__(
        self, shard: SequenceShard, method: AttentionMethod, call: AttentionCall
    ) -> Tensor:
        shards = self.together.rendezvous(shard.place, (call.key, call.value, call.mask.tags))
        keys, values = (shard.layout.concatenate([s[k] for s in shards], 2) for k in (0, 1))
        tags = TokenTags(*(_full_tag(shard.layout, tag) for tag in zip(*(s[2] for s in shards))))
        groups = call.query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = call.query @ keys.mT
        scores = scores * (call.query.shape[-1] ** -0.5 if call.scale is None else call.scale)
        if call.mask.cap is not None:
            scores = call.mask.cap * torch.tanh(scores / call.mask.cap)
        equal = (
            scores - scores.detach() if call.unseen_result == "scores" else torch.zeros_like(scores)
        )
        scores = _apply_mask(scores, shard, call, tags)
        if call.unseen_result != "zero" and call.mask.sinks is None:
            scores = torch.where(scores.isneginf().all(-1, keepdim=True), equal, scores)
        if call.mask.sinks is not None:
            sinks = call.mask.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1).nan_to_num()[..., : keys.shape[2]]
        if call.dropout_mask is not None:
            weights = weights * call.dropout_mask
        return F.dropout(weights, call.dropout) @ values

    def draw_dropout(self, shard: SequenceShard, p: float, rows: int, heads: int) -> Tensor:
        """Draw the factors of attention weights, as `Exchange` does."""
        return F.dropout(torch.ones(rows, heads, shard.length, shard.layout.total), p)


def _full_tag(layout: SequenceLayout, parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return layout.concatenate(present, 1) if present else None


def _apply_mask(
    scores: Tensor, shard: SequenceShard, call: AttentionCall, tags: TokenTags
) -> Tensor:
    rows, start, keys = [], 0, range(shard.layout.total)
    for run in shard.layout.runs[shard.place]:
        query_tags = call.mask.tags.narrow(start, start + len(run))
        row_scores = scores[:, :, start : start + len(run)]
        visible = visible_keys(call.mask.reach, run, keys, query_tags, tags, scores.device)
        rows.append(row_scores if visible is None else row_scores.masked_fill(~visible, -torch.inf))
        start += len(run)
    masked, added = torch.cat(rows, 2), call.mask.rows
    if added is None:
        return masked
    return masked.masked_fill(~added, -torch.inf) if added.dtype == torch.bool else masked + added


MIXED_TOKENS = (
    "code that counts positions from shapes, or mixes tokens outside of the selected attentions,"
    " would see the tokens of one rank only"
)


def find_fault(trial: Trial, tokens: TokenSplit, error: Exception, shared: SplitModules) -> Refusal:
    """Return the refusal of a model whose run by shards, as `tokens` describes, gave `error`.

    Raises the refusal of a loss: the model itself computes each token as in the full sequence.
    """
    kind = type(trial.model).__name__
    if isinstance(error, Refusal):
        if error.diagnostic.code == "S669":
            raise _statistics_refusal(kind, error.diagnostic.title)
        return error
    with record_outputs(trial.model) as full_outputs:
        run_forward(trial, trial.model, trial.batch)
    sharded_outputs: Outputs = {}
    try:
        with record_outputs(trial.model) as sharded_outputs:
            run_shards(trial, tokens, shared)
    except Refusal as refused:
        return refused
    except Exception as raised:  # the model's own code may raise anything
        message = f"{type(raised).__name__}: {raised}".splitlines()[0]
        window = _describe_window(trial.model, list(full_outputs))
        notes = (message, window) if window else (message,)
        return split_refusal(f"`{kind}` does not run on some tokens of a sequence", *notes)
    layout = layout_of(tokens.kind, trial.lengths)
    for name, outputs in full_outputs.items():
        full, parts = outputs[None], sharded_outputs.get(name, {})
        if full.dim() < 2 or full.shape[1] != layout.total or len(parts) != len(layout.runs):
            continue
        local_parts = [parts[k][:, : layout.counts[k]] for k in range(len(layout.runs))]
        same_lengths = all(m.shape[1] == n for m, n in zip(local_parts, layout.counts))
        if not same_lengths or not is_close(layout.concatenate(local_parts, 1), full):
            return split_refusal(
                f"`{kind}` cannot be split by tokens",
                f"`{name}` computes a token differently than in the full sequence",
                _describe_window(trial.model, names_up_to(full_outputs, name)) or MIXED_TOKENS,
            )
    if isinstance(error, LossesDiffer) and shared.sums:
        raise _statistics_refusal(kind, str(error))
    if isinstance(error, LossesDiffer) and trial.rule is None:
        raise _loss_refusal(kind, error)
    return split_refusal(f"`{kind}` cannot be split by tokens", str(error))


def _loss_refusal(kind: str, error: LossesDiffer) -> Refusal:
    """Return the refusal S659 of a model whose outputs are right in shards, but not its loss."""
    return Refusal.of(
        "S659",
        f"the loss of `{kind}` is not a mean over its tokens",
        notes=(f"{error}: a rank has some tokens of each row",),
        helps=(
            "give counted tokens equal weights:"
            " `F.cross_entropy(scores.flatten(0, 1), labels.flatten())`",
            "or split its rows: `zero(stage=0, over=cp)`",
        ),
    )


def _statistics_refusal(kind: str, difference: str) -> Refusal:
    """Return the refusal S659 of a loss with statistics that sums over all tokens do not give."""
    return Refusal.of(
        "S659",
        f"the loss of `{kind}` has statistics that are not means over all tokens of the batch",
        notes=(difference, "ranks have some tokens of each row, and share sums over all tokens"),
        helps=(
            "take statistics of routers over all tokens: `probabilities.flatten(0, 1).mean(0)`",
            "or split rows: `zero(stage=0, over=cp)`",
        ),
    )


def unrunnable_refusal(model: nn.Module, message: str, attempt: str) -> Refusal:
    """Return the refusal of a model that no trial can run; `attempt` is the error's message."""
    window = _describe_window(model, [name for name, _ in model.named_modules() if name])
    if not window:
        return split_refusal(message, attempt)
    return split_refusal(
        f"`{type(model).__name__}` cannot be split by tokens", window, f"tried: {attempt}"
    )


def names_up_to(names: Iterable[str], last: str) -> list[str]:
    """Return the names up to `last`, `last` included."""
    return list(itertools.takewhile(lambda name: name != last, names)) + [last]


def _describe_window(model: nn.Module, names: Sequence[str]) -> str:
    """Describe the first of some modules that mixes neighbouring tokens; "" if none does."""
    for name in names:
        module = model.get_submodule(name)
        size = getattr(module, "kernel_size", 1)
        if any(n != 1 for n in (size if isinstance(size, tuple) else (size,))):
            kind = type(module).__name__
            return (
                f"`{name}` is a `{kind}`: it mixes neighbouring tokens, and later modules"
                " get no single token of the batch"
            )
    return ""


def image_refusal(batch: Mapping[str, Any]) -> Refusal | None:
    """Return the refusal of a batch of images, whose tokens the model makes; None for others."""
    leaves, _ = pytree.tree_flatten_with_path(dict(batch))
    tensors = [
        (dotted_path(path), x) for path, x in leaves if isinstance(x, Tensor) and x.dim() > 1
    ]
    if not tensors or any(x.dim() < 4 for _, x in tensors):
        return None
    name, value = tensors[0]
    return Refusal.of(
        "S674",
        f"`context_parallel` finds no tokens in the batch: `{name}` is {list(value.shape)}",
        notes=("the model itself makes tokens from patches of images, and may add a class token",),
        helps=(
            "split its rows: `zero(stage=0, over=cp)`",
            "or its heads: `layers.*.{q,k,v}_proj  shard(col, over=cp)`, and `row` after",
            "or a dim between modules: `shard(input=S(1), output=S(1), over=cp)`",
        ),
    )


def split_refusal(message: str, *notes: str) -> Refusal:
    """Return the refusal S659 of a model that cannot be split by tokens."""
    return Refusal.of(
        "S659",
        message,
        notes=notes,
        helps=(
            "leave `context_parallel` out for this model",
            "or select all its attentions: `layers.*.self_attn  context_parallel(...)`",
        ),
    )


def probe(trial: Trial, kind: str, ranks: int, shared: SplitModules) -> TokenSplit:
    """Find how a trial's model runs on shards of tokens; raise Refusal S659 if it cannot."""
    full = run_full(trial)
    output, _ = run_forward(trial, trial.model, trial.batch)
    first_error: tuple[TokenSplit, Exception] | None = None
    for tokens in list_candidates(trial, kind, ranks):
        try:
            tokens = _with_draws(trial, tokens, full, shared)
            parts = run_shards(trial, tokens, shared)
            compare_runs(full, parts)
            check_ignored_labels(trial, partial(run_shards, tokens=tokens, shared=shared))
        except ReentrantCheckpoint:
            raise
        except Exception as error:  # the model's own code may raise anything
            first_error = first_error or (tokens, error)
            continue
        return replace(tokens, outputs=_outputs(output, parts.outputs, trial))
    assert first_error is not None, "there is always a candidate"
    _check_labels(trial, first_error[0])
    refusal = find_fault(trial, *first_error, shared)
    if refusal.diagnostic.code == "S659":
        _check_own_error(trial, refusal, first_error[1], shared.attentions)
    raise refusal


def _check_labels(trial: Trial, tokens: TokenSplit) -> None:
    """Refuse (S659) a loss whose shifted labels are an input of the model.

    A shard has either the input or the shifted labels.
    """
    rule = trial.rule
    if rule and tokens.shift != "none" and labels_are_input(trial.model, rule, trial.loss):
        name = rule.source
        raise Refusal.of(
            "S659",
            f"`{name}` is what the model takes, and one token later its labels",
            notes=("a rank's tokens and their labels are not the same part of it",),
            helps=(f'let the batch have both: `{{"{name}": ids, "labels": ids}}`',),
        )


def _check_own_error(trial: Trial, fault: Refusal, error: Exception, sites: Sequence[str]) -> None:
    """Raise OwnError if the model alone computes all tokens as in the full sequence."""
    if not is_model_fault(trial, sites):
        raise OwnError(
            "the module alone computes some tokens as in the full sequence, but not in the program",
            *fault.diagnostic.notes,
            f"{type(error).__name__}: {error}".splitlines()[0],
            f"`{type(trial.model).__name__}` on {list(trial.lengths)} tokens",
        ) from error


def guess_tokens(trial: Trial, kind: str, ranks: int) -> TokenSplit:
    """Return how a model without values would probably run: for plans, not for training."""
    style = label_shift(trial)
    passes_labels = style == "padded" and _takes_shifted_labels(trial)
    shift = "given" if passes_labels else "none" if style == "none" else "head"
    return TokenSplit(
        kind,
        ranks,
        _accepts(trial, "position_ids"),
        products=find_lines(trial, ProductLines),
        shift=shift,
        head=find_head(trial) if shift == "head" else "",
        **label_fields(trial),
    )


def list_candidates(trial: Trial, kind: str, ranks: int) -> Iterator[TokenSplit]:
    """Yield the candidates of how a model may run, the likeliest first."""
    style = label_shift(trial)
    base = TokenSplit(kind, ranks, products=find_lines(trial, ProductLines), **label_fields(trial))
    head = replace(base, shift="head", head=find_head(trial)) if style != "none" else base
    candidates = (
        [replace(base, shift="given")] if style == "padded" and _takes_shifted_labels(trial) else []
    )
    takes_positions = _accepts(trial, "position_ids")
    position_lines = find_position_lines(trial)
    for candidate in (*candidates, head):
        if takes_positions:
            if "position_ids" in trial.batch and "attention_mask" not in trial.batch:
                yield replace(candidate, positions=True, documents=True)
            yield replace(candidate, positions=True)
        yield replace(candidate, places=position_lines)
        if takes_positions:
            yield replace(candidate, positions=True, places=position_lines, follows_full=True)
        yield replace(candidate, places=position_lines, follows_full=True)


def _takes_shifted_labels(trial: Trial) -> bool:
    """Return whether the model accepts labels that are shifted already."""
    return trial.loss is None and (_accepts(trial, "shift_labels") or _accepts(trial, "**"))


def _accepts(trial: Trial, name: str) -> bool:
    parameters = inspect.signature(trial.model.forward).parameters
    if name == "**":
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return name in parameters


def _with_draws(
    trial: Trial, tokens: TokenSplit, full: RunResult, shared: SplitModules
) -> TokenSplit:
    if not trial.random or not full.draws:
        return tokens
    stops = [sum(trial.lengths)] * len(trial.lengths)
    return replace(tokens, draws=draws_along(trial, full, run_shards(trial, tokens, shared), stops))


def _outputs(full_output: Any, parts: Sequence[Any], trial: Trial) -> dict[str, int]:
    """Return the leaves of the output that are split by tokens: path -> dim of tokens."""
    total, dims = sum(trial.lengths), {}
    leaves = [dict(_leaves(output)) for output in parts]
    for name, value in _leaves(full_output):
        parts_of = [part[name] for part in leaves if name in part]
        if len(parts_of) < len(parts) or any(t.dim() != value.dim() for t in parts_of):
            continue
        for dim, size in enumerate(value.shape):
            sizes = [int(t.shape[dim]) for t in parts_of]
            fits = all(n <= length <= n + 1 for n, length in zip(trial.lengths, sizes))
            if size == total and fits:
                dims[name] = dim
                break
    return dims


def _leaves(output: Any) -> list[tuple[str, Tensor]]:
    leaves, _ = pytree.tree_flatten_with_path(output)
    return [(dotted_path(path), value) for path, value in leaves if isinstance(value, Tensor)]
