"""After a failure: the smallest model, mesh, batch and schedule that still fail, as a file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.properties import engine
from tests.properties.models import Block, Config
from tests.properties.schedules import GENERATORS, Axes, Drawn, allowed, without
from tests.properties.splits import along

Fails = Callable[[Drawn], bool]


def shrink(drawn: Drawn, fails: Fails) -> Drawn:
    """The first smaller candidate that fails, again and again until none does.

    Deterministic; candidates are tried in the order mesh, rows, blocks, batch, settings.
    """
    seen = {drawn}
    while True:
        fresh = (d for d in _smaller(drawn) if d not in seen and not seen.add(d))  # type: ignore[func-returns-value]
        found = next((d for d in fresh if fails(d)), None)
        if found is None:
            return drawn
        drawn = found


def _smaller(drawn: Drawn) -> Iterator[Drawn]:
    config, axes = drawn.config, drawn.axes
    for place, (name, size) in enumerate(axes):
        for less in range(1, size):
            yield _fitted(drawn, axes=(*axes[:place], (name, less), *axes[place + 1 :]))
        if size == 1 and len(axes) > 1:
            yield _fitted(drawn, axes=(*axes[:place], *axes[place + 1 :]))
    yield from (without(drawn, one) for one in drawn.steps)
    for gone in range(len(config.blocks) if len(config.blocks) > 1 else 0):
        yield _renumbered(drawn, gone)
    if drawn.spare:
        yield replace(drawn, spare=0)
    if drawn.length > 1:
        yield from (replace(drawn, length=less) for less in (1, drawn.length - 1))
    yield from (_fitted(drawn, config=simple) for simple in _simpler(config))


def _simpler(config: Config) -> Iterator[Config]:
    """One setting, or one block, as by default."""
    plain = Config()
    names = ("skip", "frozen", "dropout", "mask", "side", "tied", "returns", "entry", "use", "seed")
    for name in names:
        if getattr(config, name) != getattr(plain, name):
            tied = {"tied": False} if name == "entry" else {}
            yield replace(config, **{name: getattr(plain, name), **tied})
    for place, block in enumerate(config.blocks):
        for simple in (Block(), Block(block.kind)):
            if block not in (simple, Block()):
                yield replace(
                    config, blocks=(*config.blocks[:place], simple, *config.blocks[place + 1 :])
                )


def _fitted(drawn: Drawn, config: Config | None = None, axes: Axes | None = None) -> Drawn:
    """The steps that another model or mesh still offers."""
    config, axes = config or drawn.config, axes or drawn.axes
    sizes = dict(axes)
    makers = (*GENERATORS.values(), along)
    offers = [one for make in makers for one in make(config, sizes, drawn.length)]
    kept = [one for one in drawn.steps if one in offers]
    return replace(drawn, config=config, axes=axes, steps=allowed(kept, config, axes))


def _renumbered(drawn: Drawn, gone: int) -> Drawn:
    """Without one block: rows of later ones move to the block before."""
    config = drawn.config
    blocks = (*config.blocks[:gone], *config.blocks[gone + 1 :])
    left = replace(config, blocks=blocks, skip=None, frozen="")
    moved = []
    for one in drawn.steps:
        rows = [_moved(row, gone) for row in one.rows]
        if all(row is not None for row in rows):
            claims = frozenset(str(_moved(claim, gone)) for claim in one.claims)
            moved.append(replace(one, rows=tuple(map(str, rows)), claims=claims))
    return _fitted(replace(drawn, steps=tuple(moved)), config=left)


def _moved(row: str, gone: int) -> str | None:
    """A row below a block that is gone; None if it is about that block."""
    words = row.split("blocks.")
    if len(words) == 1:
        return row
    said = words[1].split()[0].split(".")[0]
    if said == "*":
        return row
    place = int(said)
    if place == gone:
        return None
    return row.replace(f"blocks.{place}", f"blocks.{place - 1}") if place > gone else row


def differs(pool: Any, form: Any = engine.cheap) -> Fails:
    """Whether a drawn schedule is run and is not its original."""

    def fails(drawn: Drawn) -> bool:
        try:
            engine.check(drawn, pool, form)
        except engine.Differs:
            return True
        except Exception:  # another failure than the one that is shrunk
            return False
        return False

    return fails


def told(drawn: Drawn) -> str:
    """What reproduces a failure: the schedule as a file, the model, and both as Python."""
    return f"# {drawn.config}\n# rows={drawn.rows} length={drawn.length}\n{drawn.text}\n{drawn!r}"


def shrinking(test: Callable[..., None]) -> Callable[..., None]:
    """A test whose failures are shrunk once more when hypothesis has done, and printed."""

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except engine.Differs as failure:
            least = shrink(failure.drawn, differs(failure.engine, failure.form))
            print(f"\nThe least that fails:\n\n{told(least)}")
            raise

    return wrapped
