"""Choose the conditions and batches of a proof, and list what they leave unexercised.

Batches are varied if the given ones all hide the same mistakes; what stays hidden is reported.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, equal
from torch.nn.utils import get_total_norm

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.features import Tried
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.expert_capacity import find_capacities, without_capacity
from schedlang.passes.verify.observe import Batch, Condition, Observation, standard_conditions
from schedlang.passes.verify.original import count_rows
from schedlang.passes.verify.probe import Probe, loss_and_gradients
from schedlang.passes.verify.proof_case import Case, original_subject, prepare_case
from schedlang.report import Gap
from schedlang.runtime.batch import named_tensors, select_rows, split_rows
from schedlang.runtime.parameter_changes import Freeze

# ---- Variants of the user's batches: padding, empty rows, odd counts.


TOKENS = "input_ids"  # the usual names in batches of text
MASK = "attention_mask"
POSITIONS = "position_ids"
PADDING, HALF_VOCABULARY = "ignored labels and padding", "rows of half the vocabulary"
TEXT = frozenset({TOKENS, MASK, "labels", "token_type_ids", POSITIONS})


Change = Callable[["BatchSet", Batch], "Batch | None"]


@dataclass(frozen=True)
class LabelInput:
    """An input that holds labels, as the model's own loss was seen to read it."""

    input_name: str
    ignore_index: int  # the label that does not count


@dataclass(frozen=True)
class BatchSet:
    """All batches of a proof, and what they exercise; `split` returns row numbers by part."""

    all: Sequence[Batch]
    split: Callable[[int], Sequence[range]]
    labels: Sequence[LabelInput] = ()

    @property
    def parts(self) -> int:
        """The number of parts that a batch is split into."""
        return len(self.split(max(count_rows(batch) for batch in self.all)))

    @property
    def has_unequal_parts(self) -> bool:
        """Whether some batch has parts of different sizes."""
        return any(count_rows(batch) % self.parts for batch in self.all)

    @property
    def has_equal_parts(self) -> bool:
        """Whether some batch has parts of one size."""
        return any(count_rows(batch) % self.parts == 0 for batch in self.all)

    @property
    def shapes(self) -> int:
        """The number of different sets of shapes."""
        return len({tuple(sorted(tensor_shapes(batch).items())) for batch in self.all})

    @property
    def has_uneven_labels(self) -> bool:
        """Whether some rows have fewer labels that count than others."""
        return any(
            bool((counts != counts[0]).any())
            for batch in self.all
            for _, counts in self._counts(batch)
        )

    @property
    def has_empty_parts(self) -> bool:
        """Whether in some batch each part has a row without labels, and one part has no labels."""
        for batch in self.all:
            for label, counts in self._counts(batch):
                parts = [counts[list(rows)] for rows in self.split(len(batch[label.input_name]))]
                has_empty = len(parts) == 1 or any(not bool(p.any()) for p in parts)
                if has_empty and all(bool((p == 0).any()) for p in parts if len(p) > 1):
                    return True
        return False

    @property
    def has_padding(self) -> bool:
        """Whether some mask hides something."""
        masks = [v for b in self.all for k, v in non_float_tensors(b).items() if "mask" in k]
        return any(bool((mask == 0).any()) for mask in masks)

    @property
    def has_half_vocabulary(self) -> bool:
        """Whether some row has only tokens of the lower half of the vocabulary."""
        tokens = [
            b[TOKENS] for b in self.all if TOKENS in non_float_tensors(b) and b[TOKENS].dim() > 1
        ]
        if not tokens:
            return True
        half = (int(max(t.max() for t in tokens)) + 1) / 2
        in_lower_half = [bool((t < half).all(1).any()) for t in tokens]
        return any(in_lower_half)

    def _counts(self, batch: Batch) -> list[tuple[LabelInput, Tensor]]:
        """Return labels that count by row; if no labels are known, of all integer inputs."""
        labels = list(self.labels) or [LabelInput(name, -100) for name in non_float_tensors(batch)]
        present = [
            (label, batch[label.input_name])
            for label in labels
            if label.input_name in non_float_tensors(batch)
        ]
        return [
            (label, (value != label.ignore_index).reshape(len(value), -1).sum(1))
            for label, value in present
            if value.dim()
        ]


