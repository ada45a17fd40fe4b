"""What training draws natively: at the places of the proof, alike on replicas, apart elsewhere.

A proof draws masks logically, and training draws otherwise.  So the program, once proven, trains
two more steps as training does, with an eye on each draw: which module draws for which samples and
which part of the logical mask, and with which number its stream begins.  That number has to be one
for the same part of a mask, on all ranks and in each recomputation, and another for any other part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedlang.passes.proving.observe import Batch
    from schedlang.runtime.drawing.native import Content, Noted
    from schedlang.runtime.program import Program

STEPS = 2  # masks of one must not be those of the other
REPLICAS = 1e-9  # by how much copies of a parameter may differ

Sites = Mapping[tuple[str, int], set[int]]  # (module, call) -> samples


@dataclass(frozen=True)
class Mine:
    """One rank's part: what it drew natively, by step what that was, and what it drew logically."""

    begun: Mapping[Content, set[float]]
    sites: Sequence[Sites]
    logical: Sites


def native_draws(program: Program, batch: Batch) -> tuple[int, list[str]] | None:
    """How many masks two steps drew natively, and what is wrong with them; None: none are drawn.

    All ranks call together.
    """
    from schedlang.runtime.collectives import comm
    from schedlang.runtime.drawing.native import Noting
    from schedlang.runtime.drawing.random import LogicalDropout
    from schedlang.runtime.parts import followed

    assembly = program.assembly
    logical, native = assembly.dropout, assembly.native
    if native is None or not isinstance(logical, LogicalDropout):
        return None
    noticed = logical.noted or {}
    trained = [moment for moment, _, _ in noticed if isinstance(moment, int)]
    if not any(comm.gathered(bool(trained))):  # a stage may draw nothing, and trains with the rest
        return None
    noting, first = Noting(native, logical.slices), program.step
    program.assembly, program.follow_inputs = replace(assembly, dropout=native), False
    try:
        for _ in range(STEPS):
            with ExitStack() as stack:
                stack.enter_context(noting.on())
                program.train_step(followed(batch, grad=False))
    finally:
        program.assembly = assembly
    noted, step = noting.noted, min(trained, default=None)
    known = {(site, call): set(rows) for (k, site, call), rows in noticed.items() if k == step}
    mine = Mine(noted.begun, [_of(noted, first + k) for k in range(STEPS)], known)
    wrong = wrong_draws(comm.gathered(mine))
    copies = program.replica_errors()
    wrong += [
        f"copies of `{name}` on different ranks differ" for name, error in copies.items()
        if not error <= REPLICAS
    ]  # fmt: skip
    return len(noted.begun), wrong


def _of(noted: Noted, step: int) -> Sites:
    return {(site, call): rows for (k, site, call), rows in noted.shapes.items() if k == step}


def wrong_draws(everyone: Sequence[Mine]) -> list[str]:
    """What is wrong with the draws of all ranks, in words."""
    return [*_places(everyone), *_streams(everyone)]


def _places(everyone: Sequence[Mine]) -> Iterator[str]:
    """Draws that a rank makes in training and not in the proof, or the other way round."""
    for rank, mine in enumerate(everyone):
        for drawn in mine.sites:
            differ = [key for key in {**mine.logical, **drawn}
                      if mine.logical.get(key) != drawn.get(key)]  # fmt: skip
            for site, call in differ[:1]:
                word = "not drawn" if (site, call) not in drawn else "drawn otherwise"
                yield f"`{site or 'model'}` call {call} is {word} in training, on rank {rank}"


def _streams(everyone: Sequence[Mine]) -> Iterator[str]:
    """One number for each part of a mask, one part for each number."""
    numbers: dict[Content, dict[float, int]] = {}
    parts: dict[float, tuple[Content, int]] = {}
    for rank, mine in enumerate(everyone):
        for content, begun in mine.begun.items():
            for number in begun:
                numbers.setdefault(content, {}).setdefault(number, rank)
                parts.setdefault(number, (content, rank))
                other, where = parts[number]
                if other != content:
                    yield f"{_said(content, rank)} draws as {_said(other, where)}"
    for content, found in numbers.items():
        if len(found) > 1:
            ranks = sorted(set(found.values()))
            among = "when it is computed again" if len(ranks) == 1 else f"on ranks {ranks}"
            yield f"{_said(content, ranks[0])} draws otherwise {among}"


def _said(content: Content, rank: int) -> str:
    step, samples, site, call, held = content
    rows = ",".join(map(str, samples))
    part: Any = "" if held is None else ", a part"
    return f"`{site or 'model'}` call {call}, step {step}, rows {rows}{part} (rank {rank})"
