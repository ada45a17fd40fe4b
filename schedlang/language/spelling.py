"""Expressions, selectors and heads of statements as canonical text on one line."""

from __future__ import annotations

from collections.abc import Sequence

from schedlang.language import nodes as n


def expr(node: n.Node | str) -> str:
    """An expression, an argument or an operator as text."""
    match node:
        case str():
            return node
        case n.Lit(text):
            return text
        case n.Name():
            return node.text
        case n.Keyword(name, value):
            return f"{name}={expr(value)}"
        case n.Call(name, given):
            return name.text + args(given)
        case n.List(items):
            return f"[{', '.join(map(expr, items))}]"
        case n.Group(items):
            return f"({', '.join(map(expr, items))})"
        case n.Unary("not", operand):
            return f"not {expr(operand)}"
        case n.Unary(op, operand):
            return op + expr(operand)
        case n.Chain(items):
            return " ".join(map(expr, items))
        case n.Interval(low, high):
            return f"{expr(low)}..{expr(high)}"
    raise AssertionError(node)


def args(given: Sequence[n.Node]) -> str:
    """Arguments in their parentheses."""
    return f"({', '.join(map(expr, given))})"


def index(item: str | n.Slice) -> str:
    """One index of a selector."""
    if isinstance(item, str):
        return item
    text = f"{item.start or ''}:{item.stop or ''}"
    return text if item.step is None else f"{text}:{item.step}"


def seg(node: n.Seg) -> str:
    """One segment of a selector with its indices."""
    return node.text + (f"[{', '.join(map(index, node.index))}]" if node.index else "")


def path(node: n.Path) -> str:
    """A selector."""
    kind = f":{node.type}" if node.type else ""
    return ".".join(map(seg, node.segs)) + "?" * node.maybe + kind


def params(given: Sequence[n.Param]) -> str:
    """The parameters of a def or a pattern."""
    return f"({', '.join(map(param, given))})"


def param(node: n.Param) -> str:
    """name: type = default, or name=default."""
    kind = f": {node.type}" if node.type else ""
    equals = " = " if node.type else "="
    return node.name + kind + (equals + expr(node.default) if node.default is not None else "")


def head(node: n.Node) -> str:
    """A declaration on one line, or the part of a statement before its brace."""
    match node:
        case n.Header(version, model):
            return f"schedule {version}" + _if(" for ", model)
        case n.Use(file, alias, given):
            return f'use "{file}"' + _if(" as ", alias) + (f" {args(given)}" if given else "")
        case n.Mesh(given, on):
            return f"mesh{args(given)}" + _if(" on ", on)
        case n.View(name, size, axes):
            return f"view {name}" + _opt(" = ", size) + f" of ({', '.join(axes)})"
        case n.Knob(name, kind, default, domain):
            return f"knob {name}: {kind}" + _opt(" = ", default) + _opt(" in ", domain)
        case n.Require(test):
            return f"require {expr(test)}"
        case n.Expect(test, on):
            return f"expect {expr(test)}" + _if(" on ", on)
        case n.Drop(name):
            return f'drop step "{name}"'
        case n.Pattern(name, given, body):
            return f"pattern {name}{params(given)} {{ {expr(body)} }}"
    return _block_head(node)


def _block_head(node: n.Node) -> str:
    match node:
        case n.Def(name, given, _):
            return f"def {name}{params(given)}"
        case n.Step(name, relax, _):
            return f'step "{name}"' + (f" relax({', '.join(relax)})" if relax else "")
        case n.Override(step):
            return f"override {_block_head(step)}"
        case n.At(paths, where, except_, _):
            text = "at " + ", ".join(map(path, paths)) + _opt(" where ", where)
            return text + (" except " + ", ".join(map(path, except_)) if except_ else "")
        case n.When(test, _, _):
            return f"when {expr(test)}"
    raise AssertionError(node)


def statement(node: n.Rule | n.Do) -> str:
    """A row on one line."""
    if isinstance(node, n.Do):
        return path(node.path) + args(node.call.args)
    return f"{paths(node.paths)}  {expr(node.call)}"


def paths(several: Sequence[n.Path]) -> str:
    """Selectors that stand side by side."""
    return ", ".join(map(path, several))


def _if(before: str, text: str | None) -> str:
    return before + text if text else ""


def _opt(before: str, node: n.Node | None) -> str:
    return before + expr(node) if node is not None else ""