def tensor_shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a batch's tensors."""
    return {k: tuple(v.shape) for k, v in batch.items() if isinstance(v, Tensor)}


def non_float_tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a batch that are not floats."""
    return {k: v for k, v in batch.items() if isinstance(v, Tensor) and not v.is_floating_point()}


def vary_batches(
    data: BatchSet, labels_wanted: Sequence[str] | None = None
) -> tuple[list[Batch], dict[int, list[str]]]:
    """Change as many batches as needed to exercise everything; return them, and changes by index.

    `labels_wanted` names the allowed changes; None allows all. Only changes with the same meaning
    for every model are made: labels that do not count, masked positions, fewer rows, other tokens
    of a text.
    """
    varied = list(data.all)
    changes_by_index: dict[int, list[str]] = {}
    for index, label, is_present, change in _CHANGES:
        index %= len(varied)
        if (
            labels_wanted is not None
            and label not in labels_wanted
            or is_present(replace(data, all=[*data.all, *varied]))
        ):
            continue
        changed = change(data, varied[index])
        if changed is not None:
            varied[index] = changed
            changes_by_index.setdefault(index, []).append(label)
    return varied, changes_by_index


def _pad_ends(data: BatchSet, batch: Batch) -> Batch | None:
    """Ignore the ends of rows, more of them in later rows; a mask hides the same positions."""
    padded = dict(batch)
    for label in data.labels:
        value = batch.get(label.input_name)
        if value is not None and value.dim() == 2 and value.shape[1] > 2:
            padded[label.input_name] = value.masked_fill(_mark_ends(value), label.ignore_index)
    mask = batch.get(MASK)
    if mask is not None and mask.dim() == 2 and bool((mask != 0).all()) and mask.shape[1] > 2:
        padded[MASK] = mask.masked_fill(_mark_ends(mask), 0)
    return padded if any(padded[k] is not batch[k] for k in padded) else None


def _mark_ends(value: Tensor) -> Tensor:
    """Mark the last k % 3 positions of row k; of a single row the last."""
    rows, length = value.shape
    drop = torch.arange(rows) % 3 if rows > 1 else torch.ones(1, dtype=torch.long)
    return (torch.arange(length) >= length - drop.clamp(max=length - 2)[:, None]).to(value.device)


def _ignore_rows(data: BatchSet, batch: Batch) -> Batch | None:
    """Ignore all labels in the first row of each part, and in the full last part."""
    changed = dict(batch)
    for label in data.labels:
        value = batch.get(label.input_name)
        if value is None or not value.dim() or value.is_floating_point():
            continue
        parts = data.split(len(value))
        empty = [rows[0] for rows in parts if len(rows) > 1]
        empty += list(parts[-1]) if len(parts) > 1 else []
        kept_rows = [row for row in range(len(value)) if row not in empty]
        if empty and kept_rows and bool((value[kept_rows] != label.ignore_index).any()):
            value = value.clone()
            value[empty] = label.ignore_index
            changed[label.input_name] = value
    return changed if any(changed[k] is not batch[k] for k in changed) else None


def _halve_vocabulary(data: BatchSet, batch: Batch) -> Batch | None:
    """Give one row in every part tokens of the lower half of the vocabulary only."""
    tokens = batch.get(TOKENS)
    if tokens is None or not TEXT.issuperset(batch) or tokens.dim() != 2:
        return None
    last = [rows[-1] for rows in data.split(len(tokens))]
    tokens = tokens.clone()
    tokens[last] = tokens[last] // 2
    return {**batch, TOKENS: tokens}


def _drop_row(data: BatchSet, batch: Batch) -> Batch | None:
    """Remove one row."""
    return _first_rows(data, batch, count_rows(batch) - 1)


def _drop_to_equal_parts(data: BatchSet, batch: Batch) -> Batch | None:
    """Remove rows, so that all parts are equal."""
    return _first_rows(data, batch, count_rows(batch) // data.parts * data.parts)


def _first_rows(data: BatchSet, batch: Batch, row_count: int) -> Batch | None:
    if row_count < data.parts or row_count == count_rows(batch):
        return None
    return select_rows(batch, range(row_count), count_rows(batch))


# batch index, name, whether some batch has it already, change
_CHANGES: tuple[tuple[int, str, Callable[[BatchSet], bool], Change], ...] = (
    (0, PADDING, lambda seen: seen.has_uneven_labels and seen.has_padding, _pad_ends),
    (1, "rows and a part without labels", lambda seen: seen.has_empty_parts, _ignore_rows),
    (1, HALF_VOCABULARY, lambda seen: seen.has_half_vocabulary, _halve_vocabulary),
    (2, "a smaller last part", lambda seen: seen.has_unequal_parts or seen.parts == 1, _drop_row),
    (2, "equal parts", lambda seen: seen.has_equal_parts, _drop_to_equal_parts),
    (2, "another number of rows", lambda seen: seen.shapes > 1, _drop_row),
)


# ---- The runs.


EVALUATED = "SGD, eval mode"
LOSS_SCALE = 3.0  # of the loss, to find a backward that assumes an output gradient of 1


@dataclass(frozen=True)
class TrainingRuns:
    """The training runs, the changes made to the user's batches, and gaps."""

    conditions: tuple[Condition, ...]
    batches: BatchSet
    derived: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()


