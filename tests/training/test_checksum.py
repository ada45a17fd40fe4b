"""Checkpoint checksums: independent of how bytes are split, and sensitive to every damage."""

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
from tests.layouts import index_table, write_index

ROW, BLOCK = 8 * WORDS, 8 * WORDS * ROWS  # bytes
DATA = random.Random(0).randbytes(2 * BLOCK + 3 * ROW + 1003)
EXPECTED = checksum(DATA)
ID = "0123456789abcdef"


def reference_checksum(data: bytes) -> int:
    """Compute the checksum integer by integer, as the module's docstring defines it."""
    words = [
        int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data) & ~7, 8)
    ]
    crc = 0
    for start_word in range(0, len(words), ROWS * WORDS):
        block = words[start_word : start_word + ROWS * WORDS]
        sums = [sum(block[k::WORDS]) % (1 << 64) for k in range(min(WORDS, len(block)))]
        crc = zlib.crc32(b"".join(total.to_bytes(8, "little") for total in sums), crc)
    return zlib.crc32(data[len(data) & ~7 :] + len(data).to_bytes(8, "little"), crc)


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 9, BLOCK - 8, BLOCK, BLOCK + 1, len(DATA)]
)
def test_what_it_is(size: int) -> None:
    """CRC-32 of sums of words 16,376 bytes apart, of the last bytes, and of the length."""
    assert checksum(DATA[:size]) == reference_checksum(DATA[:size])


SIZES = st.integers(0, 40) | st.integers(0, 3 * ROW) | st.integers(0, len(DATA))


@given(st.lists(SIZES, max_size=6), SIZES)
def test_however_it_is_cut(cuts: list[int], size: int) -> None:
    """In one piece or in many, also in empty ones."""
    data, digest = memoryview(DATA)[:size], Checksum()
    ends = [0, *sorted(min(cut, size) for cut in cuts), size]
    for start, end in zip(ends, ends[1:]):
        digest.add(data[start:end])
    assert digest.value == checksum(DATA[:size])


def test_pieces_of_its_own_choice() -> None:
    """It asks for pieces that end at block boundaries."""
    digest, start, sizes = Checksum(), 1003, []
    digest.add(DATA[:start])
    while start < len(DATA):
        sizes.append(digest.piece)
        digest.add(DATA[start : start + sizes[-1]])
        start += sizes[-1]
    assert sizes == [BLOCK - 1003, BLOCK, BLOCK] and digest.value == EXPECTED


