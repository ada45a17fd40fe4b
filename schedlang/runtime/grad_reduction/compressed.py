"""Compressed all-reduce of gradients: low rank, 8 bits or 1 bit, with error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from schedlang.ir.annotations import Codec
from schedlang.runtime.comm.collectives import Group, all_gather, all_reduce
from schedlang.runtime.device import seeded_generator, send_to_device
from schedlang.runtime.grad_reduction.gradient import local_gradient, replace_gradient
from schedlang.runtime.storage.offloaded_gradients import local_tensor

# ---- Codecs of gradients: a low-rank product, 8 bits, 1 bit.
# Vogels et al., PowerSGD (2019); Dettmers, 8-bit approximations (2016), with stochastic rounding
# as Alistarh et al., QSGD (2017); Seide et al., 1-bit SGD (2014).


def random_numbers(
    shape: tuple[int, ...], like: Tensor, *seeds: object, normal: bool = True
) -> Tensor:
    """Return random numbers that depend on `seeds` alone, so they are equal on all ranks."""
    generator = seeded_generator(*seeds)
    draw = torch.randn if normal else torch.rand
    with torch._C.DisableTorchFunction():
        numbers = draw(shape, generator=generator, dtype=torch.float64)
    return send_to_device(numbers.to(like.dtype), like.device)


# -- low rank ------------------------------------------------------------------------------------


def fill_zero_columns(q: Tensor, *seeds: object) -> Tensor:
    """Return the start of a power iteration: columns of zeros are replaced by random ones."""
    random_q = random_numbers(tuple(q.shape), q, *seeds)
    return torch.where((q != 0).any(0), q, random_q)


def orthogonalize(p: Tensor) -> Tensor:
    """Return orthonormal columns by Gram-Schmidt, twice; a dependent column becomes zero.

    Otherwise its remainder, which is rounding, would be scaled to length one.
    """
    tolerance = torch.finfo(p.dtype).eps ** 0.5
    columns: list[Tensor] = []
    for column in p.unbind(1):
        old_norm = column.norm()
        for _ in range(2):
            for basis in columns:
                column = column - basis * (basis @ column)
        new_norm = column.norm()
        nonzero = new_norm > tolerance * old_norm
        columns.append(torch.where(nonzero, column / torch.where(nonzero, new_norm, 1.0), 0.0))
    return torch.stack(columns, 1) if columns else p


# -- bits ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor in few bits: codes, and the scales of each block of elements."""

    codes: Tensor
    scales: Tensor


