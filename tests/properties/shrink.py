"""Shrinking of a failure to the smallest model, mesh, batch and schedule that still fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.properties import engine
from tests.properties.models import Block, Config
from tests.properties.schedules import GENERATORS, Axes, Drawn, allowed, without
from tests.properties.splits import sequence_slices

Fails = Callable[[Drawn], bool]


def shrink(drawn: Drawn, fails: Fails) -> Drawn:
    """Replace the case by its first smaller candidate that fails, until none fails.

    Deterministic; candidates are ordered by mesh, rows, blocks, batch, settings.
    """
    tried = {drawn}
    while True:
        untried = (d for d in _candidates(drawn) if d not in tried and not tried.add(d))  # type: ignore[func-returns-value]
        smaller = next((d for d in untried if fails(d)), None)
        if smaller is None:
            return drawn
        drawn = smaller


def _candidates(drawn: Drawn) -> Iterator[Drawn]:
    config, axes = drawn.config, drawn.axes
    for index, (name, size) in enumerate(axes):
        for smaller_size in range(1, size):
            yield _keep_offered(
                drawn, axes=(*axes[:index], (name, smaller_size), *axes[index + 1 :])
            )
        if size == 1 and len(axes) > 1:
            yield _keep_offered(drawn, axes=(*axes[:index], *axes[index + 1 :]))
    yield from (without(drawn, removed_step) for removed_step in drawn.steps)
    for removed_block in range(len(config.blocks) if len(config.blocks) > 1 else 0):
        yield _drop_block(drawn, removed_block)
    if drawn.spare:
        yield replace(drawn, spare=0)
    if drawn.length > 1:
        yield from (replace(drawn, length=smaller_size) for smaller_size in (1, drawn.length - 1))
    yield from (_keep_offered(drawn, config=simple) for simple in _simpler_configs(config))


def _simpler_configs(config: Config) -> Iterator[Config]:
    """Yield configurations with one setting or one block set to its default."""
    default = Config()
    names = ("skip", "frozen", "dropout", "mask", "side", "tied", "returns", "entry", "use", "seed")
    for name in names:
        if getattr(config, name) != getattr(default, name):
            tied = {"tied": False} if name == "entry" else {}
            yield replace(config, **{name: getattr(default, name), **tied})
    for index, block in enumerate(config.blocks):
        for simple in (Block(), Block(block.kind)):
            if block not in (simple, Block()):
                yield replace(
                    config, blocks=(*config.blocks[:index], simple, *config.blocks[index + 1 :])
                )


def _keep_offered(drawn: Drawn, config: Config | None = None, axes: Axes | None = None) -> Drawn:
    """Keep only the steps that the changed model or mesh still offers."""
    config, axes = config or drawn.config, axes or drawn.axes
    sizes = dict(axes)
    makers = (*GENERATORS.values(), sequence_slices)
    offers = [offer for make in makers for offer in make(config, sizes, drawn.length)]
    steps_ = [offer for offer in drawn.steps if offer in offers]
    return replace(drawn, config=config, axes=axes, steps=allowed(steps_, config, axes))


def _drop_block(drawn: Drawn, removed: int) -> Drawn:
    """Remove one block; rows of later blocks are renumbered."""
    config = drawn.config
    blocks = (*config.blocks[:removed], *config.blocks[removed + 1 :])
    smaller_config = replace(config, blocks=blocks, skip=None, frozen="")
    moved_steps = []
    for moved_step in drawn.steps:
        rows = [_renumber_row(row, removed) for row in moved_step.rows]
        if all(row is not None for row in rows):
            claims = frozenset(str(_renumber_row(claim, removed)) for claim in moved_step.claims)
            moved_steps.append(replace(moved_step, rows=tuple(map(str, rows)), claims=claims))
    return _keep_offered(replace(drawn, steps=tuple(moved_steps)), config=smaller_config)


def _renumber_row(row: str, removed: int) -> str | None:
    """Renumber a row after a block is removed; None if it is about that block."""
    parts = row.split("blocks.")
    if len(parts) == 1:
        return row
    block = parts[1].split()[0].split(".")[0]
    if block == "*":
        return row
    index = int(block)
    if index == removed:
        return None
    return row.replace(f"blocks.{index}", f"blocks.{index - 1}") if index > removed else row


def fails_by_difference(pool: Any, form: Any = engine.cheap) -> Fails:
    """Return a function: whether a drawn schedule runs and differs from its original."""

    def fails(drawn: Drawn) -> bool:
        try:
            engine.check(drawn, pool, form)
        except engine.Differs:
            return True
        except Exception:  # not the failure that is shrunk
            return False
        return False

    return fails


def reproducer(drawn: Drawn) -> str:
    """Return text that reproduces a failure: schedule file, model, and both as Python."""
    return f"# {drawn.config}\n# rows={drawn.rows} length={drawn.length}\n{drawn.text}\n{drawn!r}"


def shrinking(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test: its failures are shrunk again after hypothesis, and printed."""

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except engine.Differs as failure:
            smallest = shrink(failure.drawn, fails_by_difference(failure.engine, failure.form))
            print(f"\nThe least that fails:\n\n{reproducer(smallest)}")
            raise

    return wrapped
