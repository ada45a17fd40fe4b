"""The checksum of stored boxes: the same however bytes are cut, another for other bytes."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedlang.runtime.checkpointing import boxes
from schedlang.runtime.checkpointing.boxes import Checksum, checksum
from schedlang.runtime.checkpointing.index import Unreadable, read_index

DATA = random.Random(0).randbytes(5000)
ID = "0123456789abcdef"


@given(st.lists(st.integers(0, len(DATA))), st.integers(0, len(DATA)))
def test_however_it_is_cut(cuts: list[int], size: int) -> None:
    """In one piece or in many, also in pieces of nothing."""
    data, made = DATA[:size], Checksum()
    ends = [0, *sorted(min(cut, size) for cut in cuts), size]
    for low, high in zip(ends, ends[1:]):
        made.add(memoryview(data)[low:high])
    assert made.value == checksum(data)


@given(st.integers(0, 8 * len(DATA) - 1))
def test_each_flipped_bit(at: int) -> None:
    """Wherever it is."""
    data = bytearray(DATA)
    data[at // 8] ^= 1 << at % 8
    assert checksum(bytes(data)) != checksum(DATA)


@pytest.mark.parametrize("low, high", [(0, 512), (512, 1024), (4608, 5000), (100, 612)])
def test_what_is_zeroed_moved_or_cut_off(low: int, high: int) -> None:
    """Of a sector, of the end, and across two."""
    others = [
        DATA[:low] + bytes(high - low) + DATA[high:],
        DATA[:low] + DATA[high:],
        DATA[low:high] + DATA[:low] + DATA[high:],
        DATA[:low],
    ]
    for other in others:
        assert other == DATA or checksum(other) != checksum(DATA)


def test_folders_of_before() -> None:
    """What is stored in the folders of today's users: the same in every version."""
    assert checksum(DATA) == 0x19E0FE18
    assert checksum(random.Random(0).randbytes(3 << 20)) == 0xA4E47DCE


def _boxes(numels: list[int]) -> list[boxes.Boxed]:
    made = torch.Generator().manual_seed(0)
    return [boxes.whole((f"{k}",), torch.randn(n, generator=made)) for k, n in enumerate(numels)]


def test_large_boxes(tmp_path: Path) -> None:
    """Large ones are summed beside: the sums of the bytes in the file, each flip told."""
    tensors = _boxes([7, 1 << 19, 130, (1 << 18) + 1, 1 << 18])
    boxes.indexed(tmp_path, ID, [boxes.write(tmp_path, ID, 0, tensors, {("a",): {"b": 1}})])
    index = read_index(tmp_path)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    places = [box.place for entry in index.tensors.values() for box in entry.boxes]
    assert len(places) == 5 and max(place.length for place in places) > 2 * boxes.BESIDE
    for place in [*places, *index.values.values()]:
        assert place.check == checksum(data[place.at : place.at + place.length])
    boxes.read(tmp_path, index, tensors)
    drawn = random.Random(0)
    for place in places[:2] * 5:
        damaged = bytearray(data)
        damaged[place.at + drawn.randrange(place.length)] ^= 1 << drawn.randrange(8)
        (tmp_path / "__0_0.distcp").write_bytes(damaged)
        with pytest.raises(Unreadable, match="checksum"):
            boxes.read(tmp_path, index, tensors)


def test_a_disk_that_is_full_in_a_large_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, and what is summed beside is waited for: its memory may be gone then."""
    summed: list[int] = []

    class Slow(Checksum):
        def add(self, data: object) -> None:
            time.sleep(0.05)
            super().add(data)
            summed.append(1)

    class Full:
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

        def tell(self) -> int:
            return 0

    monkeypatch.setattr(boxes, "Checksum", Slow)
    with boxes.ThreadPoolExecutor(1) as beside:
        seen = boxes._Checked(Full(), beside)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="No space"):
            seen.write(bytes(boxes.BESIDE))
        assert summed
