"""What checksums cost a save and a load: python -m tests.benchmarks.saving FOLDER [--mib N]

The same boxes are written and read in turns: as they are, without any checksum, and with those
that torch.save computes by itself, which nobody looks at; boxes of several sizes, of N MiB
together.  Then `program.save` of GPT-2 (small, `--layers` of it) with AdamW, in turns with and
without checksums.  Medians of seconds, fsync included, and of processor seconds, and their
ratios.  On a machine that is busy with other things the clock tells more of these than of
checksums: what they add is told as processor seconds, too, beside the seconds that a save without
them takes.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils.serialization import config

import schedlang
from schedlang.runtime.checkpointing import boxes
from schedlang.runtime.checkpointing.index import Index, read_index

ID = "0123456789abcdef"


class _None:
    """No checksum."""

    value, piece = 0, boxes.Checksum().piece

    def add(self, data: Any) -> None:
        """Nothing is computed."""


def timed(act: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and those of the processor."""
    start, spent = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - spent


def saved(
    folder: Path, tensors: list[boxes.BoxedTensor], sums: Any, torchs: bool
) -> tuple[float, float]:
    """Seconds of a save."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = {"save.compute_crc32": torchs}
    chosen = SimpleNamespace(patch=lambda _: config.patch(options))  # type: ignore[attr-defined]
    with mock.patch.object(boxes, "Checksum", sums), mock.patch.object(boxes, "config", chosen):
        return timed(
            lambda: boxes.write_index(folder, ID, [boxes.write_file(folder, ID, 0, tensors, {})])
        )


def loaded(folder: Path, tensors: list[boxes.BoxedTensor], looked_at: bool) -> tuple[float, float]:
    """Seconds of a load."""

    def act() -> None:
        index = read_index(folder)
        boxes.read_parts(folder, index if looked_at else _unchecked(index), tensors)

    return timed(act)


def _unchecked(index: Index) -> Index:
    """The index without checksums."""
    return replace(
        index,
        tensors={
            key: replace(
                entry,
                boxes=tuple(
                    replace(box, place=replace(box.place, check=None)) for box in entry.boxes
                ),
            )
            for key, entry in index.tensors.items()
        },
    )


def main() -> None:
    """Measure, in turns."""
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--mib", type=int, default=256)
    options.add_argument(
        "--boxes", type=float, nargs="+", default=[0.25, 4, 64], help="MiB of each"
    )
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--layers", type=int, default=4)
    asked = options.parse_args()
    torch.set_num_threads(1)
    for mib in asked.boxes:
        count = max(1, int(asked.mib / mib))
        print(f"\n{count} boxes of {mib:g} MiB")
        each = int(mib * (1 << 18))
        tensors = [boxes.replicated_tensor((f"layer{k}",), torch.randn(each)) for k in range(count)]
        compared(asked.folder / "saving", tensors, asked.turns)
    of_a_program(asked.folder / "saving", asked.layers, asked.turns)


def compared(folder: Path, tensors: list[boxes.BoxedTensor], turns: int) -> None:
    """Save and load these in turns, and print what it takes."""
    ways = {
        "as it is": (boxes.Checksum, False),
        "none": (_None, False),
        "torch's own": (_None, True),
    }
    times: dict[str, list[tuple[float, float]]] = {}
    for turn in range(turns + 1):
        for name, (sums, torchs) in ways.items():
            took = saved(folder, tensors, sums, torchs)
            times.setdefault(f"save, {name}", []).extend([took] * bool(turn))
        saved(folder, tensors, boxes.Checksum, False)
        for name, looked_at in (("as it is", True), ("none", False)):
            took = loaded(folder, tensors, looked_at)
            times.setdefault(f"load, {name}", []).extend([took] * bool(turn))
    shutil.rmtree(folder)
    for name, every in times.items():
        wall, spent = (median(one[k] for one in every) for k in range(2))
        base = [median(one[k] for one in times[f"{name[:4]}, none"]) for k in range(2)]
        print(
            f"{name:18} {wall:6.3f} s {wall / base[0]:5.2f} of none; "
            f"processor {spent:6.3f} s {spent / base[1]:5.2f} of none"
        )
    for what in ("save", "load"):
        told(what, list(zip(times[f"{what}, as it is"], times[f"{what}, none"])))


def of_a_program(folder: Path, layers: int, turns: int) -> None:
    """Save a program of one rank in turns with and without checksums, and print what they add."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers))
    mib = 12 * sum(p.numel() for p in model.parameters()) / (1 << 20)
    program = schedlang.create_schedule(model).build(
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named])
    )
    ids = torch.randint(0, 50257, (2, 16))
    program.train_step({"input_ids": ids, "labels": ids})
    pairs = []
    for turn in range(turns + 1):
        took = []
        for sums in (boxes.Checksum, _None):
            shutil.rmtree(folder, ignore_errors=True)
            with mock.patch.object(boxes, "Checksum", sums):
                took.append(timed(lambda: program.save(folder)))
        pairs.extend([(took[0], took[1])] * bool(turn))
    shutil.rmtree(folder)
    print(f"\nprogram.save, {layers} layers of GPT-2 and AdamW, {mib:.0f} MiB")
    told("save", pairs)


def told(what: str, pairs: list[tuple[tuple[float, float], tuple[float, float]]]) -> None:
    """Print what checksums add, of pairs of turns: seconds, and those of the processor."""
    more = median(one[1] - other[1] for one, other in pairs)
    least, usual = (of(other[0] for _, other in pairs) for of in (min, median))
    low, middle, high = quantiles((one[0] / other[0] - 1 for one, other in pairs), n=4)
    print(
        f"{what}: checksums add {more * 1e3:.1f} ms of a processor, {more / usual:.1%} of what "
        f"one without takes by the clock ({more / least:.1%} of the quickest); by the clock "
        f"itself {middle:.1%} (quarters at {low:.1%} and {high:.1%})"
    )


if __name__ == "__main__":
    main()
