"""Who takes what of a batch: refuses a key that nobody takes, and rows that cannot be split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import unwrap
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet

Function = Callable[..., Any]


def check_keys(
    plan: Plan, sample: Mapping[str, Any], loss: Function | None, weight: Function | None
) -> None:
    """Every key of a batch is for the forward, the loss or the weight; else refuse (S910).

    A forward takes the keys that it names, or all if it has `**kwargs`; what the others take is
    seen by calling them, without values.
    """
    from schedlang.runtime.batch import named_arguments

    names = named_arguments(plan.model.model)
    rest = tuple(key for key in sample if names is not None and key not in names)
    done: Any = plan.model.cache.setdefault("keys that are taken", {})
    key = rest, id(loss), id(weight)
    if not rest or key in done:
        return
    read = _read(plan, sample, loss, weight)
    lost = [key for key in rest if read is not None and key not in read]
    if lost:
        raise Refusal(_nobody(plan, lost[0], sample, (loss, weight)))
    done[key] = loss, weight  # kept, so that no other gets their identity


def _nobody(plan: Plan, key: str, batch: Mapping[str, Any], others: tuple[Any, Any]) -> Diagnostic:
    from schedlang.runtime.batch import named_arguments

    names = sorted(named_arguments(plan.model.model) or ())
    said = ", ".join(f"`{name}`" for name in names) or "no arguments by name"
    functions = [f"`{n}`" for n, one in zip(("loss", "weight"), others) if one is not None]
    told = (
        f"{' and '.join(functions)} of the model file read{'s' * (len(functions) == 1)} other keys"
    )
    free = [name for name in names if name not in batch]
    return Diagnostic(
        "S910",
        f"neither the forward nor the loss takes `{key}` of the batch",
        notes=(
            f"the forward of `{plan.model.class_name}` takes {said}",
            told if functions else "the model file has no `loss` to read it",
        ),
        helps=(
            f"leave `{key}` out of what `batch(seed)` returns",
            f'or read it in `loss(output, batch)`: `batch["{key}"]`',
            *((f"or rename it to an argument of the forward: `{free[0]}`",) if free else ()),
        ),
    )


class Reading(dict[str, Any]):
    """A batch that notes which of its keys are read."""

    def __init__(self, batch: Mapping[str, Any], seen: set[str]) -> None:
        super().__init__(batch)
        self.seen = seen

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        self.seen.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """As of a dict."""
        self.seen.add(key)
        return super().pop(key, *default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.seen.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        """As of a dict."""
        self.seen.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        """As of a dict."""
        self.seen.update(super().keys())
        return super().values()

    def items(self) -> Any:
        """As of a dict."""
        self.seen.update(super().keys())
        return super().items()


def _read(
    plan: Plan, sample: Mapping[str, Any], loss: Function | None, weight: Function | None
) -> set[str] | None:
    """The keys that `loss` and `weight` read; None if they cannot be called without values."""
    import torch

    from schedlang.runtime.batch import called
    from schedlang.runtime.tracing.constants import on_meta
    from schedlang.runtime.tracing.meta import hollow_batch, hollow_model

    seen: set[str] = set()
    model, inputs = hollow_model(plan.model.model, {}), hollow_batch(dict(sample))
    model.train()
    try:
        if weight is not None:
            weight(Reading(sample, seen))
        if loss is not None:
            with on_meta(sample, inputs), torch.device("meta"), torch.no_grad():
                loss(called(model, inputs), Reading(inputs, seen))
    except Exception:  # whatever they raise is told where they are called in earnest
        return None
    return seen


def check_rows(plan: Plan, sample: Mapping[str, Any]) -> None:
    """Refuse (S670) a batch whose parts name rows of each other: edges of a graph, pairs."""
    from schedlang.runtime.batch import named_tensors, rows_of
    from schedlang.runtime.tracing.numbered import names_rows

    rows = rows_of(sample)
    suspects = {
        key: value
        for key, value in named_tensors(sample, inside=False).items()
        if value.ndim
        and value.shape[0] != rows
        and not value.is_meta
        and value.numel()
        and not value.is_floating_point()
        and not value.is_complex()
        and int(value.max()) >= rows
    }
    found = names_rows(plan.model.model, sample, suspects) if suspects else None
    if found is None:
        return
    row = next(iter(plan.rows_changing(Facet.STATE, Facet.ORDER)), None)
    raise Refusal(
        Diagnostic(
            "S670",
            f"the batch cannot be split by rows: `{found.key}` holds indices of rows",
            Label(row.span) if row is not None and row.span is not None else Label(),
            notes=(
                f"it has the index {found.largest}, but a part has only {found.size} rows:"
                f" `{found.call}`{found.line and f', at {found.line},'} would fail",
            ),
            helps=(
                "do not split the batch: 1 rank on the axes of `zero`, and 1 microbatch",
                "or make samples dim 0 of every tensor: graphs padded to one size,"
                " or one graph for all, `x` of [samples, nodes, features]",
                "or pass `forward` one object that is split by samples: graphs in a `Batch`"
                " of torch_geometric",
            ),
        )
    )


@contextmanager
def at_the_forward(model: Any) -> Iterator[None]:
    """A batch without rows (S605) is told with the line of the forward that is given it."""
    try:
        yield
    except Refusal as refusal:
        first = refusal.diagnostic
        code = getattr(unwrap(type(model).forward), "__code__", None)
        theirs = type(model).__module__.startswith("torch.")  # whose line says nothing
        if first.code != "S605" or code is None or theirs:
            raise
        line = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        note = f"it is given to the forward of `{type(model).__name__}`, at {line}"
        raise Refusal(replace(first, notes=(*first.notes, note))) from None
