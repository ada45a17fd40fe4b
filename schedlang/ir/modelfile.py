"""Model files: the Python file that defines a model, its batches and its loss.

* A file is run from its text, not from compiled code. Python takes compiled code for current if the
  file has the same size and second of change: an edit within a second would be proven as it was
  before.
* A file imports what lies beside it, as `python model.py` does; with relative imports it is a
  module of its package. A dotted module is found from the current folder, as by `python -m`.
* By convention the file is `model.py` beside the schedule, or `gpt.py` beside `gpt.sched`. It
  defines `model()`, `batch(seed)` and, where needed, `loss(output, batch)` and `weight(batch)`; for
  `verify --shrink` optionally `small()` and `small_batch(seed)`; for rows that `replace` modules,
  `replacements` by name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.user_errors import refusal_of
from schedlang.garbage_collection import without_collector
from schedlang.ir.model import check_unwrapped

if TYPE_CHECKING:
    from torch import nn


class _FromText(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the text of the file; read and write no compiled file."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def module_of(name: str, path: str | Path) -> tuple[ModuleType, Callable[[], None]]:
    """Register an empty module under this name; return it, and the function that runs the file in
    it.

    A file with relative imports is registered as a module of its package: `package.name`. Raises
    OSError where the file cannot be read. The function raises what the file raises.
    """
    folder, package = _import_folder(Path(path))
    _find_imports_in(folder, name)
    full_name = name if not package or name.startswith(f"{package}.") else f"{package}.{name}"
    loader = _FromText(full_name, str(path))
    spec = spec_from_file_location(full_name, path, loader=loader)
    assert isinstance(spec, ModuleSpec), path
    module = sys.modules[full_name] = module_from_spec(spec)
    return module, lambda: loader.exec_module(module)


def _import_folder(path: Path) -> tuple[Path, str]:
    """Return the folder in which a file's imports are looked for, and the file's package, or "".

    That is the file's own folder; with relative imports the one that contains its package. If only
    functions have them, which may never be called, the package must be one that can be imported.
    """
    folder, names = path.parent, []
    try:
        code = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return folder, ""
    if not _has_relative_imports(code, in_functions=True):
        return folder, ""
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    package = ".".join(reversed(names))
    if not _has_relative_imports(code, in_functions=False) and not _can_import(package, folder):
        return path.parent, ""
    return folder, package


def _has_relative_imports(code: ast.AST, in_functions: bool) -> bool:
    return any(
        (isinstance(node, ast.ImportFrom) and node.level > 0)
        or (
            (in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            and _has_relative_imports(node, in_functions)
        )
        for node in ast.iter_child_nodes(code)
    )


def _can_import(package: str, folder: Path) -> bool:
    path = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        return bool(package and importlib.import_module(package))
    except (Exception, SystemExit):
        return False
    finally:
        sys.path[:] = path


class ImportFolders:
    """The folders in which imports of files are looked for, by the name of the file.

    `added`: those that were put on Python's path for it, in front.
    """

    of: ClassVar[dict[str, Path]] = {}
    added: ClassVar[set[Path]] = set()


def _find_imports_in(folder: Path, name: str) -> None:
    """Put a folder first on Python's path, in place of that of the last file of this name.

    Modules of other files' folders that this one has as well (`layers.py`) will be imported anew.
    """
    others = {*ImportFolders.of.values()} - {folder}
    tops = {key.partition(".")[0] for key in sys.modules} if others else set()
    again = {t for t in tops if any(_lies_in(o, t) for o in others) and _has_module(folder, t)}
    for key in [key for key in sys.modules if key.partition(".")[0] in again]:
        del sys.modules[key]
    ImportFolders.of[name] = folder
    used = {*ImportFolders.of.values()}
    for entry in ImportFolders.added - used | ImportFolders.added & {folder}:
        if str(entry) in sys.path:
            sys.path.remove(str(entry))
    ImportFolders.added = ImportFolders.added & used | {folder}
    sys.path.insert(0, str(folder))  # also where it is on the path, behind others


def _lies_in(folder: Path, name: str) -> bool:
    """Return whether a top module, if it is imported, lies directly in a folder."""
    module = sys.modules.get(name)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return bool({str(folder / f"{name}.py"), str(folder / name)} & set(places))


def _has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


KNOWN_NAMES = ("model", "batch", "loss", "weight", "small", "small_batch", "replacements")
IMPORT_NAME = "schedlang_model_file"


@dataclass(frozen=True)
class ModelFile:
    """An imported model file; `name` is its module name, by which other processes find it."""

    module: ModuleType
    name: str
    path: Path | None

    def model(self, *, meta: bool = False, seed: int = 0) -> nn.Module:
        """Call `model()`, on the meta device if `meta`.

        A model that needs values while it is made (an orthogonal parametrization) is made with
        values.
        """
        import torch

        torch.manual_seed(seed)
        if not meta:
            return self._checked(self._call_function("model"))
        try:
            with torch.device("meta"):
                return self._checked(self._call_function("model"))
        except Refusal as refusal:
            if "meta" not in str(refusal.__cause__):
                raise
        return self.model(seed=seed)

    def batch(self, seed: int = 0) -> dict[str, Any]:
        """Return the keyword arguments of a step: `batch(seed)` if it accepts a seed, else
        `batch()`."""
        if not hasattr(self.module, "batch"):
            raise Refusal.of(
                "S901",
                f"{self._shown_name} defines no `batch(seed)`",
                helps=("return a dict of tensors: the keyword arguments of the model's forward",),
            )
        batch = self._call_function("batch", *((seed,) if self.accepts_seed else ()))
        if not isinstance(batch, Mapping):
            raise Refusal.of(
                "S902",
                f"`batch` of {self._shown_name} returns {type(batch).__name__}, not a dict",
                helps=("return a dict: `{'input_ids': ids, 'labels': labels}`",),
            )
        return dict(batch)

    def _call_function(self, name: str, *args: Any) -> Any:
        """Call a function of the file and return its result; refuse (S863, S864) at the line that
        raises."""
        function = getattr(self.module, name)
        try:
            return function(*args)
        except Refusal:
            raise
        except Exception as error:
            raise refusal_of(error, name, function) from error

    @property
    def accepts_seed(self) -> bool:
        """Whether `batch` accepts a seed."""
        return "seed" in inspect.signature(self.module.batch).parameters

    @property
    def has_batch(self) -> bool:
        """Whether the file defines `batch`."""
        return hasattr(self.module, "batch")

    @property
    def loss(self) -> Callable[..., Any] | None:
        """`loss(output, batch)`, for a model that returns no loss; else None."""
        return getattr(self.module, "loss", None)

    @property
    def weight(self) -> Callable[..., Any] | None:
        """`weight(batch)`: the weight of a part of a batch in the mean loss; else None."""
        return getattr(self.module, "weight", None)

    def small(self, seed: int = 0) -> nn.Module | None:
        """Return the reduced model that `small()` makes; None where the file does not define it."""
        import torch

        torch.manual_seed(seed)
        factory = getattr(self.module, "small", None)
        return self._checked(factory()) if factory is not None else None

    def small_batch(self, seed: int = 0) -> dict[str, Any]:
        """Return a batch for the reduced model: `small_batch(seed)`, or `batch(seed)` without
        it."""
        factory = getattr(self.module, "small_batch", None)
        return dict(factory(seed)) if factory is not None else self.batch(seed)

    @property
    def files(self) -> dict[str, Path]:
        """The files that other processes must load, by module name."""
        return {self.name: self.path} if self.path is not None else {}

    @property
    def _shown_name(self) -> str:
        return f"`{self.path.name if self.path is not None else self.name}`"

    def _checked(self, model: Any) -> nn.Module:
        from torch import nn

        if not isinstance(model, nn.Module):
            raise Refusal.of(
                "S903",
                f"`model` of {self._shown_name} returns {type(model).__name__}, not a module",
                helps=("return a torch.nn.Module",),
            )
        check_unwrapped(model)
        table = getattr(self.module, "replacements", None)
        if table is not None:  # stored on the model, so that it is found wherever the model is
            model.replacements = table
        return model


def load_model_file(model: str | None, schedule: Path | None = None) -> ModelFile:
    """Import the model file named by `--model`, or the one beside a schedule.

    model  a path, a folder with a `model.py`, or a dotted module
    Raises Refusal S904 if there is no file, S905 if the import fails, S906 if it defines no model.
    """
    if model is not None and Path(model, "model.py").is_file():
        model = str(Path(model, "model.py"))
    if model is not None and not model.endswith(".py") and Path(model).name == model:
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.insert(0, os.getcwd())
        return _checked(_run_import(lambda: importlib.import_module(model), model), model, None)
    path = Path(model) if model is not None else model_beside(schedule or Path())
    if not path.is_file():
        title = f"there is no model file `{path}`"
        raise Refusal.of("S904", title, helps=_other_files(path, model, schedule))
    module = import_file(IMPORT_NAME, path)
    return _checked(module, module.__name__, path.resolve())


def model_beside(schedule: Path) -> Path:
    """Return the model file of a schedule: `model.py` in its folder, else the file of its own name.

    The latter must define a model: `train.py` beside `train.sched` may be a program, and must not
    run. If there is neither, it returns the path of `model.py`.
    """
    path = schedule.parent / "model.py"
    own_name = schedule.with_suffix(".py") if schedule.suffix else path
    return own_name if not path.is_file() and _defines_model(own_name) else path


def _other_files(path: Path, model: str | None, schedule: Path | None) -> tuple[str, ...]:
    """Return helps that name the model files beside a schedule, or say how to name one."""
    if schedule is None:
        return ("name one: `path/to/file.py` or `package.module`",)
    if model is not None:
        places = (schedule.parent / path, path.with_suffix(".py"))
        files = [file for file in places if file.is_file()]
    else:
        files = [file for file in sorted(path.parent.glob("*.py")) if _defines_model(file)]
    hint = "there is one: `--model {}`"
    return tuple(hint.format(file) for file in files[:3]) or (
        "put a `model.py` that defines `model()` beside the schedule",
        "or name one: `--model path/to/file.py`, `--model package.module`",
    )


def _defines_model(file: Path) -> bool:
    """Return whether a line of a file begins to define or import `model`; the file is not run."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError):
        return False
    lines = r"^(def model\(|model\s*[:=]|from .* import .*\bmodel\b)"
    return re.search(lines, text, re.MULTILINE) is not None


