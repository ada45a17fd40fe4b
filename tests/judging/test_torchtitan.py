"""Models of torchtitan by its own functions, where it is installed: each equals its original."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from schedlang import verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.versions.torchtitan import FAMILIES, Family, Way, batch, loss, made

pytestmark = [pytest.mark.others, pytest.mark.deep]

WAYS: dict[str, Way] = {
    "words split between layers": Way(tp=2),
    "FSDP2 inside of replicas": Way(fsdp=2, replicas=2),
    "tensor parallel and FSDP2": Way(tp=2, fsdp=2),
    "a pipeline and FSDP2": Way(pp=2, fsdp=2),
    "an interleaved pipeline": Way(pp=2, schedule="Interleaved1F1B"),
    "a pipeline of split layers": Way(pp=2, tp=2),
}
DENSE = ("llama3", "qwen3", "deepseek_v3")


def judged(family: Family, way: Way, dtype: str | None = None) -> Report:
    """The verdict on a way; four layers where it has stages."""
    torch.manual_seed(0)
    model = family.model(experts=way.ep > 1, count=4 if way.pp > 1 else 2)
    given = {"model": model, "batch": batch, "loss": loss, "ranks": way.ranks, "dtype": dtype}
    with Pool() as pool:  # it leaves meshes in its processes
        return verify_program(made(family, way), **given, pool=pool)


@pytest.fixture(autouse=True)
def installed() -> None:
    """Skip without torchtitan."""
    pytest.importorskip("torchtitan")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", DENSE)
def test_a_way_equals_the_model(name: str, way: Way) -> None:
    """Gradients, and three steps, of what its functions make of a model."""
    report = judged(FAMILIES[name], way)
    assert report.ok, str(report)


EXPERTS: dict[str, tuple[Way, str | None]] = {
    "where words are split": (Way(tp=2, ep=2), None),
    "where words are split, in few bits": (Way(tp=2, ep=2), "bfloat16"),
    "where FSDP2 shares rows": (Way(fsdp=2, ep=2), None),
}


@pytest.mark.parametrize("way, dtype", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3_moe"])
def test_experts_of_two_ranks(name: str, way: Way, dtype: str | None) -> None:
    """Experts lie on the ranks between which words, or rows, are split."""
    report = judged(FAMILIES[name], way, dtype)
    assert report.ok, str(report)


def test_a_tie_that_is_not_made_again() -> None:
    """Its trainer ties weights once more after they are split; who does not, has two of them."""
    tied = FAMILIES["qwen3_tied"]
    assert judged(tied, Way(tp=2)).ok
    said = dict(judged(replace(tied, again=False), Way(tp=2)).localised)["gradients"]
    assert "a tie is broken between `lm_head.weight`, `tok_embeddings.weight`" in said, said


REFUSED: dict[str, tuple[Way, str]] = {
    "no rule for attention on CPUs": (Way(cp=2), "flash_attention_for_cpu.default does not have"),
    "DTensors of a later torch": (Way(tp=2, fsdp=2, backend="full_dtensor"), "to be the same mesh"),
    "types of a later torch": (Way(tp=2, fsdp=2, backend="spmd_types"), "must be DTensors on"),
}


@pytest.mark.parametrize("way, said", REFUSED.values(), ids=REFUSED)
def test_what_does_not_run_here_is_refused(way: Way, said: str) -> None:
    """With torch 2.13 on CPUs: at its line, with the rank."""
    with pytest.raises(Refusal) as refused:
        judged(FAMILIES["llama3"], way)
    assert said in " ".join(str(refused.value).split()), refused.value
