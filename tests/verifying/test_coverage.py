"""Coverage gaps of a proof: what the batches did not exercise is reported, and nothing else."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from schedlang.passes.verify.kernel_trials import run_trials
from schedlang.passes.verify.observe import Key, Observation
from schedlang.passes.verify.proof_case import Case
from schedlang.passes.verify.training_runs import (
    BatchSet,
    LabelInput,
    find_gaps,
    missing_kinds,
    repeating_blocks,
    separate_rows,
    unused_parameters,
    vary_batches,
)
from schedlang.report import Gap
from schedlang.runtime.batch import split_rows
from tests import models
from tests.proofs import make_plan

PARTS = 2


def _batch(rows: int, *, ragged: bool, floats: bool = False, length: int = 4) -> Any:
    ids = torch.arange(rows * length).reshape(rows, length)
    labels = torch.ones(rows, length, dtype=torch.long)
    mask = torch.ones_like(labels)
    if ragged:
        labels[0, 1:], mask[0, 1:] = -100, 0
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return {**batch, "x": torch.ones(rows, 4)} if floats else batch


def _batch_set(batches: Sequence[Any], parts: int = PARTS) -> BatchSet:
    return BatchSet(batches, lambda rows: split_rows(rows, parts), (LabelInput("labels", -100),))


def _conditions_text(gaps: Sequence[Gap]) -> str:
    return " | ".join(gap.condition for gap in gaps)


def test_a_full_set_has_no_gaps() -> None:
    """Ragged and full batches, floats, dropout, axes of different sizes: no gaps."""
    empty = _batch(5, ragged=True, floats=True, length=3)
    for row in (0, 3, 4):
        empty["labels"][row] = -100
    batches = [_batch(4, ragged=False, floats=True), empty, _batch(6, ragged=True, floats=True)]
    sizes = {"tp": 2, "dp": 3}
    assert find_gaps(_batch_set(batches), sizes=sizes, drawn=9, parameters={"w": 7}) == ()


def test_positions_that_never_vary_are_said() -> None:
    """Equal positions in all rows are a gap; one different row closes it."""
    positions = torch.arange(4).expand(4, 4)
    batches = [{**_batch(4, ragged=False), "position_ids": positions.clone()} for _ in range(2)]
    gap_text = "all rows have equal positions"
    assert gap_text in _conditions_text(find_gaps(_batch_set(batches), sizes={}))
    batches[1]["position_ids"][2] += 1
    assert gap_text not in _conditions_text(find_gaps(_batch_set(batches), sizes={}))
    assert gap_text not in _conditions_text(
        find_gaps(_batch_set([_batch(4, ragged=False)]), sizes={})
    )


def test_what_runs_by_itself_alone_is_said() -> None:
    """A compiled region is tested separately, or, without a working dtype, not at all."""
    plan = make_plan(models.gpt2(), "transformer.h.*.mlp fuse()")
    (tried,), (untried,) = separate_rows(plan, tried=True), separate_rows(plan, tried=False)
    assert tried.condition.startswith("`fuse()` compiled within the program")
    assert untried.condition == "`fuse()` compiled: without a working dtype it ran as it stands"
    assert separate_rows(make_plan(models.gpt2(), "transformer.h.* checkpoint()"), tried=True) == ()


def test_a_kernel_is_tried_for_each_kind_of_module() -> None:
    """Norms with equal shapes but different eps are tested separately."""

    def tried(*eps: float) -> int:
        model = torch.nn.Sequential(*(torch.nn.LayerNorm(8, eps=eps_value) for eps_value in eps))
        plan = make_plan(model, "*  replace_kernel(layer_norm)")
        return len(run_trials(Case(plan, ({"input": torch.randn(4, 8)},)), ())[0])

    assert tried(1e-5, 1e-5, 1e-3) == 2 * tried(1e-5, 1e-5, 1e-5)


def test_each_gap_is_named() -> None:
    """One plain full batch leaves all gaps open."""
    batches = [_batch(4, ragged=False)] * 3
    batches[0]["input_ids"] += 100  # no row of low numbers only
    gaps = find_gaps(_batch_set(batches), sizes={"a": 2, "b": 2}, drawn=0, parameters={"w": 8})
    for gap_text in (
        "one batch only",
        "smaller last part",
        "one length only",
        "no ignored labels",
        "no part without labels",
        "no padding",
        "all kinds of tokens",
        "no float inputs",
        "no dropout",
        "all axes have size 2",
        "divides every parameter",
    ):
        assert gap_text in _conditions_text(gaps), gap_text
    assert "equal parts" in _conditions_text(
        find_gaps(_batch_set([_batch(5, ragged=True)]), sizes={})
    )
    shapes = [_batch(4, ragged=False), _batch(4, ragged=True)]
    assert "one shape only" in _conditions_text(find_gaps(_batch_set(shapes), sizes={}))


def test_variants_close_the_gaps_that_mean_the_same_everywhere() -> None:
    """Labels, masks, rows and tokens are varied in copies; existing variety is kept."""
    originals = [_batch(6, ragged=False)] * 3
    originals[0]["input_ids"] += 20
    copies = {name: value.clone() for name, value in originals[0].items()}
    varied, changes = vary_batches(_batch_set(originals))
    gap_text = _conditions_text(find_gaps(_batch_set([*originals, *varied]), sizes={}))
    for closed in ("ignored", "padding", "part without", "smaller last", "kinds of tokens"):
        assert closed not in gap_text, gap_text
    assert sum(map(len, changes.values())) == 4
    assert all(torch.equal(originals[0][name], value) for name, value in copies.items())
    assert len(varied) == 3 and len(varied[2]["labels"]) == 5
    full = [*varied, *originals]
    assert vary_batches(_batch_set(full)) == (full, {})


def test_nothing_is_changed_that_is_not_understood() -> None:
    """Inputs of unknown meaning and batches too small to split are not changed."""
    odd = [{"x": torch.randn(2, 3), "kind": torch.tensor([1, 2])}] * 3
    varied, changes = vary_batches(BatchSet(odd, lambda rows: split_rows(rows, 2)))
    assert not changes and all(a is b for a, b in zip(varied, odd))


def test_what_a_program_does_not_offer_is_a_gap() -> None:
    """Missing kinds and unread values are gaps, with their names."""
    observation = Observation(missing=frozenset({"replicas"}), unread=frozenset({"Cache"}))
    assert (
        _conditions_text(missing_kinds(observation))
        == "replicas (not offered) | `Cache` in the output"
    )


def test_idle_parameters_are_a_gap() -> None:
    """A parameter without a gradient in all steps is a gap."""
    tensors = {
        Key("c", "gradients", 0, "a"): torch.zeros(2),
        Key("c", "gradients", 1, "a"): None,
        Key("c", "gradients", 0, "b"): None,
        Key("c", "gradients", 1, "b"): torch.ones(1),
    }
    assert _conditions_text(unused_parameters(Observation(tensors))) == "no gradient of `a`"


def test_a_pattern_that_repeats_with_the_stages_is_a_gap() -> None:
    """Blocks that alternate equally in each stage are a gap; equal or uneven blocks are not."""
    rows = 'layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'

    def found(scales: Sequence[float]) -> tuple[Gap, ...]:
        model: Any = torch.nn.Module()
        model.layers = torch.nn.ModuleList(models.Block(3) for _ in scales)
        for layer, scale in zip(model.layers, scales):
            layer.scale = scale
        return repeating_blocks(dataclasses.replace(make_plan(model, rows, "pp=2")))

    assert "repeats with every stage" in _conditions_text(found([1.0, 2.0, 1.0, 2.0]))
    assert found([1.0, 1.0, 1.0, 1.0]) == () and found([1.0, 2.0, 2.0, 1.0]) == ()
