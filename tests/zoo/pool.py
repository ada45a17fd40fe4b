"""A pool of ranks that run every job with a bug in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from schedlang.runtime.launch.pool import Pool
from tests.zoo.bug import Bug, Patch, mutate, patched


class Mutated:
    """A pool whose ranks are mutated: by a bug, its name (`T02@blocks.1`), or a function."""

    def __init__(self, pool: Pool, mutant: Bug | str | Callable[[Patch], None]) -> None:
        self.pool = pool
        # by name: a bug is looked up where it is injected
        self.mutant = mutant.id if isinstance(mutant, Bug) else mutant

    def run(self, fn: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
        """As Pool.run."""
        if getattr(self.pool, "one_process", False):  # its ranks run what is patched here
            if (meanwhile := options.pop("meanwhile", None)) is not None:
                meanwhile()  # what is no rank's is not mutated
            with _injected(self.mutant):
                return self.pool.run(fn, world, *args, **options)
        return self.pool.run(_mutated, world, self.mutant, fn, args, **options)


def _mutated(mutant: Any, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    import tests.zoo  # noqa: F401  (all bugs are entered)

    with _injected(mutant):
        return fn(*args)


@contextmanager
def _injected(mutant: Any) -> Iterator[None]:
    if isinstance(mutant, str):
        with mutate(mutant):
            yield
    else:
        with patched() as patch:
            mutant(patch)
            yield
