"""Export full weights as safetensors files, each written by one rank, tensor by tensor.

`Program.export` calls this. The contents of the files are decided first, on lazy tensors that are
not gathered yet: a library's own `save_pretrained` names, splits and orders them. Then each full
tensor is gathered to the rank that writes its file, and dropped when it is written.

* Full weights: the names of their files, and checks of the model.
* Adapters only, in a folder that PEFT reads: `PeftModel.from_pretrained(model, path)`.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.model import AdapterChange
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.checkpointing.checkpoint_folders import resolve_folder
from schedlang.runtime.checkpointing.holdings import assemble_tensors
from schedlang.runtime.checkpointing.index import DTYPE_NAMES
from schedlang.runtime.comm import world
from schedlang.runtime.initial.lazy_tensors import KINDS, Box, LazyTensor, crop, read_box
from schedlang.runtime.low_rank_adapters import MAGNITUDE, Adapt, AdaptedProjection
from schedlang.runtime.storage.folder import replace_folder, run_on_all_ranks

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # prefix of all names: that of the model wrapped by PEFT


def _adapter_rows(changes: Sequence[AdapterChange], target: Path) -> list[Adapt]:
    """Return the rows that add adapters; raise Refusal S639 for none, or for more than one kind."""
    rows = [change for change in changes if isinstance(change, Adapt)]
    if not rows or len({row.kind for row in rows}) > 1:
        raise Refusal(_no_adapter(target, bool(rows)))
    return rows


def _adapter_contents(
    rows: Sequence[Adapt], state: Mapping[str, Tensor], trained: Sequence[str], model: nn.Module
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors to write, by PEFT's names, and the text of PEFT's configuration.

    These are the adapters, and modules that are trained beside them (`modules_to_save`). The
    dropout probability is that of the first row: PEFT has only one.
    """
    adapter_names = {
        f"{fqn}.{name}" for row in rows for fqn in row.sites for name in AdaptedProjection.inner
    }
    saved = sorted({name.rpartition(".")[0] for name in trained if name not in adapter_names})
    tensors = {_peft_name(name): value for name, value in state.items() if name in adapter_names}
    saved_names = (n for n in state if n.rpartition(".")[0] in saved and n not in adapter_names)
    tensors |= {f"{PREFIX}{name}": state[name] for name in saved_names}
    return tensors, json.dumps(_peft_config(rows, saved, model), indent=2)


def _peft_name(name: str) -> str:
    """Return a parameter's name in the file: in PEFT, its matrices are modules of their own."""
    owner, _, local = name.rpartition(".")
    local = "lora_magnitude_vector" if local == MAGNITUDE else f"{local}.weight"
    return f"{PREFIX}{owner}.{local}"


def _peft_config(rows: Sequence[Adapt], saved: Sequence[str], model: nn.Module) -> dict[str, Any]:
    first, base_name = rows[0], getattr(getattr(model, "config", None), "name_or_path", None)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base_name or None,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_dora": first.kind == "dora",
        "fan_in_fan_out": any(row.transposed for row in rows),
        "bias": "none",
        "target_modules": [fqn for row in rows for fqn in row.sites],
        "rank_pattern": {fqn: row.rank for row in rows[1:] for fqn in row.sites},
        "alpha_pattern": {fqn: row.alpha for row in rows[1:] for fqn in row.sites},
        "modules_to_save": list(saved) or None,
    }


def _no_adapter(target: Path, plural: bool) -> Diagnostic:
    if plural:
        return Diagnostic(
            "S639",
            f"cannot write the adapters to `{target}`: some are `lora` and some `dora`",
            notes=("a folder of PEFT has one kind",),
            helps=("export the merged weights: `program.export(path, model)`",),
        )
    return Diagnostic(
        "S639",
        f"cannot write the adapters to `{target}`: no row brings any",
        helps=(
            "add a row: `layers.*.mlp.up  adapt(lora, rank=8)`",
            "or export the weights: `program.export(path, model)`",
        ),
    )


WEIGHTS_FILE = "model.safetensors"
# of one file, of several files, of a model that PEFT has wrapped
WEIGHTS_FILES = (WEIGHTS_FILE, f"{WEIGHTS_FILE}.index.json", ADAPTER)


