"""A model file: where a model, its batches and its loss come from.

* A Python file as it is now: run from its text, not from what was compiled of it before. Python
  takes compiled code for current if the file has the same size and second of change: an edit
  within a second would be proven as it was before.
* A model file: where a model, its batches and its loss come from. By convention it is `model.py`
  beside the schedule and defines `model()`, `batch(seed)` and, where needed, `loss(output,
  batch)` and `weight(batch)`; for `verify --shrink` it may define `small()` and
  `small_batch(seed)`, for rows that `replace` modules `replacements`, what their names stand for.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.culprit import told
from schedlang.diagnostics.diagnostic import Refusal, guess, unknown
from schedlang.uncollected import uncollected

if TYPE_CHECKING:
    from torch import nn


class _FromText(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the text of the file; read no compiled file, and leave none beside it."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def module_of(name: str, path: str | Path) -> tuple[ModuleType, Callable[[], None]]:
    """A module under this name, known to Python, and what runs the file in it.

    Raises OSError where the file cannot be read, and whatever the file raises.
    """
    loader = _FromText(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert isinstance(spec, ModuleSpec), path
    module = sys.modules[name] = module_from_spec(spec)
    return module, lambda: loader.exec_module(module)


KNOWN = ("model", "batch", "loss", "weight", "small", "small_batch", "replacements")
IMPORT_NAME = "schedlang_model_file"


@dataclass(frozen=True)
class ModelFile:
    """An imported model file; `name` is the module's, by which other processes find it."""

    module: ModuleType
    name: str
    path: Path | None

    def model(self, *, meta: bool = False, seed: int = 0) -> nn.Module:
        """The model as `model()` makes it, on the meta device if only its shapes are needed.

        One that asks for values as it is made (an orthogonal parametrization) is made with them.
        """
        import torch

        torch.manual_seed(seed)
        if not meta:
            return self._checked(self._made("model"))
        try:
            with torch.device("meta"):
                return self._checked(self._made("model"))
        except Refusal as refusal:
            if "meta" not in str(refusal.__cause__):
                raise
        return self.model(seed=seed)

    def batch(self, seed: int = 0) -> dict[str, Any]:
        """The keyword arguments of a step; `batch(seed)` where it takes a seed, else `batch()`."""
        if not hasattr(self.module, "batch"):
            raise Refusal.of(
                "S901",
                f"{self._where} defines no `batch(seed)`",
                helps=("return a dict of tensors: the keyword arguments of the model's forward",),
            )
        made = self._made("batch", *((seed,) if self.varies else ()))
        if not isinstance(made, Mapping):
            raise Refusal.of(
                "S902",
                f"`batch` of {self._where} returns {type(made).__name__}, not a dict",
                helps=("return a dict: `{'input_ids': ids, 'labels': labels}`",),
            )
        return dict(made)

    def _made(self, name: str, *given: Any) -> Any:
        """Call a function of the file and return its result; refuse (S863, S864) at the line that
        raises."""
        function = getattr(self.module, name)
        try:
            return function(*given)
        except Refusal:
            raise
        except Exception as error:
            raise told(error, name, function) from error

    @property
    def varies(self) -> bool:
        """Whether `batch` takes a seed."""
        return "seed" in inspect.signature(self.module.batch).parameters

    @property
    def has_batch(self) -> bool:
        """Whether the file defines `batch`."""
        return hasattr(self.module, "batch")

    @property
    def loss(self) -> Callable[..., Any] | None:
        """`loss(output, batch)`, where the model returns none."""
        return getattr(self.module, "loss", None)

    @property
    def weight(self) -> Callable[..., Any] | None:
        """`weight(batch)`: what a part of a batch weighs in the mean."""
        return getattr(self.module, "weight", None)

    def small(self, seed: int = 0) -> nn.Module | None:
        """The reduced model that `small()` makes, where the file defines it."""
        import torch

        torch.manual_seed(seed)
        made = getattr(self.module, "small", None)
        return self._checked(made()) if made is not None else None

    def small_batch(self, seed: int = 0) -> dict[str, Any]:
        """A batch for the reduced model: `small_batch(seed)`, or else that of the whole one."""
        made = getattr(self.module, "small_batch", None)
        return dict(made(seed)) if made is not None else self.batch(seed)

    @property
    def files(self) -> dict[str, Path]:
        """The files that other processes must load, by the module name of each."""
        return {self.name: self.path} if self.path is not None else {}

    @property
    def _where(self) -> str:
        return f"`{self.path.name if self.path is not None else self.name}`"

    def _checked(self, model: Any) -> nn.Module:
        from torch import nn

        if not isinstance(model, nn.Module):
            raise Refusal.of(
                "S903",
                f"`model` of {self._where} returns {type(model).__name__}, not a module",
                helps=("return a torch.nn.Module",),
            )
        own = getattr(self.module, "replacements", None)
        if own is not None:  # beside the model it is known wherever the model goes
            model.replacements = own
        return model


