"""A chain of pointwise operators and row reductions: roles of dims, and its Triton source.

One program computes some rows, in one pass if they fit into a block. Longer rows are read once for
each reduction that depends on another one, and once more for the results; sums over rows are then
accumulated in memory, one row for each program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

# -- roles of dims ---------------------------------------------------------------------------------
# All values of a chain are broadcast to one grid, the shape of its largest tensor. The role of a
# dim is the set of grid dims that it spans, counted from the last (-1, the column): none if its
# size is 1, several if a view has merged them. So a row of N numbers is never taken for N rows.


DimRoles: TypeAlias = tuple[tuple[int, ...], ...]


class NotRowwise(Exception):
    """Raised for a graph that cannot be computed row by row; the text says why."""


@dataclass(frozen=True)
class RowGrid:
    """The shape that all values are broadcast to."""

    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """The number of elements of a row."""
        return self.shape[-1]

    @property
    def leading(self) -> frozenset[int]:
        """The dims that count rows."""
        return frozenset(d for d in range(-len(self.shape), -1) if self.shape[d] > 1)

    def roles_of(self, shape: Sequence[int], label: str) -> DimRoles:
        """Return the roles of an input tensor's dims, by torch's broadcasting."""
        roles = []
        for index, size in enumerate(shape):
            dim = index - len(shape)
            if size != 1 and (-dim > len(self.shape) or self.shape[dim] != size):
                raise NotRowwise(
                    f"{label} of shape {list(shape)} does not lie along rows of {list(self.shape)}"
                )
            roles.append((dim,) if size != 1 else ())
        return tuple(roles)

    def varies_along(self, roles: DimRoles, label: str) -> tuple[bool, bool]:
        """Return whether a value differs from row to row, and from column to column."""
        dims = {dim for role in roles for dim in role}
        leading = dims - {-1}
        if leading and leading != self.leading:
            raise NotRowwise(f"{label} is broadcast over some of the leading dims only")
        return bool(leading), -1 in dims

    def combine(self, several: Sequence[DimRoles], label: str) -> DimRoles:
        """Return the roles of a pointwise operator's result."""
        length = max((len(roles) for roles in several), default=0)
        combined: list[tuple[int, ...]] = []
        for index in range(-length, 0):
            distinct = {roles[index] for roles in several if -index <= len(roles)} - {()}
            if len(distinct) > 1:
                raise NotRowwise(f"{label} merges rows with columns")
            combined.append(distinct.pop() if distinct else ())
        return tuple(combined)

    def roles_of_view(self, roles: DimRoles, shape: Sequence[int], label: str) -> DimRoles:
        """Return the roles after a view."""
        dims = [dim for role in roles for dim in role]
        new_roles: list[tuple[int, ...]] = []
        for size in shape:
            merged: list[int] = []
            while prod(self.shape[d] for d in merged) < size and dims:
                merged.append(dims.pop(0))
            if prod(self.shape[d] for d in merged) != size:
                raise NotRowwise(f"{label} moves elements between rows")
            new_roles.append(tuple(merged))
        return tuple(new_roles)

    def roles_of_expand(self, roles: DimRoles, shape: Sequence[int], label: str) -> DimRoles:
        """Return the roles after `expand`."""
        padded = ((),) * (len(shape) - len(roles)) + roles
        new_roles: list[tuple[int, ...]] = []
        for index, (role, size) in enumerate(zip(padded, shape, strict=True)):
            dim = index - len(shape)
            fits = -dim <= len(self.shape) and self.shape[dim] == size
            if not role and size != 1 and not fits:
                raise NotRowwise(f"{label} broadcasts to a shape that is not that of the rows")
            new_roles.append(role if role or size == 1 else (dim,))
        dims = [dim for role in new_roles for dim in role]
        if dims != sorted(set(dims)):
            raise NotRowwise(f"{label} broadcasts rows along rows")
        return tuple(new_roles)


# -- operators -------------------------------------------------------------------------------------


