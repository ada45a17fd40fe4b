"""Injected bugs: attention by other kernels, and experts by grouped products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from schedlang.kernels import grouped
from schedlang.kernels.flex_attention import AttentionCall
from schedlang.runtime.kernel_injection import attention_kernels, expert_kernel
from tests.zoo.bug import ARGUMENT, CONSTANT, SKIP, SLICE, Patch, Site, bug
from tests.zoo.trackers import program_tracker


def _change_attention_rule(patch: Patch, change: Any) -> None:
    """While a program runs, attention kernels get the rule `change(rule)`."""
    running = program_tracker(patch, "train_step", "eval_step")

    for kernel_name, original in list(attention_kernels.ATTENTIONS.items()):

        def attend(query: AttentionCall, *args: Any, _original: Any = original) -> Tensor:
            # a copy is probed before a program runs; a bug there would be noticed
            if running() is not None:
                query = replace(query, rule=change(query.rule))
            result: Tensor = _original(query, *args)
            return result

        patch.setitem(attention_kernels.ATTENTIONS, kernel_name, attend)  # type: ignore[arg-type]


@bug("F30", "replace_kernel", ARGUMENT, "attending by flex")
def cap_forgotten(patch: Patch, site: Site) -> None:
    """The kernel that replaces attention does not cap its scores."""
    _change_attention_rule(patch, lambda rule: replace(rule, cap=0.0))


@bug("F31", "replace_kernel", CONSTANT, "attending by flex")
def default_scale(patch: Patch, site: Site) -> None:
    """The kernel scales by the head size, although the model has another scale."""
    _change_attention_rule(patch, lambda rule: replace(rule, scale=None))


@bug("F32", "replace_kernel", SLICE, "grouped")
def last_row_to_the_next_group(patch: Patch, site: Site) -> None:
    """The last token of an expert is multiplied by the matrix of the next one."""
    running, original = program_tracker(patch), expert_kernel.grouped_product

    def shifted(x: Tensor, weight: Tensor, ends: Tensor, *args: Any) -> Tensor:
        if running() is not None:
            ends = torch.cat([(ends[:-1] - 1).clamp_min(0), ends[-1:]])
        return original(x, weight, ends, *args)

    patch.setattr(expert_kernel, "grouped_product", shifted)


@bug("F33", "replace_kernel", SKIP, "grouped")
def gradient_of_the_first_group(patch: Patch, site: Site) -> None:
    """The gradient of the first expert's matrix is zero."""
    running, original = program_tracker(patch), grouped._reference_backward

    def backward(*args: Any) -> tuple[Tensor, Tensor]:
        dx, dweight = original(*args)
        if running() is not None:
            dweight[0] = 0.0
        return dx, dweight

    patch.setattr(grouped, "_reference_backward", backward)
