"""TrainingProgram: the parts of a user's distributed program, and checks of these parts."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import (
    Label,
    Refusal,
    facts_of_unknown,
    kind_of,
    suggest_name,
)
from schedlang.diagnostics.user_errors import at_frame, file_of, frames_in
from schedlang.ir.modelfile import import_file
from schedlang.runtime.launch import pickling
from schedlang.runtime.launch.forkserver import is_consequence

if TYPE_CHECKING:
    import torch
    from torch import nn

IMPORT_NAME = "schedlang_program_file"
LOSS_REDUCTIONS = ("mean", "sum", "same")  # of ranks' losses to the loss of the batch
REDUCE_DTYPES = ("float64", "float32", "float16", "bfloat16")
NO_RANKS = "in the process of the original, which has no ranks"
FORM = "def program(model): ... return schedlang.TrainingProgram(module, step)"
_ALREADY_JOINED = re.compile("env:// rendezvous|initialize the default process group twice")
_GPU = re.compile(
    "not compiled with cuda|nvidia driver|no cuda gpus|nccl|no hip gpus|xpu|accelerator device when"
)


@dataclass(frozen=True)
class TrainingProgram:
    """One rank's part of a distributed program: its module, and a step without the optimizer's.

    module      an nn.Module with the rank's parameters; or several, as chunks of a pipeline
    step        step(batch), called with the full batch: forward, backward, and the reduction of
                gradients, for the rank's own part of the batch. Returns the rank's loss, None if
                the rank has none, or a pair of the loss and the rank's output
    optimizer   named parameters -> Optimizer, also used for the original; default: SGD, and AdamW
    world_loss  how ranks' losses combine to the loss of the batch: their "mean", their "sum", or
                "same" if each rank returns the loss of the full batch
    names       original names of parameters and buffers, by their names here (dict or function).
                Used only where values do not identify them
    layouts     layouts of plain tensors, by their names here: a placement of
                torch.distributed.tensor over all ranks, or a pair of it and a list of ranks
    dropout     the part of the original's mask that a rank's module applies, by the module's name
                here, in the same form. Used only where the module's inputs do not identify it
    original    original(model) -> step(batch), which simulates one step of all ranks on the whole
                batch, without ranks, and leaves gradients in the parameters. For algorithms that do
                not train by the gradient of the batch (local steps); default: forward and backward
    reduce_dtype  dtype, or its name, in which the program claims to sum gradients over ranks
    clip        clip(max_norm) -> norm, the program's gradient clipping; default: the judge clips
    evaluate    evaluate(batch) -> the output in eval mode
    evaluate_loss  evaluate_loss(batch) -> the loss of the full batch in eval mode, as the program
                reports it: the same on all ranks that return one, None on others
    state_dict  the state that the program saves. It contains a mapping from the original's names to
                full tensors. Called with `optimizer` (the rank's) if it has such a parameter
    load        load(state) or load(state, optimizer): loads what `state_dict` returned on this rank
                (on the first rank with a state, if empty here) into a new program
    """

    module: nn.Module | Sequence[nn.Module]
    step: Callable[[Any], Any]
    _: KW_ONLY
    optimizer: Callable[..., Any] | None = None
    world_loss: str = "mean"
    names: Mapping[str, str] | Callable[[str], str | None] | None = None
    layouts: Mapping[str, Any] | None = None
    dropout: Mapping[str, Any] | None = None
    original: Callable[[Any], Any] | None = None
    reduce_dtype: str | torch.dtype | None = None
    clip: Callable[[float], Any] | None = None
    evaluate: Callable[[Any], Any] | None = None
    evaluate_loss: Callable[[Any], Any] | None = None
    state_dict: Callable[..., Any] | None = None
    load: Callable[..., Any] | None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules of this rank."""
        from torch import nn

        return (self.module,) if isinstance(self.module, nn.Module) else tuple(self.module)

    @property
    def reduce_dtype_name(self) -> str | None:
        """The name of `reduce_dtype`."""
        from torch import dtype

        claim = self.reduce_dtype
        return str(claim).removeprefix("torch.") if isinstance(claim, dtype) else claim

    def original_name(self, name: str) -> str | None:
        """Return the original's name from the user's `names`; None if not given."""
        if self.names is None or isinstance(self.names, Mapping):
            return (self.names or {}).get(name)
        from schedlang.runtime.comm import world

        with user_errors(self.names, "names", world.rank()):
            return self.names(name)


Make = Callable[[Any], Any]


@dataclass(frozen=True)
class ProgramFile:
    """An imported program file; ranks import it under the same module name."""

    module: ModuleType
    path: Path

    @property
    def program(self) -> Make:
        """`program(model)`."""
        make: Make = self.module.program
        return make

    @property
    def world(self) -> int | None:
        """The number of ranks that the file requests; None if it has no `world`."""
        return getattr(self.module, "world", None)

    @property
    def files(self) -> dict[str, Path]:
        """Files that ranks must load, by the module names that they load them under."""
        return {self.module.__name__: self.path}


def load_program(path: Path) -> ProgramFile:
    """Import a program file.

    Raises Refusal S904, S905, or S761 if the file defines no program.
    """
    module = import_file(IMPORT_NAME, path)
    if not callable(getattr(module, "program", None)):
        defined = [name for name in vars(module) if not name.startswith("_")]
        message = f"`{path.name}` defines no `program(model)`"
        helps = (suggest_name("program", defined, "it defines"), f"write `{FORM}`")
        raise Refusal.of("S761", message, helps=helps, facts=facts_of_unknown("program", defined))
    return ProgramFile(module, path.resolve())


def make_program(make: Make, model: nn.Module, rank: int) -> TrainingProgram:
    """Call a user's `program` on a rank; refuse (S761, S767) an invalid result."""
    with user_errors(make, "program", rank):
        program = make(model)
    if not isinstance(program, TrainingProgram):
        description = "nothing" if program is None else kind_of(program)
        message = f"`program` returns {description} on rank {rank}, not a TrainingProgram"
        raise Refusal.of("S761", message, helps=("return one on every rank", FORM))
    check_program(program, rank)
    return program


def check_program(program: TrainingProgram, rank: int) -> None:
    """Refuse (S761, S767) a program with invalid parts."""
    from torch import nn

    module = program.module
    chunks = isinstance(module, Sequence) and all(isinstance(chunk, nn.Module) for chunk in module)
    if not chunks and not isinstance(module, nn.Module):
        message = f"`module` of the program on rank {rank} is {kind_of(module)}"
        helps = ("give a torch.nn.Module, or a list of this rank's modules",)
        raise Refusal.of("S761", message, helps=helps)
    if not callable(program.step):
        message = f"`step` of the program on rank {rank} is {kind_of(program.step)}, not a function"
        raise Refusal.of("S761", message, helps=("give step(batch)",))
    for part in _TAKES_BATCH:
        _check_takes_one(getattr(program, part), part, rank)
    if program.world_loss not in LOSS_REDUCTIONS:
        message = f"`world_loss` is {program.world_loss!r}"
        helps = (suggest_name(str(program.world_loss), LOSS_REDUCTIONS, "choose one of"),)
        raise Refusal.of("S767", message, helps=helps)
    if program.reduce_dtype_name not in (None, *REDUCE_DTYPES):
        message = f"`reduce_dtype` is {program.reduce_dtype!r}"
        helps = (suggest_name(str(program.reduce_dtype), REDUCE_DTYPES, "choose one of"),)
        raise Refusal.of("S767", message, helps=helps)
    for part, (kinds, expected) in _PARTS.items():
        value = getattr(program, part)
        if value is not None and not isinstance(value, kinds):
            message = f"`{part}` of the program on rank {rank} is {kind_of(value)}, not {expected}"
            raise Refusal.of("S767", message, helps=(f"give {expected}",))
    if program.load is not None and program.state_dict is None:
        message = "the program has a `load` and no `state_dict`"
        helps = ("give the state that it loads: `state_dict=lambda: module.state_dict()`",)
        raise Refusal.of("S767", message, helps=helps)


def _check_takes_one(function: Callable[..., Any] | None, part: str, rank: int) -> None:
    try:
        signature = inspect.signature(function) if function is not None else None
    except ValueError:  # a builtin has no signature
        return
    try:
        if signature is not None:
            signature.bind(None)
    except TypeError as error:
        message = f"`{part}` of the program on rank {rank} is {part}{signature}: it takes no batch"
        helps = (f"write `def {part}(batch): ...`: it is called with the full batch of a step",)
        raise Refusal.of("S761", message, helps=helps) from error


_TAKES_BATCH = ("step", "evaluate", "evaluate_loss")
_FUNCTION = Callable, "a function"
_PARTS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("optimizer", "original", "clip", *_TAKES_BATCH[1:], "state_dict", "load"), _FUNCTION
    ),
    "names": ((Mapping, Callable), "a dict of names, or a function"),
    "layouts": (Mapping, "a dict: `{'its.name': Shard(0)}`"),
    "dropout": (Mapping, "a dict: `{'its.module': Shard(0)}`"),
}