# functions that Triton lacks. Near zero their formulas lose digits: tanh has a series there; the
# others correct, after Kahan, the rounding of 1 + x and of exp(x)
HELPERS: Mapping[str, str] = {
    "tanh": """    square = x * x
    series = 0.05396825397 - square * 0.02186948854
    series = x * (1.0 - square * (0.33333333333 - square * (0.13333333333 - square * series)))
    return tl.where(tl.abs(x) < 0.2, series, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))
""",
    "log1p": """    more = 1.0 + x
    return tl.where(more == 1.0, x, tl.log(more) * (x / (more - 1.0)))
""",
    "expm1": """    value = tl.exp(x)
    near = (value - 1.0) * (x / tl.log(value))
    far = (x < -16.0) | (x > 16.0)
    return tl.where(value == 1.0, x, tl.where(far, value - 1.0, near))
""",
}
# NaN stays NaN, as in torch
_LARGER = "tl.where(({0} != {0}) | ({0} > {1}), {0}, {1})"
_SMALLER = "tl.where(({0} != {0}) | ({0} < {1}), {0}, {1})"

POINTWISE: Mapping[str, str] = {
    "aten.add.Tensor": "{0} + {1}",
    "aten.add.Scalar": "{0} + {1}",
    "aten.sub.Tensor": "{0} - {1}",
    "aten.sub.Scalar": "{0} - {1}",
    "aten.rsub.Scalar": "{1} - {0}",
    "aten.mul.Tensor": "{0} * {1}",
    "aten.mul.Scalar": "{0} * {1}",
    "aten.div.Tensor": "{0} / {1}",
    "aten.div.Scalar": "{0} / {1}",
    "prims.fma.default": "{0} * {1} + {2}",
    "aten.addcmul.default": "{0} + {1} * {2}",
    "aten.neg.default": "-{0}",
    "aten.abs.default": "tl.abs({0})",
    "aten.exp.default": "tl.exp({0})",
    "aten.exp2.default": "tl.exp2({0})",
    "aten.expm1.default": "expm1({0})",
    "aten.log.default": "tl.log({0})",
    "aten.log2.default": "tl.log2({0})",
    "aten.log1p.default": "log1p({0})",
    "aten.sqrt.default": "tl.sqrt({0})",
    "aten.rsqrt.default": "tl.rsqrt({0})",
    "aten.sin.default": "tl.sin({0})",
    "aten.cos.default": "tl.cos({0})",
    "aten.tanh.default": "tanh({0})",
    "aten.erf.default": "tl.erf({0})",
    "aten.sigmoid.default": "1.0 / (1.0 + tl.exp(-{0}))",
    "aten.reciprocal.default": "1.0 / {0}",
    "aten.square.default": "{0} * {0}",
    "aten.relu.default": _LARGER.replace("{1}", "0.0"),
    "aten.maximum.default": _LARGER,
    "aten.minimum.default": _SMALLER,
    "aten.clamp_min.default": _LARGER,
    "aten.clamp_max.default": _SMALLER,
    "aten.where.self": "tl.where({0}, {1}, {2})",
    "aten.sign.default": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, {0}))",
    "aten.floor.default": "tl.floor({0})",
    "aten.ceil.default": "tl.ceil({0})",
    **{
        f"aten.{name}.{kind}": f"{{0}} {sign} {{1}}"
        for name, sign in (
            ("gt", ">"),
            ("ge", ">="),
            ("lt", "<"),
            ("le", "<="),
            ("eq", "=="),
            ("ne", "!="),
        )
        for kind in ("Tensor", "Scalar")
    },
    "aten.logical_and.default": "{0} & {1}",
    "aten.bitwise_and.Tensor": "{0} & {1}",
    "aten.logical_or.default": "{0} | {1}",
    "aten.bitwise_or.Tensor": "{0} | {1}",
    "aten.logical_not.default": "{0} == 0",
    "aten.bitwise_not.default": "{0} == 0",
    "aten.isnan.default": "{0} != {0}",
}

# operators that give the same values in another shape, or under another name
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "reshape.default", "_unsafe_view.default", "unsqueeze.default"),
        *("squeeze.default", "squeeze.dim", "squeeze.dims", "expand.default", "alias.default"),
        *("clone.default", "detach.default", "_reshape_alias.default", "lift_fresh_copy.default"),
    )
)
CASTS = frozenset(("prims.convert_element_type.default", "aten._to_copy.default"))
CONSTANTS = frozenset(
    f"aten.{name}.default"
    for name in (
        *("full", "full_like", "zeros_like", "ones_like", "zeros", "ones", "scalar_tensor"),
        *("new_zeros", "new_full"),
    )
)
NO_OPERATION = frozenset(("aten._assert_tensor_metadata.default",))
POWERS: Mapping[float, str] = {
    -2.0: "1.0 / ({0} * {0})",
    -1.0: "1.0 / {0}",
    -0.5: "tl.rsqrt({0})",
    0.0: "1.0",
    0.5: "tl.sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    4.0: "({0} * {0}) * ({0} * {0})",
}
SUMS = frozenset(("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default"))
EXTREMES: Mapping[str, str] = {"aten.amax.default": "max", "aten.amin.default": "min"}
VARIANCES = frozenset(("aten.var_mean.correction", "aten.var.correction"))