def plan_runs(case: Case, evaluate: bool = False) -> TrainingRuns:
    """Choose the training runs: SGD on the given batches; AdamW, clipped, on variants.

    AdamW's run freezes some weights and scales the loss, because AdamW does not depend on the
    scale. With `evaluate` another run trains in eval mode. The case must be prepared and in
    float64. The original's gradient norm determines the clip norm.
    """
    with original_subject(case) as subject:
        norm = subject.gradient_norm(case.batches[0])
    data = batches_of(case)
    varied, changes_by_index = vary_batches(data)
    derived = []
    for index, labels in changes_by_index.items():
        if _is_usable(case, varied[index]):
            derived += labels
        else:
            varied[index] = data.all[index]
    sgd_run, clipped_run = standard_conditions(case.batches, norm, varied)
    frozen_case, gaps = _freeze_some(case)
    all_runs = [sgd_run, replace(clipped_run, case=frozen_case, scale=LOSS_SCALE)]
    eval_runs, eval_gaps = _eval_mode_run(case, sgd_run)
    all_runs += [
        *eval_runs,
        *_single_update_run(case, sgd_run),
        *_unlimited_capacity_run(case, sgd_run),
    ]
    if evaluate:
        all_runs.append(replace(sgd_run, name=EVALUATED, batches=case.batches[:2], evaluate=True))
    if case.table is not None:  # stages update separately, before the norm is known
        unclipped_names = [c.name.removesuffix(", clipped") for c in all_runs]
        all_runs = [replace(c, clip=None, name=name) for c, name in zip(all_runs, unclipped_names)]
    all_batches = replace(data, all=(*case.batches, *varied))
    return TrainingRuns(tuple(all_runs), all_batches, tuple(derived), (*gaps, *eval_gaps))


def _eval_mode_run(case: Case, sgd_run: Condition) -> tuple[list[Condition], tuple[Gap, ...]]:
    """Add a run in eval mode if batch statistics are relaxed.

    In eval mode statistics are fixed, and the program must equal the original itself.
    """
    if not case.by_parts:
        return [], ()
    if Probe(case, case.batches[0]).first_difference(evaluate=True) is not None:
        condition = "no limit of `batch_stats`: parts differ in eval mode too"
        return [], (Gap(condition, "what is not due to the statistics of parts"),)
    full = replace(case, by_parts=False)
    name = "eval mode, where `batch_stats` vanishes"
    return [replace(sgd_run, name=name, batches=case.batches[:2], evaluate=True, case=full)], ()


def _single_update_run(case: Case, sgd_run: Condition) -> list[Condition]:
    """Add a run with one update a step if weights are stale: in that run none is."""
    if case.table is None or case.by_parts:
        return []
    assert case.plan.order is not None
    order = replace(case.plan.order, every=case.plan.micro)
    full = prepare_case(replace(case, plan=replace(case.plan, order=order)))
    name = "one update a step, where `staleness` vanishes"
    return [replace(sgd_run, name=name, batches=case.batches[:2], case=full)]


def _unlimited_capacity_run(case: Case, sgd_run: Condition) -> list[Condition]:
    """Add a run without expert capacity, in which no token is dropped and the model is as it is."""
    if not any(find_capacities(case.plan)) or case.by_parts or case.table is not None:
        return []
    full = prepare_case(replace(case, plan=without_capacity(case.plan)))
    name = "capacity without limit, where `routing` vanishes"
    return [replace(sgd_run, name=name, batches=case.batches[:2], case=full)]


