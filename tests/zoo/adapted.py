"""Bugs of attention by other kernels, and of experts by grouped products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from schedlang.kernels import grouped
from schedlang.kernels.flex_attention import AttentionCall
from schedlang.runtime.kernel_injection import attention_kernels, expert_kernel
from tests.zoo.bug import ARGUMENT, CONSTANT, SKIP, SLICE, Patch, Site, bug
from tests.zoo.place import running_program


def _attending(patch: Patch, change: Any) -> None:
    """While a program runs, attention is asked for by the rule `change(rule)`."""
    at_work = running_program(patch, "train_step", "eval_step")

    for name, plain in list(attention_kernels.ATTENTIONS.items()):

        def attend(query: AttentionCall, *given: Any, _plain: Any = plain) -> Tensor:
            # before a program runs a copy is probed, and would be found out
            if at_work() is not None:
                query = replace(query, rule=change(query.rule))
            result: Tensor = _plain(query, *given)
            return result

        patch.setitem(attention_kernels.ATTENTIONS, name, attend)  # type: ignore[arg-type]


@bug("F30", "replace_kernel", ARGUMENT, "attending by flex")
def cap_forgotten(patch: Patch, site: Site) -> None:
    """The kernel that replaces attention does not cap its scores."""
    _attending(patch, lambda rule: replace(rule, cap=0.0))


@bug("F31", "replace_kernel", CONSTANT, "attending by flex")
def default_scale(patch: Patch, site: Site) -> None:
    """The kernel scales by the size of a head where the model has a scale of its own."""
    _attending(patch, lambda rule: replace(rule, scale=None))


@bug("F32", "replace_kernel", SLICE, "grouped")
def last_row_to_the_next_group(patch: Patch, site: Site) -> None:
    """The last token of an expert is multiplied by the matrix of the next one."""
    at_work, plain = running_program(patch), expert_kernel.grouped_product

    def shifted(x: Tensor, weight: Tensor, ends: Tensor, *given: Any) -> Tensor:
        if at_work() is not None:
            ends = torch.cat([(ends[:-1] - 1).clamp_min(0), ends[-1:]])
        return plain(x, weight, ends, *given)

    patch.setattr(expert_kernel, "grouped_product", shifted)


@bug("F33", "replace_kernel", SKIP, "grouped")
def gradient_of_the_first_group(patch: Patch, site: Site) -> None:
    """The gradient of the first expert's matrix is left out."""
    at_work, plain = running_program(patch), grouped._reference_backward

    def backward(*given: Any) -> tuple[Tensor, Tensor]:
        dx, dweight = plain(*given)
        if at_work() is not None:
            dweight[0] = 0.0
        return dx, dweight

    patch.setattr(grouped, "_reference_backward", backward)
