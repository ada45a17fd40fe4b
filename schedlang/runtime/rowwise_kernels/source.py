"""The Triton text of a chain: one program takes some rows, and all of it in one pass if they fit.

Rows that are longer than a block are read once for each reduction that waits for another one, and
once more for the results; sums over rows then lie in memory, one row for each program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from schedlang.runtime.rowwise_kernels.chain import HELPERS, Chain, Value

TYPES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}
_EMPTY = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}


def source(chain: Chain, rounding: str, *, looped: bool) -> str:
    """The text of a module with one kernel, `kernel`.

    looped: rows are longer than a block.  rounding "eager": every value is rounded to the type that
    it has in the model.  Arguments: tensors given, stored and summed, the number of rows and their
    size, the strides of the rows of each tensor given, and how many tiles of rows a program takes.
    """
    return _Writer(chain, rounding).text(looped)


def passes(chain: Chain) -> int:
    """Count the passes over a row of several blocks."""
    ends = [s.value for s in chain.stored] + [s.value.operands[0] for s in chain.sums]
    return 1 + max((_level(value) for value in ends), default=0)


class _Writer:
    def __init__(self, chain: Chain, rounding: str) -> None:
        self.chain, self.rounding = chain, rounding
        self.lines: list[str] = []
        self.depth = 1
        self.done: set[Value] = set()

    def text(self, looped: bool) -> str:
        """The whole text."""
        chain = self.chain
        names = [
            *(f"a{v.place}" for v in chain.given),
            *(f"o{n}" for n in range(len(chain.stored))),
            *(f"c{n}" for n in range(len(chain.sums))),
            "rows",
            "size",
            *(f"a{v.place}_stride" for v in chain.given if v.rows and v.cols),
            "tiles",
            "ROWS: tl.constexpr",
            "BLOCK: tl.constexpr",
        ]
        self._say("program = tl.program_id(0).to(tl.int64)")
        (self._looped if looped else self._whole)()
        head = f"@triton.jit\ndef kernel(\n    {', '.join(names)},\n):\n"
        body = "".join(f"{line}\n" for line in self.lines)
        called = [name for name in HELPERS if re.search(rf"\b{name}\(", body)]
        used = [f"@triton.jit\ndef {name}(x):\n{HELPERS[name]}\n\n" for name in called]
        return f"import triton\nimport triton.language as tl\n\n\n{''.join(used)}{head}{body}"

    def _say(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    # rows that are one block

    def _whole(self) -> None:
        self._column("0")
        for value in self._needed(self._ends()):  # what is the same for all rows, once
            if not value.rows:
                self._value(value)
        for place, one in enumerate(self.chain.sums):
            shape = "(1, BLOCK)" if one.value.cols else "(1, 1)"
            self._say(f"t{place} = tl.zeros({shape}, tl.float32)")
        self._say("for tile in range(tiles):")
        self.depth += 1
        self._rows()
        self._say("inside = live & within")
        for value in self._needed(self._ends()):
            self._value(value)
        for place, one in enumerate(self.chain.sums):
            self._say(f"t{place} += {self._over_rows(one.value)}")
        for place in range(len(self.chain.stored)):
            self._store(place)
        self.depth -= 1
        for place, one in enumerate(self.chain.sums):
            if one.value.cols:
                self._say(f"tl.store(c{place} + program * size + column, t{place}, mask=within)")
            else:
                self._say(f"tl.store(c{place} + program + tl.zeros((1, 1), tl.int32), t{place})")

    # rows of several blocks

    def _looped(self) -> None:
        self._say("for tile in range(tiles):")
        self.depth += 1
        self._rows()
        reductions = [v for v in self._needed(self._ends()) if v.how == "row"]
        for level in range(1, max((_level(v) for v in reductions), default=0) + 1):
            self._pass([v for v in reductions if _level(v) == level])
        self._last()
        self.depth -= 1

    def _pass(self, reductions: Sequence[Value]) -> None:
        """Read the rows once for reductions that wait for nothing but earlier ones."""
        self._alone(reductions)
        for value in reductions:
            self._say(
                f"{value.name}_part = tl.full((ROWS, BLOCK), {_EMPTY[value.text]}, tl.float32)"
            )
        with_blocks = self._blocks([v.operands[0] for v in reductions])
        for value in reductions:
            said = f"tl.where(inside, {value.operands[0].name}, {_EMPTY[value.text]})"
            name = f"{value.name}_part"
            if value.text == "sum":
                self._say(f"{name} += {said}")
            else:
                larger = ">" if value.text == "max" else "<"
                self._say(f"{value.name}_new = {said}")
                new = f"{value.name}_new"
                better = f"({new} != {new}) | ({new} {larger} {name})"
                self._say(f"{name} = tl.where({better}, {new}, {name})")
        self.depth -= with_blocks
        for value in reductions:
            self._say(
                f"{value.name} = {self._rounded(_reduced(value, f'{value.name}_part'), value)}"
            )
            self.done.add(value)

    def _alone(self, wanted: Iterable[Value]) -> None:
        """Return the values without columns that are known before a pass over the rows."""
        for value in self._needed(wanted):
            known = all(v in self.done for v in value.operands)
            if known and not value.cols and value.how != "row":
                self._value(value)

    def _blocks(self, wanted: Sequence[Value]) -> int:
        """The head of a loop over blocks, and what is wanted in it."""
        self._say("for start in range(0, size, BLOCK):")
        self.depth += 1
        self._column("start")
        self._say("inside = live & within")
        outside = set(self.done)
        for value in self._needed(wanted):
            self._value(value)
        self.done = outside
        return 1

    def _last(self) -> None:
        """Read the rows for the results."""
        sums = [one.value for one in self.chain.sums]
        self._alone([*self._ends()])
        within = [s.value for s in self.chain.stored if s.value.cols]
        within += [v.operands[0] for v in sums if v.cols]
        if within:
            self._blocks(within)
            for place, one in enumerate(self.chain.stored):
                if one.value.cols:
                    self._store(place)
            for place, value in enumerate(sums):
                if value.cols:
                    at = f"c{place} + program * size + column"
                    self._say(f"t{place} = tl.load({at}, mask=within, other=0.0)")
                    self._say(f"tl.store({at}, t{place} + {self._over_rows(value)}, mask=within)")
            if any(value.cols for value in sums):
                self._say("tl.debug_barrier()")  # the next tile reads what this one wrote
            self.depth -= 1
        for place, one in enumerate(self.chain.stored):
            if not one.value.cols:
                self._store(place)
        for place, value in enumerate(sums):
            if not value.cols:
                at = f"c{place} + program + tl.zeros((1, 1), tl.int32)"
                self._say(f"tl.store({at}, tl.load({at}) + {self._over_rows(value)})")
                self._say("tl.debug_barrier()")

    # pieces

    def _ends(self) -> list[Value]:
        """Write the stores and the sums."""
        return [s.value for s in self.chain.stored] + [s.value.operands[0] for s in self.chain.sums]

    def _needed(self, ends: Iterable[Value]) -> list[Value]:
        """Everything that these need and is not known, in order."""
        found: dict[Value, None] = {}

        def walk(value: Value) -> None:
            if value in self.done or value in found:
                return
            for one in value.operands:
                walk(one)
            found[value] = None

        for value in ends:
            walk(value)
        return list(found)

    def _column(self, start: str) -> None:
        shift = "" if start == "0" else f"{start} + "
        self._say(f"column = {shift}tl.arange(0, BLOCK)[None, :]")
        self._say("within = column < size")

    def _rows(self) -> None:
        self._say(
            "row = ((program + tile * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS))[:, None]"
        )
        self._say("live = row < rows")

    def _value(self, value: Value) -> None:
        names = [v.name for v in value.operands]
        if value.how == "given":
            said = self._loaded(value)
        elif value.how == "row":
            mask = "inside" if value.operands[0].rows else "within"
            said = _reduced(value, f"tl.where({mask}, {names[0]}, {_EMPTY[value.text]})")
        elif not value.operands:
            said = f"tl.full((1, 1), {value.text}, tl.float32)"
        else:
            said = value.text.format(*names)
        self._say(f"{value.name} = {self._rounded(said, value)}")
        self.done.add(value)

    def _rounded(self, said: str, value: Value) -> str:
        narrow = value.dtype in (torch.bfloat16, torch.float16)
        if not narrow or self.rounding != "eager" or value.how == "given":
            return said
        return f"({said}).to({TYPES[value.dtype]}).to(tl.float32)"

    def _loaded(self, value: Value) -> str:
        name = f"a{value.place}"
        at, mask = name, ""
        if value.rows and value.cols:
            at, mask = f"{name} + row * {name}_stride + column", ", mask=inside, other=0"
        elif value.cols:
            at, mask = f"{name} + column", ", mask=within, other=0"
        elif value.rows:
            at, mask = f"{name} + row", ", mask=live, other=0"
        end = " != 0" if value.dtype is torch.bool else ".to(tl.float32)"
        return f"tl.load({at}{mask}){end}"

    def _over_rows(self, column: Value) -> str:
        value = column.operands[0]
        mask = "inside" if column.cols else "live"
        return f"tl.sum(tl.where({mask}, {value.name}, 0.0), 0, keep_dims=True)"

    def _store(self, place: int) -> None:
        one = self.chain.stored[place]
        value, end = one.value, f"o{place}.dtype.element_ty"
        if value.rows and value.cols:
            at, mask = f"o{place} + row * size + column", "inside"
        elif value.cols:
            at, mask = f"o{place} + column", "within & (program == 0)"
        elif value.rows:
            at, mask = f"o{place} + row", "live"
        else:
            at, mask = f"o{place} + tl.zeros((1, 1), tl.int32)", "program == 0"
        self._say(f"tl.store({at}, ({value.name}).to({end}), mask={mask})")


def _reduced(value: Value, said: str) -> str:
    """The reduction of what is said, masked already; one that is no number makes it none."""
    if value.text == "sum":
        return f"tl.sum({said}, 1, keep_dims=True)"
    wild = f"tl.sum(tl.where({said} != {said}, 1.0, 0.0), 1, keep_dims=True) > 0.0"
    return f'tl.where({wild}, float("nan"), tl.{value.text}({said}, 1, keep_dims=True))'


def _level(value: Value) -> int:
    """Count the reductions that follow one another up to this value."""
    before = max((_level(v) for v in value.operands), default=0)
    return before + (value.how == "row")