def check_optimizer(optimizer: Any, location: str) -> Any:
    """Return the user's optimizer; refuse (S767) anything else."""
    if callable(getattr(optimizer, "step", None)) and hasattr(optimizer, "state"):
        return optimizer
    description = "nothing" if optimizer is None else kind_of(optimizer)
    message = f"`optimizer` returns {description} {location}, not a torch.optim.Optimizer"
    raise Refusal.of("S767", message, helps=("return `torch.optim.AdamW(named)`",))


def pickle_function(function: Any, part: str) -> bytes:
    """Pickle a function of the program for the original's process (S767 if that is impossible)."""
    try:
        return pickling.dumps(function)
    except Exception as error:
        message = f"`{part}` of the program cannot be given to the original: {error}"
        helps = (f"write it beside `program`: `def {part}(...): ...`, without the module",)
        raise Refusal.of("S767", message.split("\n")[0], helps=helps) from error


def check_norm(norm: Any, rank: int) -> float:
    """Return the user's gradient norm; refuse (S767) what is not a number."""
    value = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if isinstance(value, (int, float)) or getattr(value, "numel", lambda: 0)() == 1:
        return float(value)
    description = "nothing" if norm is None else kind_of(norm)
    message = f"`clip` returns {description} on rank {rank}, not the norm"
    helps = ("return the norm of all gradients, before they are clipped, on every rank",)
    raise Refusal.of("S767", message, helps=helps)


