"""Whole weights as files of safetensors, each written by one rank, tensor by tensor.

What a file is to hold is laid out first, on tensors of which nothing has been put together yet: a
library's own `save_pretrained` names, splits and orders them so.  Then each whole tensor comes to
the rank that writes its file, and goes when it is written.

* Whole weights that are exported: the names of their files, and what is refused before.
* Adapters alone, in a folder that PEFT reads: `PeftModel.from_pretrained(model, path)`.
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
from schedlang.ir.model import Adapting
from schedlang.runtime.adapted import MAGNITUDE, Adapt, Adapted
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.checkpointing.holding import assembled
from schedlang.runtime.checkpointing.index import DTYPE_NAMES
from schedlang.runtime.checkpointing.steps import resolved
from schedlang.runtime.comm import world
from schedlang.runtime.initial.stored import KINDS, Box, Stored, cut, read_box
from schedlang.runtime.storage.folder import replace_folder, together

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of all names: that of the model which PEFT wraps


def _adapter_rows(changes: Sequence[Adapting], target: Path) -> list[Adapt]:
    """The rows that bring adapters; raises Refusal S639 for none, or of more than one kind."""
    rows = [change for change in changes if isinstance(change, Adapt)]
    if not rows or len({row.kind for row in rows}) > 1:
        raise Refusal(_no_adapter(target, bool(rows)))
    return rows


def _adapter_contents(
    rows: Sequence[Adapt], state: Mapping[str, Tensor], trained: Sequence[str], model: nn.Module
) -> tuple[dict[str, Tensor], str]:
    """The tensors that are written, by PEFT's names, and the text of its configuration.

    Adapters, and modules that are trained beside them (`modules_to_save`).  Probabilities of
    dropout are those of the first row: PEFT knows one.
    """
    apart = {f"{fqn}.{name}" for row in rows for fqn in row.sites for name in Adapted.inner}
    saved = sorted({name.rpartition(".")[0] for name in trained if name not in apart})
    tensors = {_peft_name(name): value for name, value in state.items() if name in apart}
    beside = (n for n in state if n.rpartition(".")[0] in saved and n not in apart)
    tensors |= {f"{PREFIX}{name}": state[name] for name in beside}
    return tensors, json.dumps(_peft_config(rows, saved, model), indent=2)


def _peft_name(name: str) -> str:
    """A parameter's name in the file: PEFT's matrices are modules of their own."""
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


MARK = "model.safetensors"
MARKS = (MARK, f"{MARK}.index.json")  # of one file, of several


def _check_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse another model than that of a state (S634)."""
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


def _unwritten(target: Path, why: str, *helps: str) -> Diagnostic:
    """Describe why weights cannot be written (S631)."""
    return Diagnostic("S631", f"cannot write the weights to `{target}`", notes=(why,), helps=helps)


SHARD = 5 * 10**9  # bytes of a file
_KEPT = 2  # whole tensors of the program that a writer keeps: several of a file come of one
_NAMES = {name: kind for kind, name in KINDS.items()}
_DTYPES = {kind: _NAMES[name] for kind, name in DTYPE_NAMES.items() if name in _NAMES}


