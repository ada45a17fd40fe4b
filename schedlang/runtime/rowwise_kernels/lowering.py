"""Lower an ATen graph to a chain of row-wise values, or name the operator that is not row-wise."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from schedlang.runtime.rowwise_kernels import chain
from schedlang.runtime.rowwise_kernels.chain import (
    ChainValue,
    DimRoles,
    NotRowwise,
    OutputSource,
    RowGrid,
    RowwiseChain,
    StoredResult,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def lower_graph(graph: fx.Graph, results: int = 0) -> RowwiseChain:
    """Return the chain of a graph; raises NotRowwise, which names the operator.

    Each of the first `results` outputs is stored separately, even if it is an input or stored
    already.
    """
    tensors = [n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    largest = max(tensors, key=lambda t: t.numel(), default=None)
    if largest is None or largest.dim() == 0 or largest.shape[-1] < 2:
        raise NotRowwise("no tensor has rows of several elements")
    return _Lowering(RowGrid(tuple(int(n) for n in largest.shape))).run(graph, results)


class _Lowering:
    """One walk over a graph, in its order."""

    def __init__(self, grid: RowGrid) -> None:
        self.grid = grid
        self.values: dict[fx.Node, ChainValue] = {}
        self.roles: dict[fx.Node, DimRoles] = {}
        # sums over rows: nodes that depend on them are the tail
        self.sums: dict[fx.Node, ChainValue] = {}
        self.late: list[fx.Node] = []
        self.pairs: dict[Any, tuple[Sequence[ChainValue], DimRoles]] = {}
        self.places: dict[fx.Node, int] = {}
        self.count = 0

    def run(self, graph: fx.Graph, results: int) -> RowwiseChain:
        """Return the chain."""
        for node in graph.nodes:
            if node.op == "placeholder":
                self.places[node] = len(self.places)
            elif node.op == "call_function":
                self._lower_node(node)
        (outputs,) = next(iter(reversed(graph.nodes))).args
        return self._chain(list(outputs), results)

    def _lower_node(self, node: fx.Node) -> None:
        """Lower one call."""
        if str(node.target) in chain.NO_OPERATION:
            return
        input_nodes = node.all_input_nodes
        if any(n in self.sums or n in self.late for n in input_nodes):
            self.late.append(node)
            return
        op_name = _operator_name(node)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            index: Any = node.args[1]
            pair, roles = self.pairs[source]
            self.values[node], self.roles[node] = pair[index], roles
        elif str(node.target) in chain.CONSTANTS:
            number = _literal(chain.constant_value(str(node.target), node.args))
            self._set_value(node, self._new_value("point", number, (), (), node), ())
        elif str(node.target) in chain.VIEWS:
            self._view(node, op_name)
        elif str(node.target) in chain.CASTS:
            self._cast(node, op_name)
        elif str(node.target) in chain.VARIANCES:
            self._variance(node, op_name)
        elif str(node.target) in chain.SUMS or str(node.target) in chain.EXTREMES:
            self._reduction(node, op_name)
        else:
            self._pointwise(node, op_name)

    # values

    def _operand(self, node: Any) -> ChainValue:
        """Return the value of an operand; an input tensor is loaded at its first use."""
        if node in self.values:
            return self.values[node]
        if node not in self.places:
            raise NotRowwise(f"{_operator_name(node)} is not a row-wise operator")
        kind = node.meta["val"].dtype
        if kind not in FLOATS and kind is not torch.bool:
            raise NotRowwise(f"it takes integers ({str(kind).removeprefix('torch.')})")
        roles = self.grid.roles_of(tuple(node.meta["val"].shape), f"`{node.name}`")
        rows, cols = self.grid.varies_along(roles, f"`{node.name}`")
        index = self.places[node]
        self._set_value(
            node, ChainValue(f"x{index}", "given", "", (), rows, cols, kind, index), roles
        )
        return self.values[node]

    def _new_value(
        self,
        value_kind: Any,
        text: str,
        operands: Sequence[ChainValue],
        roles: DimRoles,
        node: fx.Node,
        dtype: torch.dtype | None = None,
    ) -> ChainValue:
        self.count += 1
        rows, cols = self.grid.varies_along(roles, _operator_name(node))
        kind = dtype or node.meta["val"].dtype
        return ChainValue(f"v{self.count}", value_kind, text, tuple(operands), rows, cols, kind)

    def _set_value(self, node: fx.Node, value: ChainValue, roles: DimRoles) -> None:
        self.values[node], self.roles[node] = value, roles

    # operators

    def _view(self, node: fx.Node, op_name: str) -> None:
        """Lower a view: the same value in another shape; or a broadcast, which changes the
        value."""
        source: Any = node.args[0]
        value, shape = self._operand(source), tuple(node.meta["val"].shape)
        if node.target is torch.ops.aten.expand.default:
            roles = self.grid.roles_of_expand(self.roles[source], shape, op_name)
            if self.grid.varies_along(roles, op_name) != (value.rows, value.cols):
                value = self._new_value("point", "{0}", (value,), roles, node)
        else:
            roles = self.grid.roles_of_view(self.roles[source], shape, op_name)
        self._set_value(node, value, roles)

    def _cast(self, node: fx.Node, op_name: str) -> None:
        source: Any = node.args[0]
        value, kind = self._operand(source), node.meta["val"].dtype
        if kind not in FLOATS:
            raise NotRowwise(f"{op_name} to {str(kind).removeprefix('torch.')} is not row-wise")
        text = "({0}).to(tl.float32)" if value.dtype is torch.bool else "{0}"
        self._set_value(
            node,
            self._new_value("point", text, (value,), self.roles[source], node),
            self.roles[source],
        )

    def _pointwise(self, node: fx.Node, op_name: str) -> None:
        text, terms = _expression(node, op_name)
        values = [self._operand(n) for n in terms if isinstance(n, fx.Node)]
        roles = self.grid.combine([self.roles[n] for n in terms if isinstance(n, fx.Node)], op_name)
        shape = tuple(node.meta["val"].shape)
        roles = ((),) * (len(shape) - len(roles)) + roles
        places = iter(range(len(values)))
        texts = [f"{{{next(places)}}}" if isinstance(n, fx.Node) else _literal(n) for n in terms]
        self._set_value(
            node, self._new_value("point", text.format(*texts), values, roles, node), roles
        )

    def _reduction(self, node: fx.Node, op_name: str) -> None:
        source: Any = node.args[0]
        value = self._operand(source)
        dims = _dims(node, self.roles[source])
        kept = _remove_dims(self.roles[source], dims, _keeps_dims(node))
        reduced = {dim for dim_index in dims for dim in self.roles[source][dim_index]}
        reduction = chain.EXTREMES.get(str(node.target), "sum")
        mean = "mean" in str(node.target)
        rows = reduced - {-1}
        if rows and (rows != self.grid.leading or reduction != "sum"):
            raise NotRowwise(f"{op_name} over dim {sorted(dims)} reduces over rows")
        within = torch.float32 if rows or mean else None  # rounded once, at the end
        if -1 in reduced:
            column = [dim_index for dim_index in dims if self.roles[source][dim_index] == (-1,)]
            along = _remove_dims(self.roles[source], column, True)
            value = self._new_value("row", reduction, (value,), along, node, within)
        if mean:  # as torch does: the sum, divided once
            count = prod(source.meta["val"].shape[d] for d in dims)
            mean_roles = kept if not rows else _value_roles(value, self.roles[source])
            text = f"{{0}} / {float(count)!r}"
            value = self._new_value(
                "point", text, (value,), mean_roles, node, torch.float32 if rows else None
            )
        if rows:
            total = ChainValue(
                f"c{len(self.sums)}",
                "column",
                "sum",
                (value,),
                False,
                value.cols,
                node.meta["val"].dtype,
            )
            self.sums[node] = total
            return
        self._set_value(node, value, kept)

    def _variance(self, node: fx.Node, op_name: str) -> None:
        """Lower a variance to two sums: of the numbers, and of squared differences from their
        mean."""
        source: Any = node.args[0]
        value, roles = self._operand(source), self.roles[source]
        dims = _dims(node, roles)
        if {dim for dim_index in dims for dim in roles[dim_index]} != {-1}:
            raise NotRowwise(f"{op_name} over dim {sorted(dims)} reduces over rows")
        size = self.grid.size
        along, kept = _remove_dims(roles, dims, True), _remove_dims(roles, dims, _keeps_dims(node))
        wide = torch.float32

        def made(kind: Any, text: str, *operands: ChainValue, at: DimRoles = along) -> ChainValue:
            return self._new_value(kind, text, operands, at, node, wide)

        mean = made("point", f"{{0}} / {float(size)!r}", made("row", "sum", value))
        centred = made("point", "{0} - {1}", value, mean, at=roles)
        squares = made("row", "sum", made("point", "{0} * {0}", centred, at=roles))
        correction: Any = node.kwargs.get("correction")
        divisor = float(size - (1 if correction is None else correction))
        variance = made("point", f"{{0}} / {divisor!r}", squares)
        if node.target is torch.ops.aten.var.correction:
            self._set_value(node, variance, kept)
        else:
            self.pairs[node] = ((variance, mean), kept)

    # results

    def _chain(self, outputs: list[Any], results: int) -> RowwiseChain:
        stored: dict[ChainValue, StoredResult] = {}
        tails: dict[Any, int] = {}
        sources = [
            self._source_of_output(node, stored, tails, index < results)
            for index, node in enumerate(outputs)
        ]
        places = tuple(stored)
        outs = tuple(
            OutputSource("stored", places.index(f)) if isinstance(f, ChainValue) else f
            for f in sources
        )
        sums = tuple(
            StoredResult(value, tuple(node.meta["val"].shape), node.meta["val"].dtype)
            for node, value in self.sums.items()
        )
        tail, tail_inputs = self._tail(list(tails))
        used = sorted({v for v in self.values.values() if v.kind == "given"}, key=lambda v: v.place)
        return RowwiseChain(
            self.grid, tuple(used), tuple(stored.values()), sums, outs, tail, tail_inputs
        )

    def _source_of_output(
        self, node: Any, stored: dict[ChainValue, StoredResult], tails: dict[Any, int], own: bool
    ) -> Any:
        if node is None:
            return OutputSource("none")
        if node in self.sums or node in self.late:
            if own and node in tails:
                raise NotRowwise(f"{_operator_name(node)} is given twice")
            return OutputSource("tail", tails.setdefault(node, len(tails)))
        if node in self.places and not own:
            return OutputSource("given", self.places[node])
        value = self._operand(node)
        kind, shape = node.meta["val"].dtype, tuple(node.meta["val"].shape)
        parts = self.grid.varies_along(self.roles[node], _operator_name(node))
        conflicts = value in stored and (own or stored[value].shape != shape)
        if value.kind == "given" or conflicts or parts != (value.rows, value.cols):
            value = self._new_value("point", "{0}", (value,), self.roles[node], node)
        stored.setdefault(value, StoredResult(value, shape, kind))
        return value

    def _tail(self, outputs: list[fx.Node]) -> tuple[fx.Graph | None, tuple[int, ...]]:
        """Return the graph after the sums over rows, and the input tensors that it uses."""
        if not self.sums:
            return None, ()
        tail = fx.Graph()
        copies = {node: tail.placeholder(f"s{n}") for n, node in enumerate(self.sums)}
        needed = [n for node in self.late for n in node.all_input_nodes if n not in self.late]
        input_indices: list[int] = []
        for node in dict.fromkeys(n for n in needed if n not in self.sums):
            if node not in self.places:
                raise NotRowwise(f"{_operator_name(node)} uses a sum over rows")
            input_indices.append(self.places[node])
            copies[node] = tail.placeholder(f"g{self.places[node]}")
        for node in self.late:
            copies[node] = tail.node_copy(node, copies.__getitem__)
        tail.output(tuple(copies[node] for node in outputs))
        return tail, tuple(input_indices)


def _value_roles(value: ChainValue, roles: DimRoles) -> DimRoles:
    """Return the roles without the column if the value has no columns."""
    if value.cols:
        return roles
    return tuple(tuple(d for d in role if d != -1) for role in roles)


def _operator_name(node: fx.Node) -> str:
    target: Any = node.target
    return f"`{getattr(target, '__name__', str(target)).split('.')[0]}`"


def _literal(number: Any) -> str:
    value = float(number)
    if value != value or value in (float("inf"), -float("inf")):
        return f'float("{value}")'
    return repr(value)


def _dims(node: fx.Node, roles: DimRoles) -> list[int]:
    """Return the dims of a reduction, counted from the first."""
    dim_arg: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = [dim_arg] if isinstance(dim_arg, int) else list(dim_arg or range(len(roles)))
    return [dim % max(len(roles), 1) for dim in dims]


def _keeps_dims(node: fx.Node) -> bool:
    return bool(node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False))


def _remove_dims(roles: DimRoles, dims: Sequence[int], keep: bool) -> DimRoles:
    return tuple(
        () if index in dims else role
        for index, role in enumerate(roles)
        if keep or index not in dims
    )


def _expression(node: fx.Node, op_name: str) -> tuple[str, list[Any]]:
    """Return the text and the operands of a pointwise operator."""
    target, terms = str(node.target), list[Any](node.args)
    if target == "aten.pow.Tensor_Scalar":
        power = float(terms[1])
        if power not in chain.POWERS:
            raise NotRowwise(f"{op_name} to {power:g} is not a row-wise operator")
        return chain.POWERS[power], terms[:1]
    if target == "aten.clamp.default":
        low, high = (*terms[1:], *(node.kwargs.get(k) for k in ("min", "max")[len(terms) - 1 :]))[
            :2
        ]
        text = "{0}"
        for bound, name in ((low, "clamp_min"), (high, "clamp_max")):
            if bound is not None:
                pattern = chain.POINTWISE[f"aten.{name}.default"]
                text = pattern.replace("{0}", f"({text})").replace("{1}", _literal(bound))
        return text, terms[:1]
    if target not in chain.POINTWISE:
        raise NotRowwise(f"{op_name} is not a row-wise operator")
    text = chain.POINTWISE[target]
    alpha = node.kwargs.get("alpha", 1)
    value = node.kwargs.get("value", 1)
    if target == "aten.addcmul.default" and value != 1:
        text = f"{{0}} + {_literal(value)} * {{1}} * {{2}}"
    elif alpha != 1:
        text = text.replace("{1}", f"{_literal(alpha)} * {{1}}")
    return text, terms
