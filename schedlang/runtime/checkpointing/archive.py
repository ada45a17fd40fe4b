"""Save the state of a program under any layout, and load it under any other.

`save` and `load` are called by `Program.save` and `Program.load`, on all ranks together.
"""

from __future__ import annotations

import io
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, quote_names
from schedlang.runtime.checkpointing import added_buffers, checkpoint_folders
from schedlang.runtime.checkpointing.boxes import (
    BoxedTensor,
    describe_failure,
    is_out_of_memory,
    out_of_memory,
    read_together,
    read_value,
    without_function_modes,
    write_file,
    write_index,
    zeros,
)
from schedlang.runtime.checkpointing.holdings import Holding
from schedlang.runtime.checkpointing.index import (
    CONTENTS,
    DTYPE_NAMES,
    DTYPES,
    Index,
    Unreadable,
    index_state,
)
from schedlang.runtime.checkpointing.optimizer_state import (
    RARE,
    SavedOptimizer,
    describe_optimizer,
    describe_residue,
    empty_residue,
    group_mismatch,
    load_optimizer,
    optimizer_tensors,
    residue_tensors,
    restore_residue,
    trained_parameters,
)
from schedlang.runtime.checkpointing.plain_values import is_plain, is_table, plain_tree
from schedlang.runtime.comm import world as comm
from schedlang.runtime.grad_reduction.zero import reshard_all
from schedlang.runtime.storage.folder import run_on_all_ranks
from schedlang.runtime.storage.offloaded_gradients import local_tensor
from schedlang.runtime.storage.quantized_parameters import open_quantized

if TYPE_CHECKING:
    from schedlang.runtime.program import Program

# ---- Checks of the contents of a checkpoint (all but the tensors).
# A folder may hold anything, whoever wrote it. So all contents are checked before the program is
# changed: each entry must exist, with the right type and in its bounds.


VERSION = 1
_MOST = 1 << 62
Predicate = Callable[[Any], bool]


def check_contents(table: Any) -> dict[str, Any]:
    """Return the contents of a checkpoint, as `save` writes them. Raises Unreadable."""
    if not isinstance(table, dict) or table.get("version") != VERSION:
        raise Unreadable(f"its version is not {VERSION}")
    _check_entries(
        table,
        "",
        step=_is_count,
        optimizer=_is_dict,
        parameters=_table_of(_is_shape),
        buffers=_table_of(_is_shape),
        dtypes=_table_of(_is_dtype),
        ties=_list_of(_list_of(_is_text)),
    )
    added_buffers.check_added(table)
    missing = (table["parameters"].keys() | table["buffers"].keys()) - table["dtypes"].keys()
    if missing:
        raise Unreadable(f"the dtype of `{min(missing)}` is missing")
    _check_optimizer_entries(table["optimizer"])
    if (sums := table.get("sums")) is not None:
        _check_entries(
            sums,
            "sums.",
            step=_is_count,
            places=lambda n: _is_count(n) and 0 < n <= 1 << 20,
            errors=_table_of(_is_dtype),
            starts=_table_of(_is_start),
        )
    if (scale := table.get("loss scale")) is not None:
        _check_entries(scale, "loss scale.", scale=_is_scale, good=_is_count)
    return table


def _check_optimizer_entries(optim: dict[str, Any]) -> None:
    _check_entries(
        optim,
        "optimizer.",
        kind=lambda kind: kind is None or _is_text(kind),
        groups=_list_of(_table_of(is_plain)),
        of=_table_of(_is_count),
        parts=_table_of(_table_of(_is_dtype)),
        values=_table_of(_table_of(is_plain)),
    )
    if extra := optim.keys() - {"kind", "groups", "of", "parts", "values", *RARE}:
        raise Unreadable(f"`optimizer` has an unknown entry: `{min(map(str, extra))}`")
    for section in RARE:
        if not (optim.get(section, {}) == {} or is_table(optim[section])):
            raise Unreadable(f"`optimizer.{section}` has a wrong type")
    if any(number >= len(optim["groups"]) for number in optim["of"].values()):
        raise Unreadable("`optimizer.of` names a group that does not exist")
    if any({"params", "param_names"} & group.keys() for group in optim["groups"]):
        raise Unreadable("a group of the optimizer has its own parameters")
    for section in ("parts", "values"):
        if odd := optim[section].keys() - optim["of"].keys():
            raise Unreadable(f"`optimizer.{section}` names `{min(odd)}`, which it did not train")
    for name, values in optim["values"].items():
        if duplicate := values.keys() & optim["parts"].get(name, {}).keys():
            raise Unreadable(f"`{min(duplicate)}` of `{name}` is in the optimizer's state twice")