def import_file(name: str, path: Path) -> ModuleType:
    """Import a user's file as a module of this name; refuses S904 and S905."""
    if not path.is_file():
        raise Refusal.of("S904", f"there is no file `{path}`")
    try:
        module, load = module_of(name, path.resolve())
    except OSError as error:
        raise Refusal.of("S904", f"`{path}` cannot be read: {error.strerror}") from error
    _run_import(load, str(path))
    return module


class ImportState:
    """State of the process: `active` is true while a model file is imported."""

    active = False


def _run_import(load: Callable[[], Any], name: str) -> Any:
    ImportState.active = True
    try:
        # importing torch and transformers takes a second less
        with without_collector(imports=True):
            return load()
    except Refusal:
        raise
    except Exception as error:
        raise Refusal.of(
            "S905",
            f"importing the model file `{name}` fails",
            notes=tuple(_describe_chain(error)),
            helps=(f"see the full error: `{_import_command(name)}`",),
        ) from error
    finally:
        ImportState.active = False


def _import_command(name: str) -> str:
    """Return the shell command that imports a file, or a dotted module, and nothing else."""
    if not name.endswith(".py"):
        return f"python -c 'import {name}'"
    path = Path(name).resolve()
    folder, package = _import_folder(path)
    load = f'import runpy; runpy.run_path("{path.name}")'
    command = f"python -c '{f'import {package}.{path.stem}' if package else load}'"
    return command if folder == Path.cwd() else f"cd {os.path.relpath(folder)} && {command}"