def _blocks(flat: Tensor, block: int) -> Tensor:
    """Return rows of one block each, the last padded with zeros."""
    count = -(-flat.numel() // block)
    filled = flat.new_zeros(count * block)
    filled[: flat.numel()] = flat
    return filled.view(count, block)


def to_int8(flat: Tensor, block: int, draw: Tensor) -> EncodedTensor:
    """Encode as integers from -127 to 127 per block, with stochastic rounding by `draw`."""
    rows = _blocks(flat, block)
    scales = rows.abs().amax(1) / 127 if rows.numel() else flat.new_zeros(0)
    steps = rows / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = (steps + _blocks(draw, block)).floor().clamp(-127, 127).to(torch.int8)
    return EncodedTensor(codes.view(-1), scales)


def from_int8(coded: EncodedTensor, count: int, block: int) -> Tensor:
    """Return the decoded numbers."""
    rows = coded.codes.view(-1, block).to(coded.scales.dtype) * coded.scales[:, None]
    return rows.view(-1)[:count]


def to_bits(flat: Tensor, block: int) -> EncodedTensor:
    """Encode as one bit per element, with the means of both sides of zero per block.

    An element that is zero within rounding counts as above zero, so that rounding decides nothing.
    """
    rows = _blocks(flat, block)
    tolerance = torch.finfo(flat.dtype).eps ** 0.5
    limit = -tolerance * (rows.abs().amax(1, keepdim=True) if rows.numel() else rows)
    above = rows >= limit
    is_entry = _blocks(torch.ones_like(flat), block) > 0
    means = [_mean(rows, above & is_entry), _mean(rows, ~above & is_entry)]
    weights = 2 ** torch.arange(8, device=flat.device)
    codes = (above.view(-1, 8) * weights).sum(1).to(torch.uint8)
    return EncodedTensor(codes, torch.stack(means, 1).view(-1))


def from_bits(coded: EncodedTensor, count: int, block: int) -> Tensor:
    """Return the mean of its side for each element."""
    shifts = torch.arange(8, device=coded.codes.device)
    above = (coded.codes[:, None].to(torch.int64) >> shifts) & 1
    means = coded.scales.view(-1, 2)
    rows = torch.where(above.view(-1, block) > 0, means[:, :1], means[:, 1:])
    return rows.reshape(-1)[:count]


def _mean(rows: Tensor, selected: Tensor) -> Tensor:
    total = torch.where(selected, rows, 0.0).sum(1)
    return total / selected.sum(1).clamp(min=1)


# ---- Compressed reductions over replicas, with the error of a step fed into the next.
# Every rank of the group has a partial gradient and gets the same sum. Matrices are compressed;
# vectors, and tensors that would not get smaller, are all-reduced uncompressed.


@dataclass
class CompressionState:
    """The error and the start of the power iteration of one parameter, from step to step."""

    error: Tensor | None = None
    q: Tensor | None = None


@dataclass
class Compressor:
    """The compressed reductions of a program; `step` counts them, so that draws differ by step.

    `clean(name, part)` zeros the padding of a part, because a decoded value there may not be zero.
    """

    codec: Codec
    group: Group
    names: tuple[str, ...]
    clean: Callable[[str, Tensor], Tensor] = lambda name, part: part
    memories: dict[str, CompressionState] = field(default_factory=dict)
    step: int = 0

    def sum(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace each gradient by the sum over the group; one that no rank has stays None."""
        local_names = [name for name in self.names if name in parameters]
        has_grad = [local_gradient(parameters[n]) is not None for n in local_names]
        flags = send_to_device(torch.tensor(has_grad, dtype=torch.float64), self.group.device)
        counts = all_reduce(flags, self.group)
        # a rank that has all gradients need not wait for the counts
        grad_counts = has_grad if all(has_grad) else counts.tolist()
        step, self.step = self.step, self.step + 1
        grads: dict[str, Tensor] = {}
        for name, count in zip(local_names, grad_counts):
            if count:
                grad = local_gradient(parameters[name])
                grads[name] = (
                    torch.zeros_like(local_tensor(parameters[name])) if grad is None else grad
                )
        sums = self._sums(grads, step)
        for name, value in sums.items():
            replace_gradient(parameters[name], value)

    def _sums(self, parts: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        small = {n: part for n, part in parts.items() if not self.codec.compresses(part.shape)}
        large = {n: self._with_error(n, part) for n, part in parts.items() if n not in small}
        totals = dict(zip(small, self._sum_all(list(small.values()))))
        sum_large = self._low_rank if self.codec.kind == "powersgd" else self._sum_codes
        for name, total in sum_large(large, step).items():
            totals[name] = self.clean(name, total.view_as(parts[name]))
            memory = self.memories[name]
            if memory.error is not None:
                error = self.clean(name, memory.error.view_as(parts[name]))
                memory.error = error.reshape(memory.error.shape)
        return {name: totals[name].view_as(parts[name]) for name in parts}

    def _with_error(self, name: str, part: Tensor) -> Tensor:
        memory = self.memories.setdefault(name, CompressionState())
        matrix = part.reshape(part.shape[0], -1)
        return matrix if memory.error is None else matrix + memory.error

    def _store_error(self, name: str, error: Tensor) -> None:
        if self.codec.feedback:
            self.memories[name].error = error

    def _sum_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-reduce tensors over the group, in one message."""
        if not tensors:
            return []
        flat = all_reduce(torch.cat([t.reshape(-1) for t in tensors]), self.group)
        parts = torch.split(flat, [t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors)]

    def _low_rank(self, parts: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Run one step of a power iteration, from the result of the last one."""
        starts = {n: self._start(n, part, step) for n, part in parts.items()}
        left_sums = self._sum_all([part @ starts[n] for n, part in parts.items()])
        left_factors = {n: orthogonalize(p) for n, p in zip(parts, left_sums)}
        local_qs = {n: part.T @ left_factors[n] for n, part in parts.items()}
        qs = dict(zip(parts, self._sum_all(list(local_qs.values()))))
        for name, part in parts.items():
            self.memories[name].q = qs[name]
            self._store_error(name, part - left_factors[name] @ local_qs[name].T)
        return {name: left_factors[name] @ qs[name].T for name in parts}

    def _start(self, name: str, part: Tensor, step: int) -> Tensor:
        q = self.memories[name].q
        q = part.new_zeros(part.shape[1], self.codec.rank) if q is None else q
        return fill_zero_columns(q, name, step)

    def _sum_codes(self, parts: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Gather the codes of every rank, and add the decoded values in the order of ranks."""
        local: dict[str, EncodedTensor] = {}
        for name, part in parts.items():
            local[name] = encode(self.codec, part, name, step, self.group.rank)
            self._store_error(
                name, part - decode(self.codec, local[name], part.numel()).view_as(part)
            )
        if not parts:
            return {}
        codes = self._gather([encoded.codes for encoded in local.values()])
        scales = self._gather([encoded.scales for encoded in local.values()])
        totals = {}
        for rank, (name, part) in enumerate(parts.items()):
            encoded_parts = (EncodedTensor(c[rank], s[rank]) for c, s in zip(codes, scales))
            numbers = [decode(self.codec, encoded, part.numel()) for encoded in encoded_parts]
            totals[name] = torch.stack(numbers).sum(0).view_as(part)
        return totals

    def _gather(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """All-gather tensors over the group, in one message."""
        flat = torch.cat([t.reshape(-1) for t in tensors])
        gathered = all_gather(flat, 0, self.group)
        sizes = [t.numel() for t in tensors]
        rows = gathered.view(self.group.size, -1)
        return [torch.split(row, sizes) for row in rows]


def message_bytes(
    codec: Codec, shapes: Sequence[tuple[tuple[int, ...], int]], ranks: int
) -> dict[str, int]:
    """Return the bytes of each received message of a reduction, from shapes and itemsizes."""
    sizes = {"there": 8 * len(shapes)}

    def more(kind: str, count: int) -> None:
        sizes[kind] = sizes.get(kind, 0) + count

    for shape, item in shapes:
        size, rows = math.prod(shape), shape[0] if shape else 1
        blocks = -(-size // codec.block)
        if not codec.compresses(shape):
            more("small", size * item)
        elif codec.kind == "powersgd":
            more("p", codec.rank * rows * item)
            more("q", codec.rank * (size // rows) * item)
        else:
            code_bits = 8 if codec.kind == "int8" else 1
            more("codes", ranks * blocks * codec.block * code_bits // 8)
            more("scales", ranks * blocks * item * (1 if codec.kind == "int8" else 2))
    return sizes


def encode(codec: Codec, part: Tensor, name: str, step: int, rank: int) -> EncodedTensor:
    """Encode a part of a gradient; draws depend on parameter, step and rank."""
    flat = part.reshape(-1)
    if codec.kind == "onebit":
        return to_bits(flat, codec.block)
    draw = random_numbers((flat.numel(),), flat, name, step, rank, normal=False)
    return to_int8(flat, codec.block, draw)


def decode(codec: Codec, coded: EncodedTensor, count: int) -> Tensor:
    """Return the decoded numbers."""
    read: Callable[[EncodedTensor, int, int], Tensor] = (
        from_bits if codec.kind == "onebit" else from_int8
    )
    return read(coded, count, codec.block)