def _check_entries(table: Any, prefix: str, **predicates: Predicate) -> None:
    """Check that each of these entries exists and has the right type."""
    if not isinstance(table, dict):
        raise Unreadable(f"`{prefix.rstrip('.')}` is not a table")
    for key, predicate in predicates.items():
        if key not in table:
            raise Unreadable(f"`{prefix}{key}` is missing")
        if not predicate(table[key]):
            raise Unreadable(f"`{prefix}{key}` has a wrong type")


# -- kinds -----------------------------------------------------------------------------------------


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and value in DTYPES


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value))


def _is_start(value: Any) -> bool:
    """Return whether a value is the size and dtype of a start of a power iteration."""
    pair = isinstance(value, list | tuple) and len(value) == 2
    return pair and _is_shape(value[0]) and len(value[0]) == 2 and _is_dtype(value[1])


def _is_scale(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value) and value > 0


def _table_of(check: Predicate) -> Predicate:
    def of_each(table: Any) -> bool:
        return isinstance(table, dict) and all(_is_text(k) and check(v) for k, v in table.items())

    return of_each


def _list_of(predicate: Predicate) -> Predicate:
    return lambda value: isinstance(value, list | tuple) and all(map(predicate, value))


# ---- Saving and loading.


BESIDE = ("beside",)  # path of data of a caller, by rank
_Model = dict[str, Tensor]  # parts of this rank
_Moments = dict[tuple[str, str], Tensor]
_Found = tuple[dict[str, Any], SavedOptimizer, _Model, _Moments, list[BoxedTensor]]
PATIENCE = 20.0  # seconds to retry a load while another job saves and removes checkpoints

FAILURES = (OSError, Unreadable)

SAME_MODEL = "build the program of a model with these names: the model that was saved"
TRAINED = "build the program with the `freeze` rows and `requires_grad` that it was saved under"


