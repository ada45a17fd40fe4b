"""A pool whose ranks run every job with an injected bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from schedlang.runtime.launch.pool import Pool
from tests.zoo.bug import Bug, Patch, mutate, patched


class Mutated:
    """A pool with a mutation on all ranks: a bug, its spec (`T02@blocks.1`), or a function."""

    def __init__(self, pool: Pool, mutant: Bug | str | Callable[[Patch], None]) -> None:
        self.pool = pool
        # a bug is sent by name and looked up on each rank
        self.mutant = mutant.id if isinstance(mutant, Bug) else mutant

    def run(self, fn: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
        """Run a job as Pool.run, with the mutation."""
        if getattr(self.pool, "one_process", False):  # its ranks share the patches of this process
            if (meanwhile := options.pop("meanwhile", None)) is not None:
                meanwhile()  # code outside of ranks is not mutated
            with _inject(self.mutant):
                return self.pool.run(fn, world, *args, **options)
        return self.pool.run(_run_mutated, world, self.mutant, fn, args, **options)


def _run_mutated(mutant: Any, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    import tests.zoo  # noqa: F401  (registers all bugs)

    with _inject(mutant):
        return fn(*args)


@contextmanager
def _inject(mutant: Any) -> Iterator[None]:
    if isinstance(mutant, str):
        with mutate(mutant):
            yield
    else:
        with patched() as patch:
            mutant(patch)
            yield
