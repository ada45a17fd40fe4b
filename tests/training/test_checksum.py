"""The checksum of stored boxes: the same however bytes are cut, another for other bytes."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedlang.runtime.checkpointing import boxes
from schedlang.runtime.checkpointing.index import (
    CHECKSUM_NAME,
    CHECKSUMS,
    OLD_CHECKSUM_NAME,
    ROWS,
    WORDS,
    Checksum,
    Unreadable,
    checksum,
    read_index,
)
from tests.layouts import index_of, write_index

ROW, BLOCK = 8 * WORDS, 8 * WORDS * ROWS  # bytes
DATA = random.Random(0).randbytes(2 * BLOCK + 3 * ROW + 1003)
KNOWN = checksum(DATA)
ID = "0123456789abcdef"


def _plainly(data: bytes) -> int:
    """The same by one integer after the other, as the file's first lines say it."""
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) & ~7, 8)]
    crc = 0
    for low in range(0, len(words), ROWS * WORDS):
        block = words[low : low + ROWS * WORDS]
        sums = [sum(block[k::WORDS]) % (1 << 64) for k in range(min(WORDS, len(block)))]
        crc = zlib.crc32(b"".join(one.to_bytes(8, "little") for one in sums), crc)
    return zlib.crc32(data[len(data) & ~7 :] + len(data).to_bytes(8, "little"), crc)


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 9, BLOCK - 8, BLOCK, BLOCK + 1, len(DATA)]
)
def test_what_it_is(size: int) -> None:
    """CRC-32 of sums of words that lie 16,376 bytes apart, of the last bytes, and of the length."""
    assert checksum(DATA[:size]) == _plainly(DATA[:size])


SIZES = st.integers(0, 40) | st.integers(0, 3 * ROW) | st.integers(0, len(DATA))


@given(st.lists(SIZES, max_size=6), SIZES)
def test_however_it_is_cut(cuts: list[int], size: int) -> None:
    """In one piece or in many, also in pieces of nothing."""
    data, made = memoryview(DATA)[:size], Checksum()
    ends = [0, *sorted(min(cut, size) for cut in cuts), size]
    for low, high in zip(ends, ends[1:]):
        made.add(data[low:high])
    assert made.value == checksum(DATA[:size])


def test_pieces_of_its_own_choice() -> None:
    """As it wants them: after the first, each a whole block."""
    made, at, sizes = Checksum(), 1003, []
    made.add(DATA[:at])
    while at < len(DATA):
        sizes.append(made.piece)
        made.add(DATA[at : at + sizes[-1]])
        at += sizes[-1]
    assert sizes == [BLOCK - 1003, BLOCK, BLOCK] and made.value == KNOWN


