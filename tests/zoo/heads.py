"""Injected bugs of tensor parallelism: losses, heads, masks, replicated parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlang.passes.analyze import holdings
from schedlang.runtime import program
from schedlang.runtime.comm import collectives
from schedlang.runtime.grad_reduction import gradient
from schedlang.runtime.lazy_logits import vocab_parallel
from schedlang.runtime.propagation import follower as following
from schedlang.runtime.rng import logical_dropout as drawing
from schedlang.runtime.sharding import module_sizes
from tests.zoo.bug import CONSTANT, GROUP, REDUCTION, SKIP, SLICE, Patch, Site, bug
from tests.zoo.trackers import program_tracker, rank


def _change_sums(patch: Patch, change: Any) -> None:
    """Replace the gradient reductions after backward by `change(sums)`."""
    original = gradient.sum_gradients
    patch.setattr(
        program, "sum_gradients", lambda parameters, sums: original(parameters, change(list(sums)))
    )


def drop_from_sums(patch: Patch, kind: str, drop: Any = lambda name: True) -> None:
    """Leave out of the reductions of a kind all parameters for which `drop(name)` is true."""

    def less(sums: list[Any]) -> list[Any]:
        reductions = []
        for reduction in sums:
            names = tuple(n for n in reduction.names if reduction.kind != kind or not drop(n))
            if names:
                reductions.append(
                    gradient.GradientReduction(reduction.group, names, reduction.kind)
                )
        return reductions

    _change_sums(patch, less)


@bug(
    "T06",
    "shard",
    REDUCTION,
    "tp",
    credit="AReno#496",
    here="the group of a whole parameter is that of the first crossing of the step",
)
def full_gradients_summed_again(patch: Patch, site: Site) -> None:
    """Gradients of norms are complete, as activations are reduced, but are summed once more."""
    original, groups = gradient.sum_gradients, list[Any]()
    reduce = collectives.reduce

    def noting(x: Tensor, group: Any) -> Tensor:
        groups[:] = [group]
        return reduce(x, group)

    def again(parameters: Any, sums: Any) -> None:
        original(parameters, sums)
        names = tuple(n for n in parameters if "ln_" in n and site.covers(n))
        original(
            parameters, [gradient.GradientReduction(group, names, "partial") for group in groups]
        )

    patch.setattr(collectives, "reduce", noting)
    patch.setattr(program, "sum_gradients", again)


@bug(
    "T07",
    "shard",
    REDUCTION,
    "sp",
    row="S(seq)",
    planning=True,
    credit="pytorch#172932; torchtitan#2532",
    here="the pass that lists reductions is where such a placement would be lost",
)
def pending_gradients_forgotten(patch: Patch, site: Site) -> None:
    """That a replicated parameter's gradient is partial is forgotten before reduction."""
    patch.setattr(holdings, "_partial", lambda plan, traced, trained: iter(()))


@bug(
    "T10",
    "replace_kernel",
    SLICE,
    "attending",
    row="replace_kernel(kernel=sdpa)",
    credit="axlearn#842; onnx#7274",
)
def heads_tiled(patch: Patch, site: Site) -> None:
    """Key heads are tiled instead of repeated: queries attend to another group's keys."""
    from transformers.integrations import sdpa_attention

    original, running = sdpa_attention.repeat_kv, program_tracker(patch, "train_step", "eval_step")

    def tiled(x: Tensor, groups: int) -> Tensor:
        # a copy is probed before a program runs; a bug there would be noticed
        return original(x, groups) if running() is None else x.repeat(1, groups, 1, 1)

    patch.setattr(sdpa_attention, "repeat_kv", tiled)


@bug(
    "T11",
    "shard",
    REDUCTION,
    "one key head",
    planning=True,
    credit="bigcode Megatron-LM#35; ISEEKYAN/Megatron#91",
    here="the pass that follows gradients refuses it; the bug is that it does not",
)
def shared_key_not_summed(patch: Patch, site: Site) -> None:
    """The gradient of a shared key head is partial on each rank and is not summed."""
    patch.setattr(following.ComparedCall, "finish", torch.no_grad()(following.ComparedCall.finish))


@bug("T13", "shard", REDUCTION, "tp", row="lm_head  shard(style=vocab")
def local_max_logit(patch: Patch, site: Site) -> None:
    """The split softmax is shifted by each rank's own largest logit."""

    class Lonely:
        @staticmethod
        def all_reduce(x: Tensor, group: Any, largest: bool) -> None:
            assert largest

    patch.setattr(vocab_parallel, "world", Lonely)


@bug("T14", "shard", CONSTANT, "smoothed", row="shard(style=vocab", credit="Megatron-LM#737, #7464")
def smoothed_over_local_vocab(patch: Patch, site: Site) -> None:
    """Label smoothing divides by the vocabulary size of one rank."""
    original = vocab_parallel.cross_entropy

    def loss(logits: Any, *args: Any, **kwargs: Any) -> Tensor:
        class Fewer(vocab_parallel.ShardedLogits):
            shape = logits.shape  # labels are still looked for among all words

        return original(Fewer(logits.local, logits.group, logits.local.shape[-1]), *args, **kwargs)

    patch.setattr(vocab_parallel, "cross_entropy", loss)