def _check_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse (S634) a model whose state has other keys than the program's."""
    if not isinstance(model, nn.Module):
        raise Refusal.of(
            "S634",
            f"this is a {type(model).__name__}, not the model that was scheduled",
            helps=("give the module that was passed to `create_schedule`",),
        )
    if odd := sorted(model.state_dict().keys() ^ state.keys()):
        raise Refusal.of(
            "S634",
            f"this is not the model that was scheduled: `{odd[0]}`",
            helps=("give the model that the schedule was made for",),
        )


def _check_dtypes(target: Path, state: Mapping[str, Tensor]) -> None:
    """Refuse (S631) a tensor of a dtype that no safetensors file has."""
    for name, tensor in state.items():
        if tensor.dtype not in _DTYPES:
            reason = f"`{name}` is {DTYPE_NAMES[tensor.dtype]}, which safetensors do not have"
            raise Refusal(_write_error(target, reason, "`program.save` writes any dtype"))


def _untied(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a tensor for each parameter of the model, also where rows have tied several.

    A library writes a tensor once, and loads the other name of it only if its model ties the two.
    """
    parameters, untied = model.state_dict(keep_vars=True), dict[tuple[int, int], Tensor]()
    for name, lazy in state.items():
        assert isinstance(lazy, LazyTensor)
        own = LazyTensor(lazy.part, lazy.shape, lazy.dtype, lazy.leaves)
        untied.setdefault((id(lazy), id(parameters[name])), own)
    return {name: untied[id(lazy), id(parameters[name])] for name, lazy in state.items()}


def _write_error(target: Path, reason: str, *helps: str) -> Diagnostic:
    """Describe why weights cannot be written (S631)."""
    return Diagnostic(
        "S631", f"cannot write the weights to `{target}`", notes=(reason,), helps=helps
    )


FILE_BYTES = 5 * 10**9  # bytes of a file
# full tensors of the program that a writer caches: several tensors of a file may be cut from one
_KEPT = 2
_NAMES = {name: kind for kind, name in KINDS.items()}
_DTYPES = {kind: _NAMES[name] for kind, name in DTYPE_NAMES.items() if name in _NAMES}


def export_weights(
    a: Assembly,
    path: str | os.PathLike[str],
    model: nn.Module,
    parts: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write full weights under the original's names; all ranks call this, and each writes its
    files.

    `parts` are this rank's shards of the parameters, `file_bytes` the bytes of a file. `model` is
    the model that the schedule was made for; it is only read. For a model of transformers, its own
    `save_pretrained` decides the files and writes its configuration, so that `from_pretrained`
    loads the folder with ties intact. Any other model becomes one file, for
    `safetensors.torch.load_model`; a tied tensor is written once. Adapters are merged. A writer
    holds at most two full parameters beside the tensor that it writes. The folder at the path is
    replaced by the new one in one move. Raises Refusal S631, S632, S634 or S638 on all ranks, and
    leaves the path unchanged.
    """
    target = Path(world.broadcast_object(0, str(resolve_folder(path))))  # a symbolic link stays
    diagnose = lambda error: _write_error(target, str(error))  # noqa: E731
    source = GatheredTensors(a, parts, buffers)
    state: dict[str, Tensor] = dict(source.state())
    for change in reversed(a.adapter_changes):
        state = change.merge_values(state)
    run_on_all_ranks(lambda: _check_model(model, state), diagnose, (Exception,))
    run_on_all_ranks(lambda: source.check_ties(target, state, model), diagnose, (Exception,))
    _check_dtypes(target, state)
    state = _untied(state, model)

    def fill(folder: Path) -> None:
        plan = lambda: _plan_files(folder, a.ranks.rank, state, model, file_bytes)  # noqa: E731
        files, world_size = run_on_all_ranks(plan, diagnose, (Exception,)), a.ranks.mesh.world
        for first in range(0, len(files), world_size):
            batch = files[first : first + world_size]
            run_on_all_ranks(lambda batch=batch: _write(folder, batch, source), diagnose)  # type: ignore[misc]

    replace_folder(
        target, a.ranks.rank, fill, marks=WEIGHTS_FILES, diagnose=diagnose, failures=(Exception,)
    )


def export_adapter(
    a: Assembly,
    path: str | os.PathLike[str],
    model: nn.Module,
    parts: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    trained: Sequence[str],
) -> None:
    """Write the adapters, and modules trained beside them, for PEFT; all ranks call this.

    Only the written tensors are gathered, one at a time, on the first rank, since PEFT reads one
    file. Raises Refusal S631, S632, S639 or S638 on all ranks, and leaves the path unchanged.
    """
    target = Path(world.broadcast_object(0, str(resolve_folder(path))))
    source, rank = GatheredTensors(a, parts, buffers), a.ranks.rank
    rows = _adapter_rows(a.adapter_changes, target)
    tensors, config = _adapter_contents(rows, source.state(), trained, model)
    file = _file(ADAPTER, tensors, {"format": "pt"})

    def write_all(folder: Path) -> None:
        _write(folder, [file], source)
        if rank == 0:
            (folder / ADAPTER_CONFIG).write_text(config)

    def diagnose(error: BaseException) -> Diagnostic:
        return Diagnostic("S631", f"cannot write the adapters to `{target}`", notes=(str(error),))

    def fill(folder: Path) -> None:
        run_on_all_ranks(lambda: write_all(folder), diagnose)

    marks = (ADAPTER,)
    replace_folder(target, rank, fill, marks=marks, diagnose=diagnose, failures=(Exception,))


@dataclass
class GatheredTensors:
    """Lazy full tensors that are gathered to the rank `writer`, the same on all ranks."""

    a: Assembly
    parts: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    writer: int = 0
    cached: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)  # by writer

    def state(self) -> dict[str, LazyTensor]:
        """Return all tensors by the model's keys, tied names share one; nothing is gathered yet."""
        dtypes = {name: p.dtype for name, p in self.a.module.named_parameters()}
        tensors: dict[str, LazyTensor] = {}
        for name, holding in self.a.holdings.items():
            read = lambda box, name=name: self.gather_box(name, box, dtypes[name])  # noqa: E731
            tensors[name] = LazyTensor(read, holding.layout.shape, dtypes[name], ())
        for name, value in self.buffers.items():
            read = lambda box, value=value: crop(value, box)  # noqa: E731
            tensors[name] = LazyTensor(read, value.shape, value.dtype, ())
        for names in self.a.ties:
            tensors.update({name: tensors[names[0]] for name in names if names[0] in tensors})
        return {key: tensors[key] for key in self.a.keys}

    def gather_box(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a parameter on the writer, on other ranks a meta tensor; all ranks call
        this."""
        cached = self.cached.setdefault(self.writer, {})
        if name not in cached:
            while len(cached) >= _KEPT:
                cached.pop(next(iter(cached)))
            local = {name: self.parts[name]} if name in self.parts else {}
            holdings, receivers = {name: self.a.holdings[name]}, (self.writer,)
            gathered = assemble_tensors(holdings, local, self.a.ranks, lambda _: receivers)
            cached[name] = gathered.get(name)
        full_tensor = cached[name]
        if full_tensor is None:
            return torch.empty([stop - start for start, stop in box], dtype=dtype, device="meta")
        return crop(full_tensor, box)

    def gather_tensor(self, tensor: Tensor, writer: int) -> Tensor:
        """Return a full tensor of the state on the writer; all ranks call this."""
        self.writer = writer
        assert isinstance(tensor, LazyTensor)
        return read_box(tensor, [0] * tensor.ndim, tensor.shape)

    def check_ties(self, target: Path, state: Mapping[str, Tensor], model: nn.Module) -> None:
        """Refuse a model whose ties would undo separate training; all ranks call this."""
        first_names: dict[int, str] = {}
        error: Diagnostic | None = None
        for name, tensor in model.state_dict(keep_vars=True).items():
            first_name = first_names.setdefault(id(tensor), name)
            if state[first_name] is state[name]:
                continue
            values = [self.gather_tensor(state[alias], 0) for alias in (first_name, name)]
            if self.a.ranks.rank == 0 and not torch.equal(*values):
                reason = (
                    f"`{first_name}` and `{name}` are one parameter of the given model, but were"
                )
                help_ = "give a model in which they are not tied"
                error = error or _write_error(target, f"{reason} trained separately", help_)
        if error is not None:
            raise Refusal(error)


# -- contents of files -------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorFile:
    """A file of a folder: its tensors in the order in which they are stored, and its metadata."""

    name: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def header(self) -> bytes:
        """The first bytes by the safetensors format: a length, and a table of all tensors."""
        table: dict[str, Any] = {"__metadata__": dict(self.metadata)}
        offset = 0
        for name, tensor in self.tensors.items():
            end = offset + tensor.numel() * tensor.element_size()
            dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _file(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> TensorFile:
    """Return a file whose tensors are ordered as safetensors orders them: wide dtypes first."""
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    return TensorFile(name, {key: tensors[key] for key in order}, metadata)


def _plan_files(
    folder: Path, rank: int, state: Mapping[str, Tensor], model: Any, file_bytes: int
) -> list[TensorFile]:
    """Return the files, equal on all ranks; rank 0 writes the other files of the folder."""
    if not hasattr(model, "save_pretrained"):
        first_names: dict[int, str] = {}
        aliases = {"format": "pt"}
        for name, tensor in state.items():
            first_name = first_names.setdefault(id(tensor), name)
            if first_name != name:
                aliases[name] = first_name
        return [_file(WEIGHTS_FILE, {name: state[name] for name in first_names.values()}, aliases)]
    # saving records classes and dtypes in the configuration: use that of a copy
    tensors = (*model.parameters(), *model.buffers())
    twin: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    twin.should_save_on_this_rank = lambda is_main_process: True  # else only the first rank would
    with ExitStack() as stack:
        target = Path(stack.enter_context(tempfile.TemporaryDirectory())) if rank else folder
        files = stack.enter_context(_intercept_files(twin, target))
        twin.save_pretrained(target, state_dict=dict(state), max_shard_size=file_bytes)
    if not files or any(type(x) is not LazyTensor for file in files for x in file.tensors.values()):
        reason = f"`save_pretrained` of {type(model).__name__} writes other values than it is given"
        advice = "load them into the model and save that: `model.load_state_dict("
        raise Refusal(_write_error(folder, reason, f"{advice}program.state_dict())`"))
    return files


@contextmanager
def _intercept_files(model: Any, target: Path) -> Iterator[list[TensorFile]]:
    """Record, inside the block, what a library would write into safetensors files.

    This patches names of safetensors' function in the modules of `save_pretrained`: it would read
    memory that lazy tensors do not have, and libraries have no other way to ask.
    """
    from safetensors import torch as safetensors

    written = safetensors.save_file
    files: list[TensorFile] = []

    def caught(tensors: Mapping[str, Tensor], file: Any, metadata: Any = None) -> None:
        name = os.path.relpath(file, target)
        files.append(_file(name, tensors, metadata or {}))

    modules: list[Any] = [safetensors, sys.modules[type(model).save_pretrained.__module__]]
    modules += [sys.modules[kind.__module__] for kind in type(model).__mro__]
    patched = [(m, key) for m in modules for key, value in vars(m).items() if value is written]
    for module, key in patched:
        setattr(module, key, caught)
    try:
        yield files
    finally:
        for module, key in patched:
            setattr(module, key, written)


# -- writing ---------------------------------------------------------------------------------------


def _write(folder: Path, files: Sequence[TensorFile], source: GatheredTensors) -> None:
    """Write files, each by one rank, taking one tensor of each in turn; all ranks call this.

    An error on one rank is raised at the end: other ranks need its shards.
    """
    rank, failure = source.a.ranks.rank, None
    file: BinaryIO | None = None
    if rank < len(files):
        try:
            file = (folder / files[rank].name).open("xb")
            file.write(files[rank].header)
        except OSError as error:
            failure = error
    for row in itertools.zip_longest(*(item.tensors.values() for item in files)):
        for writer, item in enumerate(row):
            if item is None:
                continue
            value = source.gather_tensor(item, writer)
            if rank == writer and file is not None and failure is None:
                try:
                    file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                except OSError as error:
                    failure = error
    source.cached.clear()
    if file is not None:
        with file:
            if failure is None:
                file.flush()
                os.fsync(file.fileno())
    if failure is not None:
        raise failure