def _describe_chain(error: BaseException | None) -> Iterator[str]:
    """Yield each exception and the line that raised it, from the outermost down to the cause."""
    seen: set[int] = set()
    link = ""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield f"{link}{type(error).__name__}: {error}".split("\n")[0]
        # the traceback has no frame of that file
        if isinstance(error, SyntaxError) and error.filename:
            yield f"{Path(error.filename).name}:{error.lineno}: {(error.text or '').strip()}"
        else:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.line]
            for frame in frames[-1:]:  # importlib's own frames have no lines
                yield f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
        cause = error.__cause__
        link = "caused by " if cause is not None else "while handling "
        error = cause if cause is not None or error.__suppress_context__ else error.__context__


def _checked(module: ModuleType, name: str, path: Path | None) -> ModelFile:
    shown = path.name if path is not None else name
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(getattr(module, "model", None), torch.nn.Module):
        raise Refusal.of(
            "S906",
            f"`model` of `{shown}` is a module, not a function that makes one",
            helps=("write `def model():` above its lines, and `return` the module",),
            notes=("it is made several times: with values, and on the meta device",),
        )
    if not callable(getattr(module, "model", None)):
        defined = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        title = f"`{shown}` defines no `model()`"
        raise Refusal.unknown("S906", title, "model", defined, "it defines")
    return ModelFile(module, name, path)
