"""Compare random draws and generator states of both sides, and check native draws of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.passes.verify.observe import Batch
from schedlang.runtime.batch import with_leaf_tensors
from schedlang.runtime.comm import world
from schedlang.runtime.program import Program
from schedlang.runtime.rng.logical_dropout import (
    ALL_SAMPLES,
    LogicalDropout,
    StreamKey,
    StreamStart,
)
from schedlang.runtime.rng.native_dropout import Content, DrawRecorder, RecordedDraws
from schedlang.runtime.scope import Moment

# ---- Draws and generator states.


Draws = Mapping[tuple["Moment", str, int], Iterable[int]]  # (step, site, call) -> samples


def generator_states(module: nn.Module) -> dict[str, Tensor]:
    """Return the states of torch's generator and of generators that modules store as attributes.

    Dropout of a proof is drawn logically, so both sides must leave generators unchanged.
    """
    states = {"torch": torch.get_rng_state()}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, torch.Generator):
                states[f"{path}.{name}".lstrip(".")] = value.get_state()
    return states


def describe_draws(noted: Draws) -> list[str]:
    """Describe each draw: module, call number, step and samples."""
    return [
        f"`{site or 'model'}` call {call}, {_moment_text(step)}, {_rows_text(sorted(samples))}"
        for (step, site, call), samples in noted.items()
    ]


def repeated_streams(begun: Mapping[StreamKey, StreamStart]) -> list[str]:
    """Describe draws whose random streams start equally; there should be none.

    Both sides of a proof draw by one function of step, module, call and sample. If that function
    ignored one of them, both sides would agree, under masks that no training has. Numbers have 53
    bits, so two streams share none by chance, even if one runs behind the other.
    """
    repeats = [f"{_stream_text(stream)} twice" for stream, start in begun.items() if start.twice]
    first_users: dict[int, StreamKey] = {}
    for stream, start in begun.items():
        earlier = {first_users.setdefault(number, stream) for number in start.numbers} - {stream}
        repeats += (
            [f"{_stream_text(stream)} as {_stream_text(min(earlier, key=str))}"] if earlier else []
        )
    return repeats


def _stream_text(stream: StreamKey) -> str:
    step, site, call, sample = stream
    return f"`{site or 'model'}` call {call}, {_moment_text(step)}, {_rows_text([sample], 'row')}"


def _moment_text(moment: Moment) -> str:
    """Describe a step, or an evaluation before it."""
    if isinstance(moment, int):
        return f"step {moment}"
    return f"evaluation {moment[1]} before step {moment[0]}"


def join_draws(rank_draws: Sequence[Draws | None]) -> dict[tuple[Moment, str, int], set[int]]:
    """Join the draws of all ranks.

    Each rank draws for some samples, for some modules, or for a part of the same mask.
    """
    samples_by_draw: dict[tuple[Moment, str, int], set[int]] = {}
    for draws in rank_draws:
        for key, samples in (draws or {}).items():
            samples_by_draw.setdefault(key, set()).update(samples)
    return samples_by_draw


def _rows_text(samples: Sequence[int], word: str = "rows") -> str:
    """Describe the rows that a draw is for."""
    return "all rows" if ALL_SAMPLES in samples else f"{word} {_runs_text(samples)}"


def _runs_text(numbers: Sequence[int]) -> str:
    """Format sorted numbers as "0-3,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][-1:] = [parts[-1][-1], number] if len(parts[-1]) == 1 else [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def compare_generators(rank_states: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return for each generator 0 if all ranks left it in one state, else 1."""
    first_states = rank_states[0]
    return {
        f"generator {name}": float(
            any(
                name not in states or not torch.equal(states[name], state)
                for states in rank_states[1:]
            )
        )
        for name, state in first_states.items()
    }


# ---- Native draws of training.
# A proof draws masks logically; training draws from this rank's generators. So the proven program
# trains two more steps with native draws, and each draw is recorded: module, samples, part of the
# logical mask, and the first number of its stream. That number must be equal for the same part of a
# mask, on all ranks and in each recomputation, and different for any other part.


STEPS = 2  # the steps must have different masks
REPLICAS = 1e-9  # relative difference between copies of a parameter

Sites = Mapping[tuple[str, int], set[int]]  # (module, call) -> samples