@given(st.integers(0, 8 * len(DATA) - 1))
def test_each_flipped_bit(at: int) -> None:
    """A flipped bit at any position changes the checksum."""
    data = bytearray(DATA)
    data[at // 8] ^= 1 << at % 8
    assert checksum(bytes(data)) != EXPECTED


@pytest.mark.parametrize("full", [False, True], ids=["zeros", "ones"])
@pytest.mark.parametrize("bit", range(64))
def test_a_flipped_bit_among_equal_ones(bit: int, full: bool) -> None:
    """Also where the sum of a word carries through all its bits."""
    original = bytes([255 * full]) * (5 * ROW)
    data = bytearray(original)
    data[2 * ROW + bit // 8] ^= 1 << bit % 8
    assert checksum(bytes(data)) != checksum(original)


@given(st.integers(0, len(DATA) - 2), st.integers(2, ROW - 8), st.integers(0, 2**32))
def test_bursts(at: int, length: int, seed: int) -> None:
    """Other bytes in one place, as many as a row has."""
    replacement = random.Random(seed).randbytes(length)
    data = (DATA[:at] + replacement + DATA[at + length :])[: len(DATA)]
    assert data == DATA or checksum(data) != EXPECTED


@given(
    st.sampled_from([8, 64, 256, 512, 4096, 1 << 16]),
    st.integers(0, len(DATA)),
    st.integers(0, len(DATA)),
)
def test_blocks_that_have_changed_places(size: int, one: int, other: int) -> None:
    """Swapped words of one row, swapped disk sectors and pages."""
    count = len(DATA) // size
    one, other = sorted((one % count * size, other % count * size))
    if size < 512:  # near each other
        other = min(one + (other - one) % (ROW - size) // size * size, (count - 1) * size)
    block, other_block = DATA[one : one + size], DATA[other : other + size]
    data = DATA[:one] + other_block + DATA[one + size : other] + block + DATA[other + size :]
    assert one == other or checksum(data) != EXPECTED


def test_sectors_of_equal_words_that_have_changed_places() -> None:
    """Moving a sector of equal words to any other position changes the checksum."""
    sector, count = 512, BLOCK // 512
    original = bytearray(BLOCK)
    original[:sector] = b"\1" * sector
    checksums = {checksum(bytes(original))}
    for k in range(1, count):
        moved = bytearray(BLOCK)
        moved[k * sector : (k + 1) * sector] = b"\1" * sector
        checksums.add(checksum(bytes(moved)))
    assert len(checksums) == count


@pytest.mark.parametrize("by", [1, 8, 64, 512, 4096, ROW, BLOCK])
@pytest.mark.parametrize("at", [0, 100, 5 * ROW, BLOCK])
def test_what_is_zeroed_shifted_or_cut_off(at: int, by: int) -> None:
    """At the beginning, inside, at the end."""
    damaged = [
        DATA[:at] + bytes(by) + DATA[at + by :],
        DATA[:at] + DATA[at + by :],
        DATA[:at] + bytes(by) + DATA[at:-by],
        DATA[:-by],
        DATA + bytes(by),
    ]
    assert EXPECTED not in [checksum(changed) for changed in damaged if changed != DATA]


@pytest.mark.parametrize("size", [8, ROW, 3 * ROW, BLOCK, BLOCK + ROW])
def test_zeros_that_are_cut_off(size: int) -> None:
    """Only the length shows that they are missing."""
    assert checksum(bytes(2 * BLOCK)) != checksum(bytes(2 * BLOCK - size))


def test_folders_of_users() -> None:
    """Checksums that users have stored, now and before, are the same in every version."""
    few, many = random.Random(0).randbytes(5000), random.Random(0).randbytes(3 << 20)
    assert [CHECKSUMS[OLD_CHECKSUM_NAME](data) for data in (few, many)] == [0x19E0FE18, 0xA4E47DCE]
    assert [CHECKSUMS[CHECKSUM_NAME](data) for data in (few, many)] == [SHORT_SUM, LONG_SUM]


SHORT_SUM, LONG_SUM = 0xFFDC6841, 0xC466D313


def make_boxes(numels: list[int]) -> list[boxes.BoxedTensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(n, generator=generator) for n in numels)
    return [boxes.replicated_tensor((f"{k}",), values) for k, values in enumerate(tensors)]


NUMELS = [7, 1 << 19, 130, (1 << 18) + 1, 1 << 18, 1 << 17, 1 << 15, 3, 1]


def write_boxes(
    folder: Path, numels: list[int]
) -> tuple[list[boxes.BoxedTensor], list[Any], bytes]:
    """Write boxes: return them, their places in the file, and the file's bytes."""
    tensors = make_boxes(numels)
    boxes.write_index(folder, ID, [boxes.write_file(folder, ID, 0, tensors, {("a",): {"b": 1}})])
    index = read_index(folder)
    places = [box.place for entry in index.tensors.values() for box in entry.boxes]
    return tensors, [*places, *index.values.values()], (folder / "__0_0.distcp").read_bytes()


def test_boxes_small_and_large(tmp_path: Path) -> None:
    """Stored checksums are those of the bytes in the file, and each flipped bit is reported."""
    tensors, places, data = write_boxes(tmp_path, NUMELS)
    assert len(places) == len(NUMELS) + 1
    assert max(place.length for place in places) > boxes.HELD > boxes.SMALL
    ends = [boxes.HEAD]
    for place in sorted(places, key=lambda place: place.at):
        assert place.at == ends[-1]  # without gaps
        assert place.check == checksum(data[place.at : place.at + place.length])
        ends.append(place.at + place.length)
    index = read_index(tmp_path)
    assert ends[-1] == len(data) == index.lengths["__0_0.distcp"] and index.sums == CHECKSUM_NAME
    boxes.read_parts(tmp_path, index, tensors)
    random_numbers = random.Random(0)
    for place in places[: len(NUMELS)] * 2:
        damaged = bytearray(data)
        damaged[place.at + random_numbers.randrange(place.length)] ^= 1 << random_numbers.randrange(
            8
        )
        (tmp_path / "__0_0.distcp").write_bytes(damaged)
        with pytest.raises(Unreadable, match="checksum"):
            boxes.read_parts(tmp_path, index, tensors)


def test_a_folder_of_before(tmp_path: Path) -> None:
    """An index without a checksum name uses the old checksum, and a flipped bit is reported."""
    tensors, _, data = write_boxes(tmp_path, NUMELS)
    index_rows = index_table(tmp_path)
    rows = [box[2] for entry in index_rows["tensors"].values() for box in entry["boxes"]]
    for row in (*rows, *index_rows["values"].values()):
        row[3] = CHECKSUMS[OLD_CHECKSUM_NAME](data[row[1] : row[1] + row[2]])
    write_index(tmp_path, index_rows, 2)
    index = read_index(tmp_path)
    assert index.sums == OLD_CHECKSUM_NAME
    originals = [tensor.local.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.local.zero_()
    boxes.read_parts(tmp_path, index, tensors)
    assert all(torch.equal(tensor.local, original) for tensor, original in zip(tensors, originals))
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
    """Unknown checksum names are refused; the index is protected by its own."""
    write_boxes(tmp_path, [7])
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
    """The error is raised unchanged, wherever it occurs: in a box, between two, at the end."""
    write_out, count = boxes._Writer._write_out, []

    class Full:
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    def counted(self: boxes._Writer, view: memoryview) -> None:
        count.append(1)
        if len(count) > room:
            self.file = Full()  # type: ignore[assignment]
        write_out(self, view)

    monkeypatch.setattr(boxes._Writer, "_write_out", counted)
    with pytest.raises(OSError, match="No space"):
        boxes.write_file(tmp_path, ID, 0, make_boxes(numels), {("a",): {"b": 1}})
