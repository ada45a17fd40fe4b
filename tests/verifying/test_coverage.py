"""Tests of coverage: what was not exercised is said, and what was is not."""

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
from tests.proofs import planned

PARTS = 2


def _batch(rows: int, *, ragged: bool, floats: bool = False, length: int = 4) -> Any:
    ids = torch.arange(rows * length).reshape(rows, length)
    labels = torch.ones(rows, length, dtype=torch.long)
    mask = torch.ones_like(labels)
    if ragged:
        labels[0, 1:], mask[0, 1:] = -100, 0
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return {**batch, "x": torch.ones(rows, 4)} if floats else batch


def _seen(batches: Sequence[Any], parts: int = PARTS) -> BatchSet:
    return BatchSet(batches, lambda rows: split_rows(rows, parts), (LabelInput("labels", -100),))


def _words(found: Sequence[Gap]) -> str:
    return " | ".join(gap.condition for gap in found)


def test_a_full_set_has_no_gaps() -> None:
    """Ragged and even batches, floats, dropout, axes of different sizes: nothing to say."""
    empty = _batch(5, ragged=True, floats=True, length=3)
    for row in (0, 3, 4):
        empty["labels"][row] = -100
    batches = [_batch(4, ragged=False, floats=True), empty, _batch(6, ragged=True, floats=True)]
    sizes = {"tp": 2, "dp": 3}
    assert find_gaps(_seen(batches), sizes=sizes, drawn=9, parameters={"w": 7}) == ()


def test_positions_that_never_vary_are_said() -> None:
    """Rows of equal positions in all batches are a gap; one row of others closes it."""
    places = torch.arange(4).expand(4, 4)
    batches = [{**_batch(4, ragged=False), "position_ids": places.clone()} for _ in range(2)]
    words = "all rows have equal positions"
    assert words in _words(find_gaps(_seen(batches), sizes={}))
    batches[1]["position_ids"][2] += 1
    assert words not in _words(find_gaps(_seen(batches), sizes={}))
    assert words not in _words(find_gaps(_seen([_batch(4, ragged=False)]), sizes={}))


def test_what_runs_by_itself_alone_is_said() -> None:
    """A region that is compiled beside the proof, or, without a working dtype, never."""
    plan = planned(models.gpt2(), "transformer.h.*.mlp fuse()")
    (tried,), (untried,) = separate_rows(plan, tried=True), separate_rows(plan, tried=False)
    assert tried.condition.startswith("`fuse()` compiled within the program")
    assert untried.condition == "`fuse()` compiled: without a working dtype it ran as it stands"
    assert separate_rows(planned(models.gpt2(), "transformer.h.* checkpoint()"), tried=True) == ()


def test_a_kernel_is_tried_for_each_kind_of_module() -> None:
    """Norms of one shape, of which one is told another number: both are tried."""

    def tried(*eps: float) -> int:
        model = torch.nn.Sequential(*(torch.nn.LayerNorm(8, eps=one) for one in eps))
        plan = planned(model, "*  replace_kernel(layer_norm)")
        return len(run_trials(Case(plan, ({"input": torch.randn(4, 8)},)), ())[0])

    assert tried(1e-5, 1e-5, 1e-3) == 2 * tried(1e-5, 1e-5, 1e-5)


def test_each_gap_is_named() -> None:
    """One even batch without anything special leaves everything open."""
    batches = [_batch(4, ragged=False)] * 3
    batches[0]["input_ids"] += 100  # no row of low numbers only
    found = find_gaps(_seen(batches), sizes={"a": 2, "b": 2}, drawn=0, parameters={"w": 8})
    for words in (
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
        assert words in _words(found), words
    assert "equal parts" in _words(find_gaps(_seen([_batch(5, ragged=True)]), sizes={}))
    shapes = [_batch(4, ragged=False), _batch(4, ragged=True)]
    assert "one shape only" in _words(find_gaps(_seen(shapes), sizes={}))


def test_variants_close_the_gaps_that_mean_the_same_everywhere() -> None:
    """Labels, masks, rows and tokens are changed in copies; what is known to be there is kept."""
    plain = [_batch(6, ragged=False)] * 3
    plain[0]["input_ids"] += 20
    before = {name: value.clone() for name, value in plain[0].items()}
    made, said = vary_batches(_seen(plain))
    words = _words(find_gaps(_seen([*plain, *made]), sizes={}))
    for closed in ("ignored", "padding", "part without", "smaller last", "kinds of tokens"):
        assert closed not in words, words
    assert sum(map(len, said.values())) == 4
    assert all(torch.equal(plain[0][name], value) for name, value in before.items())
    assert len(made) == 3 and len(made[2]["labels"]) == 5
    full = [*made, *plain]
    assert vary_batches(_seen(full)) == (full, {})


def test_nothing_is_changed_that_is_not_understood() -> None:
    """Floats and integers of unknown meaning stay; so do batches too small to be cut."""
    odd = [{"x": torch.randn(2, 3), "kind": torch.tensor([1, 2])}] * 3
    made, said = vary_batches(BatchSet(odd, lambda rows: split_rows(rows, 2)))
    assert not said and all(a is b for a, b in zip(made, odd))


def test_what_a_program_does_not_offer_is_a_gap() -> None:
    """Kinds left out and values not read appear by name."""
    seen = Observation(missing=frozenset({"replicas"}), unread=frozenset({"Cache"}))
    assert _words(missing_kinds(seen)) == "replicas (not offered) | `Cache` in the output"


def test_idle_parameters_are_a_gap() -> None:
    """A parameter without any gradient in any step is named: its comparison says nothing."""
    tensors = {
        Key("c", "gradients", 0, "a"): torch.zeros(2),
        Key("c", "gradients", 1, "a"): None,
        Key("c", "gradients", 0, "b"): None,
        Key("c", "gradients", 1, "b"): torch.ones(1),
    }
    assert _words(unused_parameters(Observation(tensors))) == "no gradient of `a`"


def test_a_pattern_that_repeats_with_the_stages_is_a_gap() -> None:
    """Blocks that alternate within each stage hide a count from 0; alike or uneven ones do not."""
    rows = 'layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'

    def found(scales: Sequence[float]) -> tuple[Gap, ...]:
        model: Any = torch.nn.Module()
        model.layers = torch.nn.ModuleList(models.Block(3) for _ in scales)
        for layer, scale in zip(model.layers, scales):
            layer.scale = scale
        return repeating_blocks(dataclasses.replace(planned(model, rows, "pp=2")))

    assert "repeats with every stage" in _words(found([1.0, 2.0, 1.0, 2.0]))
    assert found([1.0, 1.0, 1.0, 1.0]) == () and found([1.0, 2.0, 2.0, 1.0]) == ()