def load_model_file(named: str | None, beside: Path | None = None) -> ModelFile:
    """The model file named by `--model` (a path or a dotted module), else the one beside a file.

    Raises Refusal S904 if there is none, S905 if it fails to import, S906 if it defines no model.
    """
    if named is not None and not named.endswith(".py"):
        return _checked(_run(lambda: importlib.import_module(named), named), named, None)
    path = Path(named) if named is not None else (beside or Path()).parent / "model.py"
    if not path.is_file():
        there = beside.parent / path if named is not None and beside is not None else path
        told = (f"there is one beside the schedule: `--model {there}`",) * there.is_file()
        raise Refusal.of(
            "S904",
            f"there is no model file `{path}`",
            helps=told
            or (
                "put a `model.py` that defines `model()` beside the schedule",
                "or name one: `--model path/to/file.py`, `--model package.module`",
            ),
        )
    module = imported(IMPORT_NAME, path)
    return _checked(module, IMPORT_NAME, path.resolve())


def imported(name: str, path: Path) -> ModuleType:
    """A file of the user's as a module of this name; refuses (S904, S905) what cannot be run."""
    if not path.is_file():
        raise Refusal.of("S904", f"there is no file `{path}`")
    module, load = module_of(name, path.resolve())
    _run(load, str(path))
    return module


class Importing:
    """Whether a model file is being imported in this process."""

    now = False


def _run(load: Callable[[], Any], what: str) -> Any:
    Importing.now = True
    try:
        with uncollected(imports=True):  # of torch and transformers it would take a second
            return load()
    except Refusal:
        raise
    except Exception as error:
        raise Refusal.of(
            "S905",
            f"importing the model file `{what}` fails",
            notes=tuple(_chain(error)),
            helps=(f"see the full error: `python -c 'import runpy; runpy.run_path(\"{what}\")'`",),
        ) from error
    finally:
        Importing.now = False


def _chain(error: BaseException | None) -> Iterator[str]:
    """Each exception and the line that raised it, the outermost first, down to the cause."""
    seen: set[int] = set()
    link = ""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield f"{link}{type(error).__name__}: {error}".split("\n")[0]
        if isinstance(error, SyntaxError) and error.filename:  # no frame is in that file
            yield f"{Path(error.filename).name}:{error.lineno}: {(error.text or '').strip()}"
        else:
            for frame in traceback.extract_tb(error.__traceback__)[-1:]:
                yield f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
        cause = error.__cause__
        link = "caused by " if cause is not None else "while handling "
        error = cause if cause is not None or error.__suppress_context__ else error.__context__


def _checked(module: ModuleType, name: str, path: Path | None) -> ModelFile:
    if not callable(getattr(module, "model", None)):
        defined = [word for word in vars(module) if not word.startswith("_")]
        raise Refusal.of(
            "S906",
            f"`{path.name if path is not None else name}` defines no `model()`",
            helps=(guess("model", defined, "it defines"),),
            facts=unknown("model", defined),
        )
    return ModelFile(module, name, path)