@dataclass(frozen=True)
class RankDraws:
    """One rank's draws: native ones by content, native sites by step, and logical sites."""

    begun: Mapping[Content, set[float]]
    sites: Sequence[Sites]
    logical: Sites


def check_native_draws(program: Program, batch: Batch) -> tuple[int, list[str]] | None:
    """Train two steps with native draws; return the number of masks and their faults, or None.

    None means that no masks are drawn. All ranks must call this together.
    """
    assembly = program.assembly
    logical, native = assembly.dropout, assembly.native
    if native is None or not isinstance(logical, LogicalDropout):
        return None
    logical_rows = logical.noted or {}
    trained = [moment for moment, _, _ in logical_rows if isinstance(moment, int)]
    # a stage may draw nothing, but must train with the others
    if not any(world.all_gather_object(bool(trained))):
        return None
    recorder, first_step = DrawRecorder(native, logical), program.step
    program.assembly, program.follow_inputs = replace(assembly, dropout=native), False
    keep_output, program.keep_output = program.keep_output, False  # not needed
    try:
        for _ in range(STEPS):
            with ExitStack() as stack:
                stack.enter_context(recorder.record_draws())
                program.train_step(with_leaf_tensors(batch, grad=False))
    finally:
        program.assembly, program.keep_output = assembly, keep_output
    recorded, step = recorder.noted, min(trained, default=None)
    expected = {
        (site, call): set(rows) for (k, site, call), rows in logical_rows.items() if k == step
    }
    own_draws = RankDraws(
        recorded.begun, [_sites_of_step(recorded, first_step + k) for k in range(STEPS)], expected
    )
    problems = describe_wrong_draws(world.all_gather_object(own_draws))
    copies = program.replica_errors()
    problems += [
        f"copies of `{name}` on different ranks differ"
        for name, error in copies.items()
        if not error <= REPLICAS
    ]
    return len(recorded.begun), problems


def _sites_of_step(noted: RecordedDraws, step: int) -> Sites:
    return {(site, call): rows for (k, site, call), rows in noted.shapes.items() if k == step}


def describe_wrong_draws(rank_draws: Sequence[RankDraws]) -> list[str]:
    """Describe what is wrong with the native draws of all ranks."""
    return [*_wrong_places(rank_draws), *_wrong_streams(rank_draws)]


def _wrong_places(rank_draws: Sequence[RankDraws]) -> Iterator[str]:
    """Yield draws that a rank makes in training but not in the proof, or the reverse."""
    for rank, draws in enumerate(rank_draws):
        for site_rows in draws.sites:
            differing = [
                key
                for key in {**draws.logical, **site_rows}
                if draws.logical.get(key) != site_rows.get(key)
            ]
            for site, call in differing[:1]:
                problem = "not drawn" if (site, call) not in site_rows else "drawn otherwise"
                yield f"`{site or 'model'}` call {call} is {problem} in training, on rank {rank}"


def _wrong_streams(rank_draws: Sequence[RankDraws]) -> Iterator[str]:
    """Yield parts of masks with several streams, and streams with several parts."""
    numbers: dict[Content, dict[float, int]] = {}
    parts: dict[float, tuple[Content, int]] = {}
    for rank, draws in enumerate(rank_draws):
        for content, stream_numbers in draws.begun.items():
            for number in stream_numbers:
                numbers.setdefault(content, {}).setdefault(number, rank)
                parts.setdefault(number, (content, rank))
                other, other_rank = parts[number]
                if other != content:
                    yield (
                        f"{_content_text(content, rank)} draws as"
                        f" {_content_text(other, other_rank)}"
                    )
    for content, ranks_by_number in numbers.items():
        if len(ranks_by_number) > 1:
            ranks = sorted(set(ranks_by_number.values()))
            condition = "when it is computed again" if len(ranks) == 1 else f"on ranks {ranks}"
            yield f"{_content_text(content, ranks[0])} draws otherwise {condition}"


def _content_text(content: Content, rank: int) -> str:
    step, samples, site, call, part_key = content
    rows = _rows_text(samples)
    part: Any = "" if part_key is None else ", a part"
    return f"`{site or 'model'}` call {call}, step {step}, {rows}{part} (rank {rank})"
