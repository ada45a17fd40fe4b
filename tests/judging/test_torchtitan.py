"""Models of torchtitan, parallelized by its own functions, if installed: equal to the original."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from schedlang import verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.versions.torchtitan import FAMILIES, Family, Layout, batch, build_program, loss

pytestmark = [pytest.mark.others, pytest.mark.deep]

LAYOUTS: dict[str, Layout] = {
    "words split between layers": Layout(tp=2),
    "FSDP2 inside of replicas": Layout(fsdp=2, replicas=2),
    "tensor parallel and FSDP2": Layout(tp=2, fsdp=2),
    "a pipeline and FSDP2": Layout(pp=2, fsdp=2),
    "an interleaved pipeline": Layout(pp=2, schedule="Interleaved1F1B"),
    "a pipeline of split layers": Layout(pp=2, tp=2),
}
DENSE = ("llama3", "qwen3", "deepseek_v3")


def judge_family(family: Family, layout: Layout, dtype: str | None = None) -> Report:
    """Return the verdict on a layout of a family; four layers if it has stages."""
    torch.manual_seed(0)
    model = family.model(experts=layout.ep > 1, count=4 if layout.pp > 1 else 2)
    inputs = {"model": model, "batch": batch, "loss": loss, "ranks": layout.ranks, "dtype": dtype}
    with Pool() as pool:  # torchtitan leaves meshes in its processes
        return verify_program(build_program(family, layout), **inputs, pool=pool)


@pytest.fixture(autouse=True)
def installed() -> None:
    """Skip without torchtitan."""
    pytest.importorskip("torchtitan")


@pytest.mark.parametrize("way", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", DENSE)
def test_a_way_equals_the_model(name: str, way: Layout) -> None:
    """Gradients and three steps of the parallelized model equal the model's."""
    report = judge_family(FAMILIES[name], way)
    assert report.ok, str(report)


EXPERTS: dict[str, tuple[Layout, str | None]] = {
    "where words are split": (Layout(tp=2, ep=2), None),
    "where words are split, in few bits": (Layout(tp=2, ep=2), "bfloat16"),
    "where FSDP2 shares rows": (Layout(fsdp=2, ep=2), None),
}


@pytest.mark.parametrize("way, dtype", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3_moe"])
def test_experts_of_two_ranks(name: str, way: Layout, dtype: str | None) -> None:
    """Experts are on ranks that split tokens or rows."""
    report = judge_family(FAMILIES[name], way, dtype)
    assert report.ok, str(report)


def test_a_tie_that_is_not_made_again() -> None:
    """Weights must be tied again after they are split, as the trainer does."""
    tied = FAMILIES["qwen3_tied"]
    assert judge_family(tied, Layout(tp=2)).ok
    message = dict(judge_family(replace(tied, again=False), Layout(tp=2)).localised)["gradients"]
    assert "a tie is broken between `lm_head.weight`, `tok_embeddings.weight`" in message, message


REFUSED: dict[str, tuple[Layout, str]] = {
    "no rule for attention on CPUs": (
        Layout(cp=2),
        "flash_attention_for_cpu.default does not have",
    ),
    "DTensors of a later torch": (
        Layout(tp=2, fsdp=2, backend="full_dtensor"),
        "to be the same mesh",
    ),
    "types of a later torch": (Layout(tp=2, fsdp=2, backend="spmd_types"), "must be DTensors on"),
}


@pytest.mark.parametrize("way, said", REFUSED.values(), ids=REFUSED)
def test_what_does_not_run_here_is_refused(way: Layout, said: str) -> None:
    """What torch 2.13 on CPUs does not support is refused with the library's message."""
    with pytest.raises(Refusal) as refused:
        judge_family(FAMILIES["llama3"], way)
    assert said in " ".join(str(refused.value).split()), refused.value
