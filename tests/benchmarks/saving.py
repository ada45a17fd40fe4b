"""Cost of checksums in save and load: python -m tests.benchmarks.saving FOLDER [--mib N]

The same boxes are written and read alternately: with schedlang's checksums, without any, and with
those that torch.save computes, which nobody verifies; boxes of several sizes, N MiB in total.
Then `program.save` of a small GPT-2 (`--layers`) with AdamW, alternately with and without
checksums.  Printed are medians of wall seconds (with fsync) and CPU seconds, and their ratios.
Wall time on a busy machine is noisy, so the added CPU time is also printed relative to the time
of a save without checksums.
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


class _NoChecksum:
    """No checksum."""

    value, piece = 0, boxes.Checksum().piece

    def add(self, data: Any) -> None:
        """Do nothing."""


def timed(act: Callable[[], None]) -> tuple[float, float]:
    """Return wall and CPU seconds of a call."""
    start, spent = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - spent


def timed_save(
    folder: Path, tensors: list[boxes.BoxedTensor], sums: Any, torchs: bool
) -> tuple[float, float]:
    """Return wall and CPU seconds of a save."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = {"save.compute_crc32": torchs}
    patched_config = SimpleNamespace(patch=lambda _: config.patch(options))  # type: ignore[attr-defined]
    with (
        mock.patch.object(boxes, "Checksum", sums),
        mock.patch.object(boxes, "config", patched_config),
    ):
        return timed(
            lambda: boxes.write_index(folder, ID, [boxes.write_file(folder, ID, 0, tensors, {})])
        )


def timed_load(
    folder: Path, tensors: list[boxes.BoxedTensor], looked_at: bool
) -> tuple[float, float]:
    """Return wall and CPU seconds of a load."""

    def act() -> None:
        index = read_index(folder)
        boxes.read_parts(folder, index if looked_at else _unchecked(index), tensors)

    return timed(act)


def _unchecked(index: Index) -> Index:
    """Return the index without checksums."""
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
    """Run all measurements."""
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--mib", type=int, default=256)
    options.add_argument(
        "--boxes", type=float, nargs="+", default=[0.25, 4, 64], help="MiB of each"
    )
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--layers", type=int, default=4)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    for mib in arguments.boxes:
        count = max(1, int(arguments.mib / mib))
        print(f"\n{count} boxes of {mib:g} MiB")
        numel = int(mib * (1 << 18))
        tensors = [
            boxes.replicated_tensor((f"layer{k}",), torch.randn(numel)) for k in range(count)
        ]
        compare(arguments.folder / "saving", tensors, arguments.turns)
    compare_programs(arguments.folder / "saving", arguments.layers, arguments.turns)


def compare(folder: Path, tensors: list[boxes.BoxedTensor], rounds: int) -> None:
    """Save and load tensors with each kind of checksum alternately, and print the times."""
    variants = {
        "as it is": (boxes.Checksum, False),
        "none": (_NoChecksum, False),
        "torch's own": (_NoChecksum, True),
    }
    times: dict[str, list[tuple[float, float]]] = {}
    for round_ in range(rounds + 1):
        for name, (sums, torchs) in variants.items():
            seconds = timed_save(folder, tensors, sums, torchs)
            times.setdefault(f"save, {name}", []).extend([seconds] * bool(round_))
        timed_save(folder, tensors, boxes.Checksum, False)
        for name, looked_at in (("as it is", True), ("none", False)):
            seconds = timed_load(folder, tensors, looked_at)
            times.setdefault(f"load, {name}", []).extend([seconds] * bool(round_))
    shutil.rmtree(folder)
    for name, values in times.items():
        wall, spent = (median(value[k] for value in values) for k in range(2))
        base = [median(value[k] for value in times[f"{name[:4]}, none"]) for k in range(2)]
        print(
            f"{name:18} {wall:6.3f} s {wall / base[0]:5.2f} of none; "
            f"processor {spent:6.3f} s {spent / base[1]:5.2f} of none"
        )
    for operation in ("save", "load"):
        print_ratio(
            operation, list(zip(times[f"{operation}, as it is"], times[f"{operation}, none"]))
        )


def compare_programs(folder: Path, layers: int, rounds: int) -> None:
    """Save a one-rank program alternately with and without checksums, and print the difference."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers))
    mib = 12 * sum(p.numel() for p in model.parameters()) / (1 << 20)
    program = schedlang.create_schedule(model).build(
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named])
    )
    ids = torch.randint(0, 50257, (2, 16))
    program.train_step({"input_ids": ids, "labels": ids})
    pairs = []
    for round_ in range(rounds + 1):
        seconds = []
        for sums in (boxes.Checksum, _NoChecksum):
            shutil.rmtree(folder, ignore_errors=True)
            with mock.patch.object(boxes, "Checksum", sums):
                seconds.append(timed(lambda: program.save(folder)))
        pairs.extend([(seconds[0], seconds[1])] * bool(round_))
    shutil.rmtree(folder)
    print(f"\nprogram.save, {layers} layers of GPT-2 and AdamW, {mib:.0f} MiB")
    print_ratio("save", pairs)


def print_ratio(label: str, pairs: list[tuple[tuple[float, float], tuple[float, float]]]) -> None:
    """Print what checksums add, from pairs of rounds: wall and CPU seconds."""
    added = median(with_sums[1] - without[1] for with_sums, without in pairs)
    fastest, usual = (statistic(without[0] for _, without in pairs) for statistic in (min, median))
    lower, middle, upper = quantiles(
        (with_sums[0] / without[0] - 1 for with_sums, without in pairs), n=4
    )
    print(
        f"{label}: checksums add {added * 1e3:.1f} ms of a processor, {added / usual:.1%} of what "
        f"one without takes by the clock ({added / fastest:.1%} of the quickest); by the clock "
        f"itself {middle:.1%} (quarters at {lower:.1%} and {upper:.1%})"
    )


if __name__ == "__main__":
    main()