def call_with_optimizer(function: Callable[..., Any], optimizer: Any, *args: Any) -> Any:
    """Call a user's function, with the optimizer if it has a parameter of that name."""
    if takes_optimizer(function):
        return function(*args, optimizer=optimizer)
    return function(*args)


def takes_optimizer(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `optimizer`."""
    return "optimizer" in inspect.signature(function).parameters


def check_ranks(ranks: object) -> None:
    """Refuse (S767) an invalid number of ranks."""
    if isinstance(ranks, int) and ranks > 0:
        return
    message = (
        "the number of ranks is not given"
        if ranks is None
        else f"`{ranks}` ranks cannot be started"
    )
    helps = ("write `world = 4` in the program's file", "or say it: `--ranks 4`, `ranks=4`")
    raise Refusal.of("S767", message, helps=helps)


@contextmanager
def user_errors(make: Make, part: str, rank: int | None) -> Iterator[None]:
    """Turn an error in a user's function into a refusal (S762, S765) at its line, with the rank.

    The rank is None in the process of the original.
    """
    try:
        yield
    except Refusal:
        raise
    except (Exception, SystemExit) as error:
        raise _refusal_of(error, make, part, rank) from error


def _refusal_of(error: BaseException, make: Make, part: str, rank: int | None) -> Refusal:
    file = file_of(make)
    place = f"on rank {rank}" if rank is not None else NO_RANKS
    frames, deeper = frames_in(file, error)
    summary = _summary(error)
    code = getattr(make, "__code__", None)
    if not frames and file and code is not None:  # the call itself fails: use the definition's line
        frames = [traceback.FrameSummary(file, code.co_firstlineno, code.co_name)]
    label = Label(at_frame(frames[-1]), "here") if frames else Label()
    notes = [f"called at {Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames[:-1]]
    notes += deeper
    if (root := _root_cause(error)) is not error:
        notes.append(f"it comes from {_summary(root)}")
    if _GPU.search(str(error).lower()):
        message = f"`{part}` asks for a GPU {place}: {summary}"
        helps = (
            "the judge runs ranks on CPUs, under gloo: take the device of the model's parameters, "
            "`next(model.parameters()).device`",
        )
        return Refusal.of("S765", message, label, notes=tuple(notes), helps=helps)
    message = f"`{part}` raises {summary} {place}"
    helps = (_EXIT_HELP if isinstance(error, SystemExit) else _HELPS[part],)
    if "Invalid scalar type" in str(error):
        helps = (_EIGHT_BITS_HELP,)
    if _ALREADY_JOINED.search(str(error)):
        helps = (
            "the process group exists already: make it only `if not dist.is_initialized(): ...`",
        )
    refusal = Refusal.of("S762", message, label, notes=tuple(notes), helps=helps)
    refusal.consequence = is_consequence(error)  # type: ignore[attr-defined]
    return refusal


def _summary(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def _root_cause(error: BaseException) -> BaseException:
    """Return the error at the end of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


_EXIT_HELP = (
    "the check continues after this call: return from it, and call `sys.exit` in the script"
)
_EIGHT_BITS_HELP = (
    "gloo sums no floats of eight bits: cast them before, or judge without `--dtype`: float64 then "
    "stands in for them"
)
_HELPS = {
    "program": "it gets a copy of the model on each rank: on the CPU, in float64 or `--dtype`",
    "step": "it is called on every rank with the full batch, and must take the rank's part of it",
    "optimizer": "it is called with (name, parameter) pairs, also with those of the original",
    "original": "it is called with the original's model, and its step with the full batch, without "
    "ranks",
    "clip": "it is called with the maximum norm, and returns the norm before clipping",
    "evaluate": "it is called on every rank with the full batch",
    "evaluate_loss": "it is called on every rank with the full batch, and returns a number",
    "state_dict": "it is called on every rank, with `optimizer` if it takes one",
    "names": "it is called with a name of the program, and returns the original's name, or None",
    "load": "it is called on every rank of a new program, with the state that this rank saved",
}