def constant_value(target: str, args: tuple[Any, ...]) -> float:
    """Return the number of a constant tensor."""
    name = target.split(".")[1]
    if name.startswith("zeros") or name == "new_zeros":
        return 0.0
    if name.startswith("ones"):
        return 1.0
    return float(args[0] if name == "scalar_tensor" else args[2 if name == "new_full" else 1])


# -- the chain -------------------------------------------------------------------------------------


ValueKind = Literal["given", "point", "row", "column"]


@dataclass(frozen=True, eq=False)  # compared by identity
class ChainValue:
    """One value of a chain.

    kind  `inputs`: an input tensor, number `place`; `point`: an expression of the operands; `row`:
          a reduction along each row (`text` is sum, max or min); `column`: a sum over all rows
    rows  whether it differs from row to row
    cols  whether it differs from column to column
    """

    name: str
    kind: ValueKind
    text: str
    operands: tuple[ChainValue, ...]
    rows: bool
    cols: bool
    dtype: torch.dtype
    place: int = -1


@dataclass(frozen=True)
class StoredResult:
    """A result that the kernel stores."""

    value: ChainValue
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OutputSource:
    """The source of an output of the graph: number `place` of the inputs, stored results or tail
    outputs."""

    where: Literal["given", "stored", "tail", "none"]
    place: int = 0


@dataclass(frozen=True)
class RowwiseChain:
    """A graph as one kernel, and what torch computes after it from the sums over rows.

    tail   a graph of (the sums in order, inputs numbered `tail_inputs`): a few operators on
           tensors of one row, such as casts and sums of gradients
    """

    grid: RowGrid
    inputs: tuple[ChainValue, ...]
    stored: tuple[StoredResult, ...]
    sums: tuple[StoredResult, ...]
    outputs: tuple[OutputSource, ...]
    tail: fx.Graph | None = field(default=None, repr=False)
    tail_inputs: tuple[int, ...] = ()


# -- its text --------------------------------------------------------------------------------------


TYPES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}
_EMPTY = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}


def triton_source(chain: RowwiseChain, rounding: str, *, looped: bool) -> str:
    """Return the source of a module with one Triton kernel, `kernel`.

    `looped`: rows are longer than a block. `rounding` "eager": every value is rounded to its dtype
    in the model. Arguments of the kernel: pointers of input, stored and summed tensors; the number
    of rows and their size; the row stride of each input tensor; the number of tiles of rows per
    program.
    """
    return _Writer(chain, rounding).text(looped)


def count_passes(chain: RowwiseChain) -> int:
    """Return the number of passes over a row of several blocks."""
    ends = [s.value for s in chain.stored] + [s.value.operands[0] for s in chain.sums]
    return 1 + max((_level(value) for value in ends), default=0)


