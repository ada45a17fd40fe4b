"""explain: a primitive, or the code of a message."""

from __future__ import annotations

from typing import Annotated

import typer

from schedlang.verbs.exits import show_json
from schedlang.verbs.options import AsJson, verb


@verb
def explain(
    name: Annotated[
        str | None, typer.Argument(help="A primitive or a code: shard, S402.", metavar="NAME")
    ] = None,
    conflicts: Annotated[
        bool,
        typer.Option("--conflicts", help="Show which primitive may stand below which other one."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain a primitive or the code of a message; without a name, list all of them."""
    from schedlang.diagnostics import codes
    from schedlang.diagnostics.diagnostic import Refusal, facts_of_unknown, find_closest
    from schedlang.diagnostics.other_systems import VERBS
    from schedlang.ir import primitive
    from schedlang.ir.primitive import load_all, registry
    from schedlang.language import manual

    load_all()
    verbs = registry()
    if conflicts:
        _show(
            primitive.conflict_table(verbs) if as_json else primitive.format_conflicts(verbs),
            as_json,
        )
    elif name is None:
        _list_all(as_json)
    elif name in verbs:
        page: object = manual.to_json(verbs[name]) if as_json else manual.explain(verbs[name])
        _show(page, as_json)
    elif name.upper() in codes.CODES or name.upper() in codes.WARNINGS:
        code = name.upper()
        _show(codes.to_json(code) if as_json else codes.explain(code), as_json)
    else:
        closest = find_closest(name, [*verbs, *codes.CODES, *codes.WARNINGS])
        helps = VERBS.get(name) or (
            (f"did you mean `{closest}`?",) if closest else ("`schedlang explain` lists them all",)
        )
        title = f"there is no primitive or code `{name}`"
        facts = facts_of_unknown(name, () if closest is None or name in VERBS else (closest,))
        raise Refusal.of("S301", title, helps=helps, facts=facts)


def _show(page: object, as_json: bool) -> None:
    if as_json:
        show_json(page)
    else:
        print(page, end="")


def _list_all(as_json: bool) -> None:
    from schedlang.diagnostics import codes
    from schedlang.ir.primitive import registry

    verbs = {name: (kind.__doc__ or "").strip().split("\n")[0] for name, kind in registry().items()}
    if as_json:
        messages = {code: title for code, (title, _) in codes.CODES.items()}
        show_json({"primitives": verbs, "codes": messages})
        return
    width = max(map(len, verbs), default=0)
    for name in sorted(verbs):
        print(f"{name:<{width}}  {verbs[name]}")
    print()
    for code, (title, _) in codes.CODES.items():
        print(f"{code:<{width}}  {title}")