def export(
    a: Assembly,
    path: str | os.PathLike[str],
    model: nn.Module,
    parts: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    most: int = SHARD,
) -> None:
    """Write whole weights under the original's names; all ranks together, each its own files.

    `parts` are this rank's of the parameters, `most` the bytes of a file.  `model` is the one that
    the schedule was made for, and is only read.  A model of transformers is laid out by its own
    `save_pretrained`, with its configuration, so that `from_pretrained` loads the folder, ties
    intact.  Any other becomes one file, for `safetensors.torch.load_model`; what is tied is written
    once.  Adapters are merged.  A writer has at most two whole parameters beside the tensor that it
    writes.  What was at the path stays until the new folder takes its name, in one move.  Raises
    Refusal S631, S632, S634 or S638 on all ranks, leaving what was at the path as it was.
    """
    target = Path(world.broadcast_object(0, str(resolved(path))))  # a link stays
    diagnose = lambda error: _unwritten(target, str(error))  # noqa: E731
    comes = Coming(a, parts, buffers)
    state: dict[str, Tensor] = dict(comes.state())
    for change in reversed(a.merges):
        state = change.merged(state)
    together(lambda: _check_model(model, state), diagnose, (Exception,))
    together(lambda: comes.check_ties(target, state, model), diagnose, (Exception,))

    def fill(folder: Path) -> None:
        lay = lambda: _laid_out(folder, a.ranks.rank, state, model, most)  # noqa: E731
        files, each = together(lay, diagnose, (Exception,)), a.ranks.mesh.world
        for first in range(0, len(files), each):
            some = files[first : first + each]
            together(lambda some=some: _write(folder, some, comes), diagnose)  # type: ignore[misc]

    replace_folder(
        target, a.ranks.rank, fill, marks=MARKS, diagnose=diagnose, failures=(Exception,)
    )


def export_adapter(
    a: Assembly,
    path: str | os.PathLike[str],
    model: nn.Module,
    parts: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    trained: Sequence[str],
) -> None:
    """Write the adapters, and modules that are trained beside them, for PEFT; all ranks together.

    Only what is written is put together, tensor by tensor, on the first rank, since PEFT reads one
    file.  Raises Refusal S631, S632, S639 or S638 on all ranks, leaving what was at the path as it
    was.
    """
    target = Path(world.broadcast_object(0, str(resolved(path))))
    comes, rank = Coming(a, parts, buffers), a.ranks.rank
    rows = _adapter_rows(a.merges, target)
    tensors, config = _adapter_contents(rows, comes.state(), trained, model)
    file = _file(ADAPTER, tensors, {"format": "pt"})

    def all_of_it(folder: Path) -> None:
        _write(folder, [file], comes)
        if rank == 0:
            (folder / ADAPTER_CONFIG).write_text(config)

    def diagnose(error: BaseException) -> Diagnostic:
        return Diagnostic("S631", f"cannot write the adapters to `{target}`", notes=(str(error),))

    def fill(folder: Path) -> None:
        together(lambda: all_of_it(folder), diagnose)

    marks = (ADAPTER,)
    replace_folder(target, rank, fill, marks=marks, diagnose=diagnose, failures=(Exception,))