class _Writer:
    def __init__(self, chain: RowwiseChain, rounding: str) -> None:
        self.chain, self.rounding = chain, rounding
        self.lines: list[str] = []
        self.depth = 1
        self.done: set[ChainValue] = set()

    def text(self, looped: bool) -> str:
        """Return the complete source."""
        chain = self.chain
        names = [
            *(f"a{v.place}" for v in chain.inputs),
            *(f"o{n}" for n in range(len(chain.stored))),
            *(f"c{n}" for n in range(len(chain.sums))),
            "rows",
            "size",
            *(f"a{v.place}_stride" for v in chain.inputs if v.rows and v.cols),
            "tiles",
            "ROWS: tl.constexpr",
            "BLOCK: tl.constexpr",
        ]
        self._write("program = tl.program_id(0).to(tl.int64)")
        (self._looped if looped else self._single_pass)()
        head = f"@triton.jit\ndef kernel(\n    {', '.join(names)},\n):\n"
        body = "".join(f"{line}\n" for line in self.lines)
        called = [name for name in HELPERS if re.search(rf"\b{name}\(", body)]
        used = [f"@triton.jit\ndef {name}(x):\n{HELPERS[name]}\n\n" for name in called]
        return f"import triton\nimport triton.language as tl\n\n\n{''.join(used)}{head}{body}"

    def _write(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    # rows that are one block

    def _single_pass(self) -> None:
        self._column("0")
        for value in self._needed(self._results()):  # once: values that are equal for all rows
            if not value.rows:
                self._value(value)
        for index, result in enumerate(self.chain.sums):
            shape = "(1, BLOCK)" if result.value.cols else "(1, 1)"
            self._write(f"t{index} = tl.zeros({shape}, tl.float32)")
        self._write("for tile in range(tiles):")
        self.depth += 1
        self._rows()
        self._write("inside = live & within")
        for value in self._needed(self._results()):
            self._value(value)
        for index, result in enumerate(self.chain.sums):
            self._write(f"t{index} += {self._over_rows(result.value)}")
        for index in range(len(self.chain.stored)):
            self._store(index)
        self.depth -= 1
        for index, result in enumerate(self.chain.sums):
            if result.value.cols:
                self._write(f"tl.store(c{index} + program * size + column, t{index}, mask=within)")
            else:
                self._write(f"tl.store(c{index} + program + tl.zeros((1, 1), tl.int32), t{index})")

    # rows of several blocks

    def _looped(self) -> None:
        self._write("for tile in range(tiles):")
        self.depth += 1
        self._rows()
        reductions = [v for v in self._needed(self._results()) if v.kind == "row"]
        for level in range(1, max((_level(v) for v in reductions), default=0) + 1):
            self._pass([v for v in reductions if _level(v) == level])
        self._write_results()
        self.depth -= 1

    def _pass(self, reductions: Sequence[ChainValue]) -> None:
        """Write a pass over the rows for reductions that depend only on earlier ones."""
        self._write_row_values(reductions)
        for value in reductions:
            self._write(
                f"{value.name}_part = tl.full((ROWS, BLOCK), {_EMPTY[value.text]}, tl.float32)"
            )
        with_blocks = self._blocks([v.operands[0] for v in reductions])
        for value in reductions:
            masked = f"tl.where(inside, {value.operands[0].name}, {_EMPTY[value.text]})"
            name = f"{value.name}_part"
            if value.text == "sum":
                self._write(f"{name} += {masked}")
            else:
                larger = ">" if value.text == "max" else "<"
                self._write(f"{value.name}_new = {masked}")
                new_name = f"{value.name}_new"
                better = f"({new_name} != {new_name}) | ({new_name} {larger} {name})"
                self._write(f"{name} = tl.where({better}, {new_name}, {name})")
        self.depth -= with_blocks
        for value in reductions:
            reduced = _reduction_text(value, f"{value.name}_part")
            self._write(f"{value.name} = {self._rounded(reduced, value)}")
            self.done.add(value)

    def _write_row_values(self, values: Iterable[ChainValue]) -> None:
        """Write the values without columns that are known before a pass over the rows."""
        for value in self._needed(values):
            is_ready = all(v in self.done for v in value.operands)
            if is_ready and not value.cols and value.kind != "row":
                self._value(value)

    def _blocks(self, values: Sequence[ChainValue]) -> int:
        """Write the head of a loop over blocks, and the wanted values in it; return the loop's
        depth."""
        self._write("for start in range(0, size, BLOCK):")
        self.depth += 1
        self._column("start")
        self._write("inside = live & within")
        outside = set(self.done)
        for value in self._needed(values):
            self._value(value)
        self.done = outside
        return 1

    def _write_results(self) -> None:
        """Write the pass over the rows for the results."""
        sums = [result.value for result in self.chain.sums]
        self._write_row_values([*self._results()])
        within = [s.value for s in self.chain.stored if s.value.cols]
        within += [v.operands[0] for v in sums if v.cols]
        if within:
            self._blocks(within)
            for index, result in enumerate(self.chain.stored):
                if result.value.cols:
                    self._store(index)
            for index, value in enumerate(sums):
                if value.cols:
                    address = f"c{index} + program * size + column"
                    self._write(f"t{index} = tl.load({address}, mask=within, other=0.0)")
                    self._write(
                        f"tl.store({address}, t{index} + {self._over_rows(value)}, mask=within)"
                    )
            if any(value.cols for value in sums):
                self._write("tl.debug_barrier()")  # the next tile reads what this one wrote
            self.depth -= 1
        for index, result in enumerate(self.chain.stored):
            if not result.value.cols:
                self._store(index)
        for index, value in enumerate(sums):
            if not value.cols:
                address = f"c{index} + program + tl.zeros((1, 1), tl.int32)"
                self._write(f"tl.store({address}, tl.load({address}) + {self._over_rows(value)})")
                self._write("tl.debug_barrier()")

    # pieces

    def _results(self) -> list[ChainValue]:
        """Return the stored values, and the operands of sums over rows."""
        return [s.value for s in self.chain.stored] + [s.value.operands[0] for s in self.chain.sums]

    def _needed(self, ends: Iterable[ChainValue]) -> list[ChainValue]:
        """Return all values that these depend on and that are not written yet, in order."""
        needed: dict[ChainValue, None] = {}

        def walk(value: ChainValue) -> None:
            if value in self.done or value in needed:
                return
            for operand in value.operands:
                walk(operand)
            needed[value] = None

        for value in ends:
            walk(value)
        return list(needed)

    def _column(self, start: str) -> None:
        shift = "" if start == "0" else f"{start} + "
        self._write(f"column = {shift}tl.arange(0, BLOCK)[None, :]")
        self._write("within = column < size")

    def _rows(self) -> None:
        self._write(
            "row = ((program + tile * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS))[:, None]"
        )
        self._write("live = row < rows")

    def _value(self, value: ChainValue) -> None:
        names = [v.name for v in value.operands]
        if value.kind == "given":
            text = self._loaded(value)
        elif value.kind == "row":
            mask = "inside" if value.operands[0].rows else "within"
            text = _reduction_text(value, f"tl.where({mask}, {names[0]}, {_EMPTY[value.text]})")
        elif not value.operands:
            text = f"tl.full((1, 1), {value.text}, tl.float32)"
        else:
            text = value.text.format(*names)
        self._write(f"{value.name} = {self._rounded(text, value)}")
        self.done.add(value)

    def _rounded(self, text: str, value: ChainValue) -> str:
        narrow = value.dtype in (torch.bfloat16, torch.float16)
        if not narrow or self.rounding != "eager" or value.kind == "given":
            return text
        return f"({text}).to({TYPES[value.dtype]}).to(tl.float32)"

    def _loaded(self, value: ChainValue) -> str:
        name = f"a{value.place}"
        address, mask = name, ""
        if value.rows and value.cols:
            address, mask = f"{name} + row * {name}_stride + column", ", mask=inside, other=0"
        elif value.cols:
            address, mask = f"{name} + column", ", mask=within, other=0"
        elif value.rows:
            address, mask = f"{name} + row", ", mask=live, other=0"
        end = " != 0" if value.dtype is torch.bool else ".to(tl.float32)"
        return f"tl.load({address}{mask}){end}"

    def _over_rows(self, column: ChainValue) -> str:
        value = column.operands[0]
        mask = "inside" if column.cols else "live"
        return f"tl.sum(tl.where({mask}, {value.name}, 0.0), 0, keep_dims=True)"

    def _store(self, index: int) -> None:
        result = self.chain.stored[index]
        value, end = result.value, f"o{index}.dtype.element_ty"
        if value.rows and value.cols:
            address, mask = f"o{index} + row * size + column", "inside"
        elif value.cols:
            address, mask = f"o{index} + column", "within & (program == 0)"
        elif value.rows:
            address, mask = f"o{index} + row", "live"
        else:
            address, mask = f"o{index} + tl.zeros((1, 1), tl.int32)", "program == 0"
        self._write(f"tl.store({address}, ({value.name}).to({end}), mask={mask})")


def _reduction_text(value: ChainValue, expression: str) -> str:
    """Return the reduction of a masked expression; a maximum or minimum over a NaN is NaN."""
    if value.text == "sum":
        return f"tl.sum({expression}, 1, keep_dims=True)"
    wild = f"tl.sum(tl.where({expression} != {expression}, 1.0, 0.0), 1, keep_dims=True) > 0.0"
    return f'tl.where({wild}, float("nan"), tl.{value.text}({expression}, 1, keep_dims=True))'


def _level(value: ChainValue) -> int:
    """Return the length of the longest chain of reductions up to this value."""
    operand_level = max((_level(v) for v in value.operands), default=0)
    return operand_level + (value.kind == "row")
