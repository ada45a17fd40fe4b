"""Chance: what can honestly be compared of randomness: the draws made, and the generators left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.runtime.drawing.random import Begun, Stream
    from schedlang.runtime.scope import Moment

Draws = Mapping[tuple["Moment", str, int], Iterable[int]]  # (step, site, call) -> samples


def generators(module: nn.Module) -> dict[str, Tensor]:
    """The state of torch's own generator and of those that modules keep as attributes.

    Dropout of a proof is drawn logically, so both sides have to leave them as they were.
    """
    import torch

    found = {"torch": torch.get_rng_state()}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, torch.Generator):
                found[f"{path}.{name}".lstrip(".")] = value.get_state()
    return found


def draws_in_words(noted: Draws) -> list[str]:
    """Each draw as a text: where, the how manyth, in which step, for which samples."""
    return [
        f"`{site or 'model'}` call {call}, {_when(step)}, rows {_runs(sorted(samples))}"
        for (step, site, call), samples in noted.items()
    ]


def repeated(begun: Mapping[Stream, Begun]) -> list[str]:
    """Draws that begin as another one does, each with that one, in words; there should be none.

    Both sides of a proof draw by one function of step, site, call and sample: where it leaves one
    of them out they agree, under masks that no training has.  Numbers have 53 bits, so that two
    streams of a proof do not share one by chance, also where one runs behind the other.
    """
    found = [f"{_stream(stream)} twice" for stream, one in begun.items() if one.twice]
    first: dict[int, Stream] = {}
    for stream, one in begun.items():
        before = {first.setdefault(number, stream) for number in one.numbers} - {stream}
        found += [f"{_stream(stream)} as {_stream(min(before, key=str))}"] if before else []
    return found


def _stream(stream: Stream) -> str:
    step, site, call, sample = stream
    return f"`{site or 'model'}` call {call}, {_when(step)}, row {sample}"


def _when(moment: Moment) -> str:
    """A step, or an evaluation before it."""
    if isinstance(moment, int):
        return f"step {moment}"
    return f"evaluation {moment[1]} before step {moment[0]}"


def together(everyone: Sequence[Draws | None]) -> dict[tuple[Moment, str, int], set[int]]:
    """The draws of all ranks: each has some samples, some sites, or a slice of the same mask."""
    out: dict[tuple[Moment, str, int], set[int]] = {}
    for noted in everyone:
        for key, samples in (noted or {}).items():
            out.setdefault(key, set()).update(samples)
    return out


def _runs(numbers: Sequence[int]) -> str:
    """Sorted numbers as "0-3,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][-1:] = [parts[-1][-1], number] if len(parts[-1]) == 1 else [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def generators_agree(everyone: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By generator 0 if all ranks left it in one state, else 1."""
    import torch

    first = everyone[0]
    return {
        f"generator {name}": float(
            any(name not in o or not torch.equal(o[name], state) for o in everyone[1:])
        )
        for name, state in first.items()
    }