@dataclass
class Coming:
    """Whole tensors that come to whoever writes: `writer`, on all ranks alike."""

    a: Assembly
    parts: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    writer: int = 0
    kept: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)  # by writer

    def state(self) -> dict[str, Stored]:
        """All tensors by the model's keys, what is tied as one; nothing is put together yet."""
        kinds = {name: p.dtype for name, p in self.a.module.named_parameters()}
        found: dict[str, Stored] = {}
        for name, holding in self.a.holdings.items():
            read = lambda box, name=name: self.part(name, box, kinds[name])  # noqa: E731
            found[name] = Stored(read, holding.layout.shape, kinds[name], ())
        for name, value in self.buffers.items():
            read = lambda box, value=value: cut(value, box)  # noqa: E731
            found[name] = Stored(read, value.shape, value.dtype, ())
        for names in self.a.ties:
            found.update({name: found[names[0]] for name in names if names[0] in found})
        return {key: found[key] for key in self.a.keys}

    def part(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """A box of a parameter, on the writer; of others its shape.  All ranks together."""
        kept = self.kept.setdefault(self.writer, {})
        if name not in kept:
            while len(kept) >= _KEPT:
                kept.pop(next(iter(kept)))
            own = {name: self.parts[name]} if name in self.parts else {}
            holdings, here = {name: self.a.holdings[name]}, (self.writer,)
            found = assembled(holdings, own, self.a.ranks, lambda _: here)
            kept[name] = found.get(name)
        whole = kept[name]
        if whole is None:
            return torch.empty([high - low for low, high in box], dtype=dtype, device="meta")
        return cut(whole, box)

    def whole(self, one: Tensor, writer: int) -> Tensor:
        """A tensor of the state, on the writer."""
        self.writer = writer
        assert isinstance(one, Stored)
        return read_box(one, [0] * one.ndim, one.shape)

    def check_ties(self, target: Path, state: Mapping[str, Tensor], model: nn.Module) -> None:
        """Refuse a model whose ties would undo what has been trained apart.  All ranks together."""
        first: dict[int, str] = {}
        wrong: Diagnostic | None = None
        for name, tensor in model.state_dict(keep_vars=True).items():
            one = first.setdefault(id(tensor), name)
            if state[one] is state[name]:
                continue
            both = [self.whole(state[each], 0) for each in (one, name)]
            if self.a.ranks.rank == 0 and not torch.equal(*both):
                said = f"`{one}` and `{name}` are one parameter of the given model, but were"
                help_ = "give a model in which they are not tied"
                wrong = wrong or _unwritten(target, f"{said} trained separately", help_)
        if wrong is not None:
            raise Refusal(wrong)


# -- what each file is to hold ---------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A file of a folder: its tensors in the order in which they lie there, and what it tells."""

    name: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def head(self) -> bytes:
        """The first bytes, by the format of safetensors: a length, and a table of all tensors."""
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


def _file(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> File:
    """A file whose tensors lie as safetensors itself lays them: wide numbers first."""
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    return File(name, {key: tensors[key] for key in order}, metadata)


def _laid_out(
    folder: Path, rank: int, state: Mapping[str, Tensor], model: Any, most: int
) -> list[File]:
    """The files, alike on all ranks; what lies beside them is written by the first."""
    if not hasattr(model, "save_pretrained"):
        kept: dict[int, str] = {}
        aliases = {"format": "pt"}
        for name, tensor in state.items():
            one = kept.setdefault(id(tensor), name)
            if one != name:
                aliases[name] = one
        return [_file(MARK, {name: state[name] for name in kept.values()}, aliases)]
    # saving notes classes and dtypes in the configuration: in that of a copy
    tensors = (*model.parameters(), *model.buffers())
    twin: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    twin.should_save_on_this_rank = lambda is_main_process: True  # it would be the first alone
    with ExitStack() as stack:
        made = stack.enter_context(_caught())
        own = stack.enter_context(tempfile.TemporaryDirectory()) if rank else folder
        twin.save_pretrained(own, state_dict=dict(state), max_shard_size=most)
    return made


@contextmanager
def _caught() -> Iterator[list[File]]:
    """Keep, inside the block, what transformers would write into files of safetensors.

    Private: the library has no other way to tell what it would write.
    """
    modeling: Any = sys.modules["transformers.modeling_utils"]
    found: list[File] = []

    def caught(tensors: Mapping[str, Tensor], file: str, metadata: Mapping[str, str]) -> None:
        found.append(_file(os.path.basename(file), tensors, metadata))

    before, modeling.safe_save_file = modeling.safe_save_file, caught
    try:
        yield found
    finally:
        modeling.safe_save_file = before


# -- writing ---------------------------------------------------------------------------------------


def _write(folder: Path, files: Sequence[File], comes: Coming) -> None:
    """Write files, each by the rank of its place, a tensor of each in turn; all ranks together.

    What fails on one rank is raised when all have come to the end: others need its parts.
    """
    rank, wrong = comes.a.ranks.rank, None
    mine: BinaryIO | None = None
    if rank < len(files):
        try:
            mine = (folder / files[rank].name).open("xb")
            mine.write(files[rank].head)
        except OSError as error:
            wrong = error
    for row in itertools.zip_longest(*(one.tensors.values() for one in files)):
        for writer, one in enumerate(row):
            if one is None:
                continue
            value = comes.whole(one, writer)
            if rank == writer and mine is not None and wrong is None:
                try:
                    mine.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                except OSError as error:
                    wrong = error
    comes.kept.clear()
    if mine is not None:
        with mine:
            if wrong is None:
                mine.flush()
                os.fsync(mine.fileno())
    if wrong is not None:
        raise wrong
