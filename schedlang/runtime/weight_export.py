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
    others = (n for n in state if n.rpartition(".")[0] in saved and n not in adapter_names)
    tensors |= {f"{PREFIX}{name}": state[name] for name in others}
    return tensors, json.dumps(_peft_config(rows, saved, model), indent=2)


def _peft_name(name: str) -> str:
    """Return a parameter's name in the file: in PEFT, its matrices are modules of their own."""
    owner, _, local = name.rpartition(".")
    local = "lora_magnitude_vector" if local == MAGNITUDE else f"{local}.weight"
    return f"{PREFIX}{owner}.{local}"


def _peft_config(rows: Sequence[Adapt], saved: Sequence[str], model: nn.Module) -> dict[str, Any]:
    first, own = rows[0], getattr(getattr(model, "config", None), "name_or_path", None)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": own or None,
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


def _no_adapter(target: Path, several: bool) -> Diagnostic:
    if several:
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
WEIGHTS_FILES = (WEIGHTS_FILE, f"{WEIGHTS_FILE}.index.json")  # of one file, of several files


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


def _write_error(target: Path, why: str, *helps: str) -> Diagnostic:
    """Describe why weights cannot be written (S631)."""
    return Diagnostic("S631", f"cannot write the weights to `{target}`", notes=(why,), helps=helps)


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
    most: int = FILE_BYTES,
) -> None:
    """Write full weights under the original's names; all ranks call this, and each writes its
    files.

    `parts` are this rank's shards of the parameters, `most` the bytes of a file. `model` is the
    model that the schedule was made for; it is only read. For a model of transformers, its own
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

    def fill(folder: Path) -> None:
        plan = lambda: _plan_files(folder, a.ranks.rank, state, model, most)  # noqa: E731
        files, each = run_on_all_ranks(plan, diagnose, (Exception,)), a.ranks.mesh.world
        for first in range(0, len(files), each):
            some = files[first : first + each]
            run_on_all_ranks(lambda some=some: _write(folder, some, source), diagnose)  # type: ignore[misc]

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
        kinds = {name: p.dtype for name, p in self.a.module.named_parameters()}
        found: dict[str, LazyTensor] = {}
        for name, holding in self.a.holdings.items():
            read = lambda box, name=name: self.gather_box(name, box, kinds[name])  # noqa: E731
            found[name] = LazyTensor(read, holding.layout.shape, kinds[name], ())
        for name, value in self.buffers.items():
            read = lambda box, value=value: crop(value, box)  # noqa: E731
            found[name] = LazyTensor(read, value.shape, value.dtype, ())
        for names in self.a.ties:
            found.update({name: found[names[0]] for name in names if names[0] in found})
        return {key: found[key] for key in self.a.keys}

    def gather_box(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a parameter on the writer, on other ranks a meta tensor; all ranks call
        this."""
        kept = self.cached.setdefault(self.writer, {})
        if name not in kept:
            while len(kept) >= _KEPT:
                kept.pop(next(iter(kept)))
            own = {name: self.parts[name]} if name in self.parts else {}
            holdings, here = {name: self.a.holdings[name]}, (self.writer,)
            found = assemble_tensors(holdings, own, self.a.ranks, lambda _: here)
            kept[name] = found.get(name)
        whole = kept[name]
        if whole is None:
            return torch.empty([high - low for low, high in box], dtype=dtype, device="meta")
        return crop(whole, box)

    def gather_tensor(self, one: Tensor, writer: int) -> Tensor:
        """Return a full tensor of the state on the writer; all ranks call this."""
        self.writer = writer
        assert isinstance(one, LazyTensor)
        return read_box(one, [0] * one.ndim, one.shape)

    def check_ties(self, target: Path, state: Mapping[str, Tensor], model: nn.Module) -> None:
        """Refuse a model whose ties would undo separate training; all ranks call this."""
        first: dict[int, str] = {}
        wrong: Diagnostic | None = None
        for name, tensor in model.state_dict(keep_vars=True).items():
            one = first.setdefault(id(tensor), name)
            if state[one] is state[name]:
                continue
            both = [self.gather_tensor(state[each], 0) for each in (one, name)]
            if self.a.ranks.rank == 0 and not torch.equal(*both):
                reason = f"`{one}` and `{name}` are one parameter of the given model, but were"
                help_ = "give a model in which they are not tied"
                wrong = wrong or _write_error(target, f"{reason} trained separately", help_)
        if wrong is not None:
            raise Refusal(wrong)


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
        at = 0
        for name, one in self.tensors.items():
            end = at + one.numel() * one.element_size()
            kind, shape = _DTYPES[one.dtype], list(one.shape)
            table[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _file(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> TensorFile:
    """Return a file whose tensors are ordered as safetensors orders them: wide dtypes first."""
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    return TensorFile(name, {key: tensors[key] for key in order}, metadata)


def _plan_files(
    folder: Path, rank: int, state: Mapping[str, Tensor], model: Any, most: int
) -> list[TensorFile]:
    """Return the files, equal on all ranks; rank 0 writes the other files of the folder."""
    if not hasattr(model, "save_pretrained"):
        first_names: dict[int, str] = {}
        aliases = {"format": "pt"}
        for name, tensor in state.items():
            one = first_names.setdefault(id(tensor), name)
            if one != name:
                aliases[name] = one
        return [_file(WEIGHTS_FILE, {name: state[name] for name in first_names.values()}, aliases)]
    # saving records classes and dtypes in the configuration: use that of a copy
    tensors = (*model.parameters(), *model.buffers())
    twin: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    twin.should_save_on_this_rank = lambda is_main_process: True  # else only the first rank would
    with ExitStack() as stack:
        made = stack.enter_context(_intercept_files())
        own = stack.enter_context(tempfile.TemporaryDirectory()) if rank else folder
        twin.save_pretrained(own, state_dict=dict(state), max_shard_size=most)
    return made


@contextmanager
def _intercept_files() -> Iterator[list[TensorFile]]:
    """Record, inside the block, what transformers would write into safetensors files.

    This patches a private name: the library has no other way to ask.
    """
    modeling: Any = sys.modules["transformers.modeling_utils"]
    found: list[TensorFile] = []

    def caught(tensors: Mapping[str, Tensor], file: str, metadata: Mapping[str, str]) -> None:
        found.append(_file(os.path.basename(file), tensors, metadata))

    before, modeling.safe_save_file = modeling.safe_save_file, caught
    try:
        yield found
    finally:
        modeling.safe_save_file = before


# -- writing ---------------------------------------------------------------------------------------


def _write(folder: Path, files: Sequence[TensorFile], source: GatheredTensors) -> None:
    """Write files, each by one rank, taking one tensor of each in turn; all ranks call this.

    An error on one rank is raised at the end: other ranks need its shards.
    """
    rank, wrong = source.a.ranks.rank, None
    mine: BinaryIO | None = None
    if rank < len(files):
        try:
            mine = (folder / files[rank].name).open("xb")
            mine.write(files[rank].header)
        except OSError as error:
            wrong = error
    for row in itertools.zip_longest(*(one.tensors.values() for one in files)):
        for writer, one in enumerate(row):
            if one is None:
                continue
            value = source.gather_tensor(one, writer)
            if rank == writer and mine is not None and wrong is None:
                try:
                    mine.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                except OSError as error:
                    wrong = error
    source.cached.clear()
    if mine is not None:
        with mine:
            if wrong is None:
                mine.flush()
                os.fsync(mine.fileno())
    if wrong is not None:
        raise wrong
