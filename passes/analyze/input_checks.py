"""Checks of users' arguments to `build` and `verify` (S618) and of the batch (S670, S910)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Facts,
    Label,
    Refusal,
    facts_of_unknown,
    find_closest,
    kind_of,
)
from schedlang.diagnostics.source import python_span
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.propagate.original_forward import ObservedBatch

if TYPE_CHECKING:
    from schedlang.passes.propagate.propagate import Traced


BUILD_ARGUMENTS = (
    "batch",
    "loss",
    "optimizer",
    "clip",
    "weight",
    "seed",
    "dropout",
    "compare",
    "wait",
    "weights",
)
VERIFY_ARGUMENTS = ("batch", "loss", "weight", "seed", "dtype", "shrink", "timeout")
DROPOUT_KINDS = ("native", "logical")
COMPARE_KINDS = ("nothing", "build", "batches")  # what ranks compare with each other


def check_build_arguments(
    args: Sequence[object], unknown: Mapping[str, object], values: Mapping[str, Any]
) -> None:
    """Refuse positional arguments, unknown names, and values of a wrong kind in a call of `build`.

    `args` are positional arguments, `unknown` unknown ones, `values` those that `build` has.
    """
    _check_names(
        "build",
        args,
        unknown,
        BUILD_ARGUMENTS,
        "write `sch.build(batch=batch, loss=loss, optimizer=...)`",
    )
    _check_batch(values["batch"])
    _check_functions(values)
    _check_optimizer(values["optimizer"])
    _check_numbers(values)
    _check_rendezvous(values)
    if values["weights"] is not None and not isinstance(values["weights"], str | os.PathLike):
        _refuse(f"`weights` is {kind_of(values['weights'])}", "give the path of a folder or a file")


def check_verify_arguments(
    args: Sequence[object], unknown: Mapping[str, object], values: Mapping[str, Any]
) -> None:
    """Refuse wrong arguments of `verify`.

    Positional strings mean a `verify` row; Python adds such a row by `sch.row`.
    """
    words = args if all(isinstance(word, str) for word in args) else ()
    extra = () if words else args
    _check_names(
        "verify", extra, unknown, VERIFY_ARGUMENTS, "write `sch.verify(batch=batch, loss=loss)`"
    )
    if words or values["batch"] is None:
        row = ", ".join(f'"{word}"' for word in ("verify", *words))
        _refuse(
            "`verify` needs a batch to compare the program with the model",
            "give one: `sch.verify(batch=batch)`, and `loss=loss` if the model returns none",
            f"or add the row: `sch.row({row})`",
        )
    _check_functions(values)


def _check_names(
    verb: str,
    args: Sequence[object],
    unknown: Mapping[str, object],
    names: Sequence[str],
    usage: str,
) -> None:
    if args:
        _refuse(f"`{verb}` takes its arguments by name, not {kind_of(args[0])} by position", usage)
    for name in unknown:
        closest = find_closest(name, names)
        help_ = f"did you mean `{closest}`?" if closest else f"it takes {', '.join(names)}"
        _refuse(f"`{verb}` has no argument `{name}`", help_, facts=facts_of_unknown(name, names))


def _check_batch(batch: object) -> None:
    if batch is not None and not isinstance(batch, Mapping):
        _refuse(
            f"`batch` is {kind_of(batch)}, not a dict",
            "call it: `batch=batch(0)`"
            if callable(batch)
            else "give the keyword arguments of the model: `batch={'input_ids': ids, ...}`",
        )


def _check_functions(values: Mapping[str, Any]) -> None:
    signatures = {"loss": "loss(output, batch)", "weight": "weight(batch)"}
    for name, signature in signatures.items():
        value = values[name]
        if value is not None and not callable(value):
            _refuse(f"`{name}` is {kind_of(value)}", f"give a function `{signature}`")


def _check_optimizer(optimizer: object) -> None:
    if optimizer is not None and (isinstance(optimizer, type) or not callable(optimizer)):
        kind = "a class" if isinstance(optimizer, type) else kind_of(optimizer)
        _refuse(
            f"`optimizer` must be a function of the parameters, not {kind}",
            "give a function of them: `optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)`",
        )


def _check_numbers(values: Mapping[str, Any]) -> None:
    clip, seed = values["clip"], values["seed"]
    if clip is not None and (
        isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0
    ):
        _refuse(f"`clip` is {clip!r}", "give the maximum gradient norm, a number above 0")
    dropout = values["dropout"]
    if dropout is not None and dropout not in DROPOUT_KINDS:
        _refuse(f"`dropout` is {dropout!r}", f"give one of {', '.join(map(repr, DROPOUT_KINDS))}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        _refuse(f"`seed` is {seed!r}", "give an integer")


def _check_rendezvous(values: Mapping[str, Any]) -> None:
    compare, wait = values["compare"], values["wait"]
    if compare not in COMPARE_KINDS:
        _refuse(f"`compare` is {compare!r}", f"give {', '.join(map(repr, COMPARE_KINDS))}")
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait > 0:
        _refuse(f"`wait` is {wait!r}", "give the seconds to wait until all ranks call `build`")


def _refuse(title: str, *helps: str, facts: Facts = ()) -> NoReturn:
    raise Refusal.of("S618", title, Label(python_span()), helps=helps, facts=facts)


Function = Callable[..., Any]


def check_batch_keys(
    plan: Plan,
    sample: Mapping[str, Any],
    traced: Traced,
    loss: Function | None,
    weight: Function | None,
) -> None:
    """Refuse (S910) a key of the batch that neither forward, loss nor weight function reads.

    A forward takes the keys that it names, or all if it has `**kwargs`. The keys that the loss
    reads are known from the trace; the weight function is called here.
    """
    read_keys = set[str]()
    if weight is not None and traced.unread_keys:
        try:
            weight(ObservedBatch(sample, read_keys))
        except Exception:  # its errors are reported where its value is used
            return
    unread_keys = [key for key in traced.unread_keys if key not in read_keys]
    if unread_keys:
        raise Refusal(_unread_key(plan, unread_keys[0], sample, (loss, weight)))


def _unread_key(
    plan: Plan, key: str, batch: Mapping[str, Any], given: tuple[Any, Any]
) -> Diagnostic:
    from schedlang.runtime.batch import named_arguments

    names = sorted(named_arguments(plan.model.model) or ())
    accepted = ", ".join(f"`{name}`" for name in names) or "no arguments by name"
    functions = [f"`{n}`" for n, function in zip(("loss", "weight"), given) if function is not None]
    other_keys = (
        f"{' and '.join(functions)} of the model file read{'s' * (len(functions) == 1)} other keys"
    )
    unused = [name for name in names if name not in batch]
    return Diagnostic(
        "S910",
        f"neither the forward nor the loss takes `{key}` of the batch",
        notes=(
            f"the forward of `{plan.model.class_name}` takes {accepted}",
            other_keys if functions else "the model file has no `loss` to read it",
        ),
        helps=(
            f"leave `{key}` out of what `batch(seed)` returns",
            f'or read it in `loss(output, batch)`: `batch["{key}"]`',
            *((f"or rename it to an argument of the forward: `{unused[0]}`",) if unused else ()),
        ),
    )


def check_batch_rows(plan: Plan, sample: Mapping[str, Any]) -> None:
    """Refuse (S670) a batch that holds indices of its rows, such as edges of a graph or pairs.

    A part of the batch would have indices of rows of other parts.
    """
    from schedlang.runtime.batch import named_tensors, row_count
    from schedlang.runtime.propagation.sources import find_row_indices

    rows = row_count(sample)
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
    row_index = find_row_indices(plan.model.model, sample, suspects) if suspects else None
    if row_index is None:
        return
    row = next(iter(plan.rows_changing(Facet.STATE, Facet.ORDER)), None)
    raise Refusal.of(
        "S670",
        f"the batch cannot be split by rows: `{row_index.key}` holds indices of rows",
        Label(row.span) if row is not None else Label(),
        notes=(
            f"it has the index {row_index.largest}, but a part has only {row_index.size} rows:"
            f" `{row_index.call}`{row_index.line and f', at {row_index.line},'} would fail",
        ),
        helps=(
            "do not split the batch: 1 rank on the axes of `zero`, and 1 microbatch",
            "or make samples dim 0 of every tensor: graphs padded to one size,"
            " or one graph for all, `x` of [samples, nodes, features]",
            "or pass `forward` one object that is split by samples: graphs in a `Batch`"
            " of torch_geometric",
        ),
    )


@contextmanager
def add_forward_line(model: Any) -> Iterator[None]:
    """Add the line of the model's forward to S605 (a batch without rows) raised in the context."""
    try:
        yield
    except Refusal as refusal:
        diagnostic = refusal.diagnostic
        code = getattr(unwrap(type(model).forward), "__code__", None)
        # torch's own forward: its line does not help
        is_torch = type(model).__module__.startswith("torch.")
        if diagnostic.code != "S605" or code is None or is_torch:
            raise
        line = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        note = f"it is given to the forward of `{type(model).__name__}`, at {line}"
        raise Refusal(replace(diagnostic, notes=(*diagnostic.notes, note))) from None