@given(st.integers(0, 8 * len(DATA) - 1))
def test_each_flipped_bit(at: int) -> None:
    """Wherever it is."""
    data = bytearray(DATA)
    data[at // 8] ^= 1 << at % 8
    assert checksum(bytes(data)) != KNOWN


@pytest.mark.parametrize("full", [False, True], ids=["zeros", "ones"])
@pytest.mark.parametrize("bit", range(64))
def test_a_flipped_bit_among_equal_ones(bit: int, full: bool) -> None:
    """Also where the sum of a word carries through all its bits."""
    plain = bytes([255 * full]) * (5 * ROW)
    data = bytearray(plain)
    data[2 * ROW + bit // 8] ^= 1 << bit % 8
    assert checksum(bytes(data)) != checksum(plain)


@given(st.integers(0, len(DATA) - 2), st.integers(2, ROW - 8), st.integers(0, 2**32))
def test_bursts(at: int, length: int, seed: int) -> None:
    """Other bytes in one place, as many as a row has."""
    other = random.Random(seed).randbytes(length)
    data = (DATA[:at] + other + DATA[at + length :])[: len(DATA)]
    assert data == DATA or checksum(data) != KNOWN


@given(
    st.sampled_from([8, 64, 256, 512, 4096, 1 << 16]),
    st.integers(0, len(DATA)),
    st.integers(0, len(DATA)),
)
def test_blocks_that_have_changed_places(size: int, one: int, other: int) -> None:
    """Words of one row, sectors and pages of a disk anywhere."""
    count = len(DATA) // size
    one, other = sorted((one % count * size, other % count * size))
    if size < 512:  # near each other
        other = min(one + (other - one) % (ROW - size) // size * size, (count - 1) * size)
    first, second = DATA[one : one + size], DATA[other : other + size]
    data = DATA[:one] + second + DATA[one + size : other] + first + DATA[other + size :]
    assert one == other or checksum(data) != KNOWN


def test_sectors_of_equal_words_that_have_changed_places() -> None:
    """No two sectors whose words are alike are added up in the same places: each against each."""
    sector, count = 512, BLOCK // 512
    plain = bytearray(BLOCK)
    plain[:sector] = b"\1" * sector
    seen = {checksum(bytes(plain))}
    for k in range(1, count):
        moved = bytearray(BLOCK)
        moved[k * sector : (k + 1) * sector] = b"\1" * sector
        seen.add(checksum(bytes(moved)))
    assert len(seen) == count


@pytest.mark.parametrize("by", [1, 8, 64, 512, 4096, ROW, BLOCK])
@pytest.mark.parametrize("at", [0, 100, 5 * ROW, BLOCK])
def test_what_is_zeroed_shifted_or_cut_off(at: int, by: int) -> None:
    """At the beginning, inside, at the end."""
    others = [
        DATA[:at] + bytes(by) + DATA[at + by :],
        DATA[:at] + DATA[at + by :],
        DATA[:at] + bytes(by) + DATA[at:-by],
        DATA[:-by],
        DATA + bytes(by),
    ]
    assert KNOWN not in [checksum(other) for other in others if other != DATA]


@pytest.mark.parametrize("size", [8, ROW, 3 * ROW, BLOCK, BLOCK + ROW])
def test_zeros_that_are_cut_off(size: int) -> None:
    """Nothing but the length tells of them."""
    assert checksum(bytes(2 * BLOCK)) != checksum(bytes(2 * BLOCK - size))


def test_folders_of_users() -> None:
    """What is stored there, today and before: the same in every version."""
    few, many = random.Random(0).randbytes(5000), random.Random(0).randbytes(3 << 20)
    assert [CHECKSUMS[OLD_CHECKSUM_NAME](data) for data in (few, many)] == [0x19E0FE18, 0xA4E47DCE]
    assert [CHECKSUMS[CHECKSUM_NAME](data) for data in (few, many)] == [FEW, MANY]


FEW, MANY = 0xFFDC6841, 0xC466D313


def _boxes(numels: list[int]) -> list[boxes.BoxedTensor]:
    made = torch.Generator().manual_seed(0)
    drawn = (torch.randn(n, generator=made) for n in numels)
    return [boxes.replicated_tensor((f"{k}",), values) for k, values in enumerate(drawn)]


SOME = [7, 1 << 19, 130, (1 << 18) + 1, 1 << 18, 1 << 17, 1 << 15, 3, 1]


def _written(folder: Path, numels: list[int]) -> tuple[list[boxes.BoxedTensor], list[Any], bytes]:
    """Boxes in a folder, their places in the file, and the file."""
    tensors = _boxes(numels)
    boxes.write_index(folder, ID, [boxes.write_file(folder, ID, 0, tensors, {("a",): {"b": 1}})])
    index = read_index(folder)
    places = [box.place for entry in index.tensors.values() for box in entry.boxes]
    return tensors, [*places, *index.values.values()], (folder / "__0_0.distcp").read_bytes()


def test_boxes_small_and_large(tmp_path: Path) -> None:
    """Gathered or written as they are: the sums of the bytes in the file, each flip told."""
    tensors, places, data = _written(tmp_path, SOME)
    assert len(places) == len(SOME) + 1
    assert max(place.length for place in places) > boxes.HELD > boxes.SMALL
    ends = [boxes.HEAD]
    for place in sorted(places, key=lambda place: place.at):
        assert place.at == ends[-1]  # one after the other
        assert place.check == checksum(data[place.at : place.at + place.length])
        ends.append(place.at + place.length)
    index = read_index(tmp_path)
    assert ends[-1] == len(data) == index.lengths["__0_0.distcp"] and index.sums == CHECKSUM_NAME
    boxes.read_parts(tmp_path, index, tensors)
    drawn = random.Random(0)
    for place in places[: len(SOME)] * 2:
        damaged = bytearray(data)
        damaged[place.at + drawn.randrange(place.length)] ^= 1 << drawn.randrange(8)
        (tmp_path / "__0_0.distcp").write_bytes(damaged)
        with pytest.raises(Unreadable, match="checksum"):
            boxes.read_parts(tmp_path, index, tensors)


def test_a_folder_of_before(tmp_path: Path) -> None:
    """Its index names no checksums: those of before are meant, and each flip is told."""
    tensors, _, data = _written(tmp_path, SOME)
    found = index_of(tmp_path)
    rows = [box[2] for entry in found["tensors"].values() for box in entry["boxes"]]
    for row in (*rows, *found["values"].values()):
        row[3] = CHECKSUMS[OLD_CHECKSUM_NAME](data[row[1] : row[1] + row[2]])
    write_index(tmp_path, found, 2)
    index = read_index(tmp_path)
    assert index.sums == OLD_CHECKSUM_NAME
    kept = [tensor.local.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.local.zero_()
    boxes.read_parts(tmp_path, index, tensors)
    assert all(torch.equal(tensor.local, one) for tensor, one in zip(tensors, kept))
    assert boxes.read_value(tmp_path, index, ("a",)) == {"b": 1}
    damaged = bytearray(data)
    damaged[rows[1][1] + 5000] ^= 1
    (tmp_path / "__0_0.distcp").write_bytes(damaged)
    with pytest.raises(Unreadable, match="checksum"):
        boxes.read_parts(tmp_path, index, tensors)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (b'"crc32 of all bytes"', "`crc32 of all bytes`, which this schedlang does not know"),
        (f'"{OLD_CHECKSUM_NAME}"'.encode(), "its checksum does not match"),
    ],
)
def test_checksums_of_another_name(tmp_path: Path, change: bytes, told: str) -> None:
    """Unknown ones are refused, and the index is sure of the name that it gives."""
    _written(tmp_path, [7])
    path = tmp_path / "schedlang.json"
    path.write_bytes(path.read_bytes().replace(f'"{CHECKSUM_NAME}"'.encode(), change))
    with pytest.raises(Unreadable, match=told):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("numels", "room"),
    [([1 << 19], k) for k in range(5)] + [([1 << 10] * 300, 0), ([1 << 10] * 300, 1), ([4], 0)],
)
def test_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numels: list[int], room: int
) -> None:
    """It is told as it is, wherever it is met: in a box, between two, at the end."""
    out, count = boxes._Writer._write_out, []

    class Full:
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    def counted(self: boxes._Writer, view: memoryview) -> None:
        count.append(1)
        if len(count) > room:
            self.file = Full()  # type: ignore[assignment]
        out(self, view)

    monkeypatch.setattr(boxes._Writer, "_write_out", counted)
    with pytest.raises(OSError, match="No space"):
        boxes.write_file(tmp_path, ID, 0, _boxes(numels), {("a",): {"b": 1}})
