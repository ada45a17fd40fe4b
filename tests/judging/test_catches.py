"""Silent bugs from public threads: a program as it was written is caught, the mended one passes."""

import importlib
import re

import pytest
import torch

import schedlang

CATCHES = (
    "accumulated_means",
    "adapter_replicas",
    "balance_shrinks",
    "detached_router",
    "expert_inputs",
    "experts_doubled",
    "first_word",
    "gathered_logits",
    "hybrid_of_one",
    "identity_backward",
    "label_smoothing",
    "local_scale",
    "lost_window",
    "mean_of_means",
    "norm_counts_replicas",
    "pipeline_accumulated",
    "sentinel_slots",
    "sequence_ddp",
    "sequence_norm",
    "shared_key",
    "shifted_labels",
    "short_window",
    "sink_norm",
    "softmax_of_a_turn",
    "stale_ring",
    "sum_of_a_part",
    "summed_loss",
    "summed_twice",
    "unsynchronised",
    "whole_of_a_part",
)


def judged(name, program, pool):
    """The verdict on one of a catch's programs, and the catch."""
    catch = importlib.import_module(f"tests.judging.catches.{name}")
    torch.manual_seed(0)
    report = schedlang.verify_program(
        getattr(catch, program),
        model=catch.model(),
        batch=catch.batch,
        loss=catch.loss,
        ranks=2,
        pool=pool,
    )
    return report, catch


@pytest.mark.parametrize("name", CATCHES)
def test_the_bug_is_caught_and_named(name, pool) -> None:
    """The program as it was written differs from its original, and the verdict says in what."""
    report, catch = judged(name, "wrong", pool)
    assert not report.ok
    _, _, said = str(report).partition("first difference")
    assert re.search(catch.NAMED, said), str(report)


@pytest.mark.parametrize("name", CATCHES)
def test_the_mended_program_passes(name, pool) -> None:
    """The same program without the bug equals its original in everything."""
    report, _ = judged(name, "right", pool)
    assert report.ok, str(report)