def batches_of(case: Case) -> BatchSet:
    """Return the batches of a case, how they are split, and which inputs are known to be labels."""
    replicas, micro = case.cuts

    def cut(count: int) -> list[range]:
        return [
            range(share.start + rows.start, share.start + rows.stop)
            for share in split_rows(count, replicas)
            for rows in split_rows(len(share), micro)
        ]

    rules = case.prepared.traced.labels if case.prepared is not None else ()
    labels = tuple(LabelInput(rule.source, rule.ignore_index) for rule in rules)
    return BatchSet(case.batches, cut, labels)


def _is_usable(case: Case, batch: Batch) -> bool:
    """Return whether the original accepts a derived batch, and its parts add up to the whole."""
    probe = Probe(case, batch)
    try:
        with original_subject(case) as subject:
            full = loss_and_gradients(subject, batch, range(count_rows(batch)))
            norm = get_total_norm([g for name, g in full.items() if name and g is not None])
            finite = math.isfinite(float(norm))
            return finite and (case.by_parts or probe.first_difference_on(subject, full) is None)
    except Exception:  # any error of the model for a derived batch
        return False


def _freeze_some(case: Case) -> tuple[Case | None, tuple[Gap, ...]]:
    """Return the case with a quarter of the parameters frozen, if the user froze none."""
    module = case.plan.model.model
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    if len(names) < len(list(module.parameters())):
        return None, ()
    frozen_names = {name for name in names if zlib.crc32(name.encode()) % 4 == 0} or {names[0]}
    try:
        if len(frozen_names) == len(names):
            return None, (Gap("no frozen parameters", _FROZEN),)
        untouched = case.plan.model.base.model
        return prepare_case(case.with_model(Freeze(frozenset(frozen_names))(untouched))), ()
    except Refusal as refusal:
        reason = refusal.diagnostics[0].title
        return None, (Gap(f"no frozen parameters ({reason})", _FROZEN),)


_FROZEN = "frozen weights that are updated, or stop the gradient of others"


# ---- Gaps: what was not exercised, and what that could hide.


def find_gaps(
    data: BatchSet,
    *,
    sizes: Mapping[str, int],
    drawn: int | None = None,
    parameters: Mapping[str, int] | None = None,
) -> tuple[Gap, ...]:
    """List what was not exercised.

    `sizes` are the mesh axes, `drawn` is the number of dropout masks, `parameters` are numbers of
    elements by name.
    """
    gaps = [*_batch_gaps(data), *_label_gaps(data), *_input_gaps(data)]
    if drawn == 0:
        gaps.append(Gap("no dropout", "masks that differ between copies or on recomputation"))
    axes = {name: size for name, size in sizes.items() if size > 1}
    if len(axes) > 1 and len(set(axes.values())) == 1:
        size = next(iter(axes.values()))
        gaps.append(Gap(f"all axes have size {size}", "sums over or divisions by the wrong axis"))
    if parameters and axes and not any(n % s for n in parameters.values() for s in axes.values()):
        gaps.append(
            Gap("every axis divides every parameter", "elements dropped behind an even cut")
        )
    return tuple(gaps)


def missing_kinds(observed: Observation) -> tuple[Gap, ...]:
    """List kinds that the program does not offer, and values that could not be read."""
    kinds = [Gap(f"{kind} (not offered)", f"wrong {kind}") for kind in sorted(observed.missing)]
    types = [
        Gap(f"`{name}` in the output", "wrong values in it") for name in sorted(observed.unread)
    ]
    left_out = [
        Gap(f"`{k}` in the output: {v}", "wrong values in it") for k, v in observed.left_out.items()
    ]
    return (*kinds, *types, *left_out)


def unused_parameters(expected: Observation) -> tuple[Gap, ...]:
    """List parameters on which the loss never depended: their gradients are not tested."""
    used_by: dict[str, bool] = {}
    for key, value in expected.tensors.items():
        if key.kind == "gradients":
            used_by[key.name] = used_by.get(key.name, False) or bool(
                value is not None and value.any()
            )
    unused = [name for name, used in used_by.items() if not used]
    if not unused:
        return ()
    rest_text = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    return (Gap(f"no gradient of `{unused[0]}`{rest_text}", "wrong gradients there"),)


