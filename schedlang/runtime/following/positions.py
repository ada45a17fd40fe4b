"""Which functions of torch look beyond one position, or one channel, of an activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WINDOWS = {
    *(f"conv{d}d" for d in (1, 2, 3)), *(f"conv_transpose{d}d" for d in (1, 2, 3)),
    *(f"{kind}_pool{d}d" for d in (1, 2, 3) for kind in ("max", "avg", "lp", "adaptive_avg",
                                                         "adaptive_max")),
    *(f"max_pool{d}d_with_indices" for d in (1, 2, 3)),
    "unfold", "fold", "grid_sample", "pixel_shuffle", "pixel_unshuffle", "instance_norm",
    "local_response_norm",
}  # fmt: skip
FIRST = 2  # the first dim of positions of [batch, channels, positions...]


def reaches(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole: tuple[int, ...],
    after: tuple[int, ...],
    integers: Sequence[int] = (),
) -> set[int]:
    """The dims of the main tensor along which a call mixes what stands at different places.

    `whole` and `after` are the original's shapes before and after it, `integers` its numbers.
    """
    if name in WINDOWS:
        return set(range(FIRST, len(whole)))
    if name == "group_norm":  # a part of the channels is as many groups as the whole, cut across
        groups = kwargs.get("num_groups", args[1] if len(args) > 1 else None)
        return set(range(1 if groups == next(iter(integers), None) else FIRST, len(whole)))
    if name == "batch_norm":
        return {0, *range(FIRST, len(whole))}
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else (0,))
        return set(range(len(whole) - len(tuple(shape)), len(whole)))
    if name == "pad":
        given = kwargs.get("pad", args[1] if len(args) > 1 else ())
        pairs = list(zip(given[::2], given[1::2]))
        return {len(whole) - 1 - at for at, pair in enumerate(pairs) if any(pair)}
    if name in ("interpolate", "upsample"):
        return _resized(args, kwargs, whole, after)
    return set()


def _resized(
    args: Sequence[Any], kwargs: Mapping[str, Any], whole: tuple[int, ...], after: tuple[int, ...]
) -> set[int]:
    """All positions, unless each is only repeated, or every n-th is kept."""
    mode = kwargs.get("mode", args[3] if len(args) > 3 else "nearest")
    if mode not in ("nearest", "nearest-exact"):
        return set(range(FIRST, len(whole)))
    moved = range(FIRST, len(whole))
    return {d for d in moved if after[d] % whole[d] and whole[d] % after[d]}
