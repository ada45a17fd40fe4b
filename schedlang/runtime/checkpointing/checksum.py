"""The checksum of a stored box: the CRC-32 of sums of its words, as quick as memory is read.

Bytes are taken as 64-bit words, in rows of 2047; the rows of 64 at a time are added up, and the CRC
is of these sums, of the bytes behind the last word, and of the length.  So a CRC is computed of a
64th of the bytes only, and the rest is additions, which a processor makes of what lies in its cache
more quickly than it can be fetched: computed of bytes that are copied next, it costs next to
nothing, without a thread of its own.

What it finds: two words that are added lie 16,376 bytes apart, or a multiple of that.  So damage of
less than that, one bit or many, words that have changed places among them, changes sums for
certain, whatever the other bytes are.  And sectors of 512 bytes that have changed places were never
added up in the same places, since 64 rows are the first that are whole sectors long: their sums
change, too, as those of zeroed and of shifted bytes do.  The CRC tells changed sums for certain
where they are 32 bits or fewer in one place, of others all but one of 2**32.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

ROWS, WORDS = 64, 2047  # of a block: so many rows are added up, of so many words
_BLOCK = ROWS * WORDS
_WORD = np.dtype("<i8")
_NONE = np.zeros(0, _WORD)


class Checksum:
    """Of bytes that come in pieces, however they are cut."""

    def __init__(self) -> None:
        self.crc, self.length, self.rest = 0, 0, b""  # the rest is less than a word
        self.sums, self.at = _NONE, 0  # of so many words of a block

    def add(self, data: Any) -> None:
        """More bytes."""
        view = memoryview(data).cast("B")
        self.length += len(view)
        if self.rest:
            missing = _WORD.itemsize - len(self.rest)
            self.rest, view = self.rest + bytes(view[:missing]), view[missing:]
            if len(self.rest) < _WORD.itemsize:
                return
            self._words(np.frombuffer(self.rest, _WORD))
        whole = len(view) // _WORD.itemsize * _WORD.itemsize
        self.rest = bytes(view[whole:])
        self._words(np.frombuffer(view[:whole], _WORD))

    @property
    def value(self) -> int:
        """The checksum of all bytes so far."""
        crc = zlib.crc32(self.sums[: self.at].data, self.crc)
        return zlib.crc32(self.rest + self.length.to_bytes(8, "little"), crc)

    @property
    def piece(self) -> int:
        """So many bytes more are quickest to add: to the end of a block."""
        return (_BLOCK - self.at) * _WORD.itemsize - len(self.rest)

    def _words(self, words: Any) -> None:
        while len(words):
            column = self.at % WORDS
            if column or len(words) < WORDS:
                took = min(WORDS - column, len(words))
                if not self.at:
                    self.sums = np.zeros(WORDS, _WORD)
                self.sums[column : column + took] += words[:took]
            else:
                took = min(_BLOCK - self.at, len(words) // WORDS * WORDS)
                sums = np.add.reduce(words[:took].reshape(-1, WORDS), 0)
                self.sums = self.sums + sums if self.at else sums
            self.at, words = self.at + took, words[took:]
            if self.at == _BLOCK:
                self.crc, self.at = zlib.crc32(self.sums.data, self.crc), 0


def checksum(data: bytes) -> int:
    """The checksum of these bytes."""
    made = Checksum()
    made.add(data)
    return made.value


def _sums_of_each_512(data: bytes) -> int:
    """What folders of before have: two words of the same 512 bytes may change places unseen."""
    whole = len(data) // 512 * 512
    words = np.frombuffer(data, np.int64, whole // 8).reshape(-1, 64)
    return zlib.crc32(data[whole:], zlib.crc32(np.einsum("ij->i", words).data))


NAME = "crc32 of sums of words 16376 bytes apart"
BEFORE = "crc32 of sums of each 512 bytes"  # of folders that name none
BY_NAME: dict[str, Callable[[bytes], int]] = {NAME: checksum, BEFORE: _sums_of_each_512}