@bug("T18", "shard", GROUP, "sp", row="S(seq)", credit="gpt-neox#1259")
def partial_sums_averaged(patch: Patch, site: Site) -> None:
    """Norms on sequence-parallel tokens get the mean of the ranks' gradients, not the sum."""
    original = gradient.sum_gradients

    def mean(parameters: Any, sums: Any) -> None:
        original(parameters, sums)
        for reduction in sums:
            for name in reduction.names if reduction.kind == "partial" else ():
                grad = gradient.local_gradient(parameters[name])
                if grad is not None and site.covers(name):
                    grad.div_(reduction.group.size)

    patch.setattr(program, "sum_gradients", mean)


@bug("T19", "shard", REDUCTION, "sp, biases", row="output=S(seq)", credit="Megatron-LM PR#236")
def late_biases_not_summed(patch: Patch, site: Site) -> None:
    """A bias added to this rank's tokens gets only their part of its gradient."""
    drop_from_sums(patch, "partial", lambda name: name.endswith("bias"))


@bug(
    "T20",
    "shard",
    REDUCTION,
    "normed heads",
    row="shard(style=col",
    credit="Megatron-LM#7452; HF replicated_with_grad_allreduce",
)
def norms_of_heads_not_summed(patch: Patch, site: Site) -> None:
    """A weight that all heads share gets the gradient of this rank's heads only."""
    drop_from_sums(patch, "partial", lambda name: "q_norm" in name or "k_norm" in name)


@bug("T21", "shard", SKIP, "gated", credit="Pai-Megatron-Patch#397")
def small_parameter_forgotten(patch: Patch, site: Site) -> None:
    """A small gate inside the sharded region is left out of the reductions."""
    drop_from_sums(patch, "partial", lambda name: name.endswith("gate"))


@bug("T18b", "shard", REDUCTION, "sp", row="S(seq)", credit="as T18; older form")
def partial_sums_skipped(patch: Patch, site: Site) -> None:
    """Norms on sequence-parallel tokens keep their partial gradient."""
    drop_from_sums(patch, "partial", site.covers)


@bug(
    "T26",
    "shard",
    CONSTANT,
    "tp",
    row="attn.c_attn",
    credit="Megatron-LM#848",
    here="`shard_modules` divides the numbers that modules count by",
)
def scale_of_part_of_the_width(patch: Patch, site: Site) -> None:
    """The softmax scale is computed from the local width."""
    original = module_sizes.set_number

    def divided(module: Any, attribute: str, value: Any) -> None:
        parts = module_sizes.number_at(module, attribute) / value
        original(module, attribute, value)
        if hasattr(module, "scaling"):
            module.scaling *= parts**0.5

    patch.setattr(module_sizes, "set_number", divided)


@bug(
    "T32",
    "shard",
    CONSTANT,
    "tp",
    row="shard(style=",
    credit="TransformerEngine#1272; Megatron-DeepSpeed#276",
)
def masks_by_rank(patch: Patch, site: Site) -> None:
    """Replicated activations get different dropout masks on each rank."""
    original = drawing.stream_of
    patch.setattr(
        drawing, "stream_of", lambda *args: original(*args) if rank() == 0 else original(1, *args)
    )


@bug("T32b", "shard", SLICE, "tp", row="attn.c_attn", credit="as T32, the other way")
def mask_not_sliced(patch: Patch, site: Site) -> None:
    """Ranks with other heads use the dropout masks of the first heads."""
    original = drawing.LogicalDropout.__init__

    def init(self: Any, seed: int, slices: Any = None, unbatched: Any = None) -> None:
        original(self, seed, None, unbatched)

    patch.setattr(drawing.LogicalDropout, "__init__", init)


@bug(
    "T29",
    "shard",
    SLICE,
    "regrouped",
    planning=True,
    credit="pytorch#179502, #166598",
    here="the pass that follows shapes refuses it; the bug is that it does not",
)
def local_view_allowed(patch: Patch, site: Site) -> None:
    """A view splits a sharded dim as if the rank's part were the full size."""
    patch.setattr(
        following.ComparedCall,
        "_reshape_blocks",
        lambda self, axis, tag, dim, before, after: (after[dim],),
    )


@bug(
    "T30",
    "shard",
    REDUCTION,
    "normed",
    planning=True,
    here="the pass that follows shapes refuses it; the bug is that it does not",
)
def statistics_of_a_part(patch: Patch, site: Site) -> None:
    """A norm over a split dim takes the mean and the variance of the rank's own part."""
    patch.setattr(following.ComparedCall, "_check_along", lambda self, axis, tag, size: None)