def save(
    program: Program,
    path: str | os.PathLike[str],
    keep: int | None = 3,
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Save parameters, buffers, optimizer and step count as a new checkpoint; all ranks together.

    `path` is a folder of checkpoints, that of rank 0: each has a folder of its own,
    `step-00000012`, and `latest` names the last one when it is completely on the disk. Then
    `keep - 1` older ones stay (None: all). Each rank writes the parts for which it is primary, as
    boxes of full tensors by original name, in the format of torch.distributed.checkpoint, and plain
    data, `beside`. Raises Refusal S631, S632, S637 or S638 on all ranks; then every older
    checkpoint is unchanged.
    """
    prepare_checkpoint(program, path, keep, beside).write()


@dataclass(frozen=True)
class PreparedCheckpoint:
    """A checkpoint whose values are known and not written yet; `write` writes them."""

    target: Path
    id: str
    step: int
    rank: int
    world: int
    keep: int | None
    tensors: Iterable[BoxedTensor]  # read once
    values: dict[tuple[str, ...], Any]

    def write(self) -> None:
        """Fill the folder, all ranks together. Raises Refusal S631, S632 or S638 on all ranks."""
        diagnose = partial(_unwritten, self.target, f"rank {self.rank}: " if self.world > 1 else "")

        def fill(folder: Path) -> None:
            written = run_on_all_ranks(
                lambda: write_file(folder, self.id, self.rank, self.tensors, self.values),
                diagnose,
                (Exception,),
            )
            files = comm.gather_object(written)
            run_on_all_ranks(
                lambda: write_index(folder, self.id, files) if self.rank == 0 else None, diagnose
            )

        checkpoint_folders.save_step(
            self.target, self.id, self.step, self.rank, self.keep, fill, diagnose
        )


def prepare_checkpoint(
    program: Program,
    path: str | os.PathLike[str],
    keep: int | None,
    beside: Mapping[str, Any] | None,
) -> PreparedCheckpoint:
    """Collect the values to save, with the program's own tensors; all ranks together.

    Raises Refusal S631 or S637 on all ranks.
    """
    a = program.assembly
    world, rank = a.ranks.mesh.world, a.ranks.rank
    if keep is not None and (type(keep) is not int or keep < 1):
        raise _bad_keep(keep)
    beside_data = run_on_all_ranks(
        lambda: _check_beside(beside), lambda error: Diagnostic("S637", str(error)), (ValueError,)
    )
    folder = checkpoint_folders.resolve_folder(path)
    target, id_ = comm.broadcast_object(0, (folder, secrets.token_hex(8)))
    moments = describe_optimizer(program)
    contents = {
        "version": VERSION,
        "step": program.step,
        "optimizer": moments.plain(),
        "parameters": {name: list(h.layout.shape) for name, h in a.holdings.items()},
        "buffers": {name: list(buffer.shape) for name, buffer in a.saved_buffers.items()},
        "dtypes": tensor_dtypes(program),
        "ties": [list(names) for names in a.ties],
        "sums": describe_residue(program),
        "loss scale": program.loss_scale.state() if program.loss_scale is not None else None,
    }
    added_buffers.describe_added(a, contents)
    values: dict[tuple[str, ...], Any] = {CONTENTS: contents} if rank == 0 else {}
    if beside_data is not None:
        values[*BESIDE, str(rank)] = beside_data
    parts = model_parts(program) | a.added_buffers
    tensors = _box_tensors(program, parts, optimizer_tensors(program))
    tensors += residue_tensors(program)
    return PreparedCheckpoint(target, id_, program.step, rank, world, keep, tensors, values)


def _check_beside(beside: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the data of `beside`, as it will be read. Raises ValueError if it cannot be."""
    if beside is None:
        return None
    checked: dict[str, Any] = {}
    for name, value in beside.items():
        try:
            with without_function_modes():
                data = io.BytesIO()
                torch.save(plain_tree(value), data)
                data.seek(0)
                checked[name] = torch.load(data, "cpu", weights_only=True)
        except Exception as error:  # any error of pickle or of the loader of plain data
            raise ValueError(
                f"`{name}` cannot be saved beside a checkpoint: it must be made of tensors, "
                "numbers, strings, and dicts and lists of these"
            ) from error
    return checked


def read_beside(path: str | os.PathLike[str], rank: int = 0) -> dict[str, Any] | None:
    """Read the data that a rank has saved beside the last checkpoint of a folder, or a given one.

    Return None if there are none; each rank reads for itself. Raises Refusal S633.
    """
    folder = target = checkpoint_folders.resolve_folder(path)
    try:
        target, id_ = checkpoint_folders.find_checkpoint(folder)
        index = checkpoint_folders.checked_index(target, id_)
        path_in_index = (*BESIDE, str(rank))
        if ".".join(path_in_index) not in index.values:
            return None
        table = read_value(target, index, path_in_index)
        if not isinstance(table, dict):
            raise Unreadable(f"`{'.'.join(path_in_index)}` is not a table")
    except FAILURES as error:
        raise Refusal(_unread(folder, target, error)) from None
    return table


def load(program: Program, path: str | os.PathLike[str], fresh: bool = False) -> None:
    """Load a checkpoint of `save`, under any layout; all ranks together.

    `path` is a folder of checkpoints, of which the last is loaded, or one of these. A `fresh`
    program has no values to lose: the new ones are read directly into its parts. A program without
    optimizer loads the rest. Nothing that is read is executed. Raises Refusal S633 (unreadable,
    damaged), S634 (names), S635 (shapes, dtypes) or S636 (optimizer) on all ranks, before anything
    is changed.
    """
    folder = comm.broadcast_object(0, checkpoint_folders.resolve_folder(path))
    end = time.monotonic() + PATIENCE
    while True:
        unread = partial(_unread, folder, folder)
        last = run_on_all_ranks(lambda: _last(program, folder), unread, FAILURES)
        target, id_ = comm.broadcast_object(0, last)
        try:
            contents_read = _read(program, folder, target, id_, fresh)
            break
        except Refusal as refusal:  # another job may have saved, and removed this one
            missed = refusal.diagnostic.code == "S633"
            retries = missed and _has_new_checkpoint(folder, target) and time.monotonic() < end
            if not comm.broadcast_object(0, retries):
                raise
    contents, optim, model, moments, sums = contents_read
    added_buffers.set_added(program.assembly, contents, model)
    if not fresh:
        _copy_values(program, model)
    load_optimizer(program, optim, moments)
    restore_residue(program, contents.get("sums"), sums)
    if program.loss_scale is not None:
        program.loss_scale.restore(contents.get("loss scale"))
    program.step = contents["step"]
    settle_loaded(program)


def settle_loaded(program: Program) -> None:
    """Move new values to their tiers; free parameters that were gathered from the old ones."""
    reshard_all(program.assembly.sliced)
    if program.offloaded is not None:
        program.offloaded.store_all(program.optimizer)


def _last(program: Program, folder: Path) -> tuple[Path, str | None]:
    """Return on the first rank the checkpoint to load; on others the folder."""
    is_first = program.assembly.ranks.rank == 0
    return checkpoint_folders.find_checkpoint(folder) if is_first else (folder, None)


def _has_new_checkpoint(folder: Path, target: Path) -> bool:
    """Return whether another checkpoint than `target` is the last one now."""
    try:
        return checkpoint_folders.find_checkpoint(folder)[0] != target
    except FAILURES:
        return False


def _read(
    program: Program, folder: Path, target: Path, id_: str | None, fresh: bool = False
) -> _Found:
    """Read and check this rank's parts of a checkpoint; those of the model in place if `fresh`."""

    def reading(step: Callable[[], Any]) -> Any:  # a crafted folder may raise anything
        return run_on_all_ranks(step, partial(_unread, folder, target), (Exception,))

    state, index, contents = reading(lambda: _read_contents(target, id_))
    fingerprint = comm.broadcast_object(0, index.fingerprint)
    reading(lambda: _check_unchanged(target, state, index.fingerprint == fingerprint))
    optim = SavedOptimizer(**contents["optimizer"])
    _check_fit(program, contents, optim)
    model, moments, sums = reading(lambda: _allocate(program, contents, optim, fresh))
    mesh = program.assembly.ranks.mesh
    shardings = {name: held.sharding(mesh) for name, held in program.assembly.holdings.items()}
    sharding_of_key = {f"model.{name}": sharding for name, sharding in shardings.items()}
    for name in filter(shardings.__contains__, optim.parts):  # same order on all ranks
        sharding_of_key |= {
            f"optim.state.{name}.{key}": shardings[name] for key in optim.parts[name]
        }
    tensors = [*_box_tensors(program, model, moments), *sums]
    read_together(target, index, tensors, sharding_of_key, partial(_unread, folder, target))
    reading(lambda: _check_unchanged(target, state))
    return contents, optim, model, moments, sums


def _allocate(
    program: Program, contents: Mapping[str, Any], optim: SavedOptimizer, fresh: bool
) -> tuple[_Model, _Moments, list[BoxedTensor]]:
    """Return tensors for the parts of this rank: model, optimizer state, compressed reductions."""
    model = model_parts(program)
    if not fresh:
        model = {name: zeros(part.shape, part.dtype) for name, part in model.items()}
    model |= added_buffers.empty_added(contents)
    moments = {
        (name, key): zeros(local_tensor(parameter).shape, DTYPES[dtype])
        for name, parameter in trained_parameters(program).items()
        for key, dtype in optim.parts.get(name, {}).items()
    }
    return model, moments, empty_residue(program, contents.get("sums"))


def _check_unchanged(target: Path, state: tuple[int, ...], same_index: bool = True) -> None:
    if not same_index:
        raise Unreadable("the ranks have read different checkpoints")
    if index_state(target) != state:
        raise Unreadable("it was changed while it was read")


# -- tensors to save -------------------------------------------------------------------------------


def model_parts(program: Program) -> dict[str, Tensor]:
    """Return this rank's parts of parameters, and all buffers, to be written in place."""
    a = program.assembly
    parts = {name: local_tensor(parameter) for name, parameter in a.parameters.items()}
    return parts | {name: buffer.detach() for name, buffer in a.saved_buffers.items()}


def tensor_dtypes(program: Program) -> dict[str, str]:
    """Return the dtypes of all parameters, also those of other ranks, and of buffers."""
    tensors = {**dict(program.assembly.module.named_parameters()), **program.assembly.saved_buffers}
    return {name: DTYPE_NAMES[t.dtype] for name, t in tensors.items()}


def _box_tensors(program: Program, model: _Model, moments: _Moments) -> list[BoxedTensor]:
    """Return these parts as boxes of full tensors, each written by one of its ranks."""
    a = program.assembly
    mesh, rank = a.ranks.mesh, a.ranks.rank

    def boxed(path: tuple[str, ...], holding: Holding, part: Tensor) -> BoxedTensor:
        held_part, primary = holding.part(mesh, rank), holding.is_primary(mesh, rank)
        return BoxedTensor(path, part, holding.layout.shape, held_part, primary)

    holders = {n: a.holdings.get(n) or a.buffer_holding(n, part.shape) for n, part in model.items()}
    boxed_model = [boxed(("model", name), holders[name], part) for name, part in model.items()]
    return boxed_model + [
        boxed(("optim", "state", *key), holders[key[0]], part) for key, part in moments.items()
    ]


# -- checks ----------------------------------------------------------------------------------------


def _read_contents(target: Path, id_: str | None) -> tuple[tuple[int, ...], Index, dict[str, Any]]:
    """Return the index and contents of a checkpoint, and the state of the index file."""
    index = checkpoint_folders.checked_index(target, id_)
    return index_state(target), index, check_contents(read_value(target, index, CONTENTS))


def _check_fit(program: Program, contents: Mapping[str, Any], optim: SavedOptimizer) -> None:
    """Raise the same Refusal on all ranks if the checkpoint does not fit the program."""
    a = program.assembly
    shapes = {name: list(holding.layout.shape) for name, holding in a.holdings.items()}
    shapes |= {name: list(buffer.shape) for name, buffer in a.saved_buffers.items()}
    saved = added_buffers.other_shapes(a, contents)
    _same_names("S634", "the checkpoint does not fit this model", saved, shapes, SAME_MODEL)
    dtypes = tensor_dtypes(program)
    for name, shape in shapes.items():
        built, stored = (dtypes[name], shape), (contents["dtypes"][name], saved[name])
        if built != stored:
            raise Refusal.of(
                "S635",
                f"`{name}` was saved as {_describe_kind(stored)}, but is {_describe_kind(built)}",
                helps=("load it into a program of the same model and dtype",),
            )
    check_optimizer(program, optim)


def check_optimizer(program: Program | None, optim: SavedOptimizer) -> bool:
    """Refuse the state of another optimizer (S636); return whether any rank can load it.

    `program` is None on a rank that has no part of it.
    """
    optimizer = None if program is None else program.optimizer
    kind = type(optimizer).__qualname__ if optimizer is not None else None
    trained = list(trained_parameters(program)) if program is not None else []
    described = comm.distinct_objects((kind, trained))
    kinds = [kind for kind, _ in described if kind is not None]
    if kinds:
        _check_optimizer(kinds[0], {name for _, names in described for name in names}, optim)
        odd = group_mismatch(program, optim) if program is not None else ""
        if odd := next(filter(None, comm.distinct_objects(odd)), ""):
            raise _other_optimizer(odd)
    return bool(kinds)


def _check_optimizer(kind: str, names: set[str], optim: SavedOptimizer) -> None:
    if optim.kind is None:
        raise _other_optimizer("the checkpoint was saved without an optimizer")
    if optim.kind != kind:
        raise _other_optimizer(f"it was saved from `{optim.kind}`, but the program has `{kind}`")
    _same_names(
        "S636", "the optimizer of the checkpoint trained other parameters", optim.of, names, TRAINED
    )


def _same_names(
    code: str, message: str, saved: Iterable[str], model_names: Iterable[str], help_: str
) -> None:
    missing, unknown = sorted(set(model_names) - set(saved)), sorted(set(saved) - set(model_names))
    notes = [f"missing in the checkpoint: {quote_names(missing)}"] if missing else []
    notes += [f"not in the model: {quote_names(unknown)}"] if unknown else []
    if notes:
        raise Refusal.of(code, message, notes=tuple(notes), helps=(help_,))


def _copy_values(program: Program, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad(), open_quantized(program.assembly.parameters.values()):
        for name, part in model_parts(program).items():
            part.copy_(values[name])


# -- messages --------------------------------------------------------------------------------------


def _describe_kind(kind: tuple[str, list[int]]) -> str:
    return f"{kind[0]}{kind[1]}"


def _unwritten(target: Path, prefix: str, error: BaseException) -> Diagnostic:
    return Diagnostic(
        "S631",
        f"cannot write a checkpoint into `{target}`",
        notes=(prefix + describe_failure(error), "what was there before is unchanged"),
        helps=("give a different folder, one that every rank can write",),
    )


def _bad_keep(keep: Any) -> Refusal:
    return Refusal.of(
        "S631",
        f"`keep` must be None, or 1 or more, not {keep!r}",
        notes=("the new checkpoint is always kept",),
        helps=("`keep=3`: it and the two before it", "`keep=None`: all"),
    )


def _unread(folder: Path, target: Path, error: BaseException) -> Diagnostic:
    if is_out_of_memory(error):
        return out_of_memory(target, error)
    older = checkpoint_folders.last_complete(folder, target)
    return Diagnostic(
        "S633",
        f"cannot read the checkpoint `{target}`",
        notes=(describe_failure(error), "the program is unchanged"),
        helps=checkpoint_folders.convert_helps(folder)
        or ("give the folder that `program.save` wrote",)
        if older is None
        else (f"load another checkpoint of this folder: `{older}`",),
    )


def _other_optimizer(note: str) -> Refusal:
    return Refusal.of(
        "S636",
        "the checkpoint is of a different optimizer",
        notes=(note,),
        helps=(
            "build the program with the optimizer of the checkpoint",
            "or without an optimizer, to load only the model",
        ),
    )