def separate_rows(plan: Plan, tried: bool) -> tuple[Gap, ...]:
    """List rows that ran unchecked within the program, and separately at most."""
    hidden_by = {}
    for _, row in plan.rows_with(Tried):
        if row.apart and tried:
            hides = "what it keeps from one microbatch, step or module to the next"
            hidden_by[
                f"`{row}` {row.apart} within the program: only by itself, call after call"
            ] = hides
        elif row.apart:
            hidden_by[f"`{row}` {row.apart}: without a working dtype it ran as it stands"] = (
                "all of it"
            )
    return tuple(Gap(condition, hides) for condition, hides in hidden_by.items())


def repeating_blocks(plan: Plan) -> tuple[Gap, ...]:
    """List trunks whose block pattern repeats with every stage, which hides restarted counts."""
    trunks = {trunk for cut in plan.cuts for trunk in cut.trunks if plan.model.children(trunk)}
    stages = 1
    for cut in plan.cuts:
        stages *= plan.mesh.size(cut.axis) * (plan.order.chunks if plan.order else 1)
    gaps = []
    for trunk in sorted(trunks):
        kinds = [_block_kind(block) for block in plan.model.model.get_submodule(trunk).children()]
        per_stage, remainder = divmod(len(kinds), stages)
        varied = len(set(kinds)) > 1
        if stages > 1 and not remainder and varied and kinds[:per_stage] * stages == kinds:
            condition = f"the pattern of `{trunk}` repeats with every stage"
            gaps.append(Gap(condition, "blocks that are counted from 0 again"))
    return tuple(gaps)


def _block_kind(block: Any) -> tuple[Any, ...]:
    """Return what distinguishes a block besides its weights and its index."""
    plain_types = (bool, int, float, str, type(None))
    return tuple(
        (name, type(module).__name__, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, plain_types) and key not in ("layer_idx", "training") and key[0] != "_"
    )


def _batch_gaps(data: BatchSet) -> Iterator[Gap]:
    if len(data.all) < 2 or all(_equal_batches(data.all[0], batch) for batch in data.all[1:]):
        yield Gap("one batch only", "values kept from one step to the next")
    elif data.shapes < 2:
        yield Gap("one shape only", "shapes kept from the first batch")
    if len({tuple(s[1:] for s in tensor_shapes(batch).values()) for batch in data.all}) == 1:
        yield Gap("one length only", "sizes of the first batch kept for others")
    if data.parts > 1 and not data.has_unequal_parts:
        yield Gap("no batch with a smaller last part", "parts dropped or weighed alike")
    if data.parts > 1 and not data.has_equal_parts:
        yield Gap("no batch of equal parts", "buffers reused while still needed")


def _equal_batches(a: Batch, b: Batch) -> bool:
    first, second = named_tensors(a), named_tensors(b)
    return first.keys() == second.keys() and all(equal(v, second[k]) for k, v in first.items())


def _label_gaps(data: BatchSet) -> Iterator[Gap]:
    """Yield gaps of uneven label counts, which distinguish a mean from a mean of means."""
    if not data.has_uneven_labels:
        yield Gap("no ignored labels", "means of means, counts of padding")
    if not data.has_empty_parts:
        yield Gap("no part without labels", "means over nothing, and parts that weigh nothing")


def _input_gaps(data: BatchSet) -> Iterator[Gap]:
    if not data.has_padding:
        yield Gap("no padding", "masks that are dropped, shifted or not passed on")
    if not data.has_half_vocabulary and any(
        TOKENS in non_float_tensors(batch) for batch in data.all
    ):
        yield Gap("every row has all kinds of tokens", "a part of the vocabulary that is not asked")
    places = [b[POSITIONS] for b in data.all if POSITIONS in non_float_tensors(b)]
    if places and all(p.dim() < 2 or bool((p == p[:1]).all()) for p in places):
        yield Gap("all rows have equal positions", "positions of one row taken for all")
    if not any(_has_floats(batch) for batch in data.all):
        yield Gap("no float inputs", "wrong gradients of inputs")


def _has_floats(batch: Mapping[str, Any]) -> bool:
    return any(value.is_floating_point() for value in named_tensors(batch).values())
