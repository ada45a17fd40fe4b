"""Pickle functions and values for another process with the same interpreter."""

from __future__ import annotations

import functools
import importlib
import io
import marshal
import pickle
import sys
import types
from typing import IO, Any

from schedlang.diagnostics.diagnostic import Refusal

LIBRARIES = frozenset({"transformers", "diffusers"})  # installed alike where the ranks run


def dumps(value: Any) -> bytes:
    """Pickle a value for `pickle.loads`; see `dump`."""
    with io.BytesIO() as file:
        dump(value, file)
        return file.getvalue()


def dump_job(value: Any) -> bytes:
    """Pickle the function and arguments of a job; refuse (S867) a model that cannot be pickled."""
    try:
        return dumps(value)
    except Exception as error:  # a `__reduce__` may raise anything
        raise Refusal.of(
            "S867",
            "the model cannot be sent to its ranks",
            notes=(f"pickling what they are given raises {type(error).__name__}: {error}",),
            helps=(
                "keep compiled functions, locks, files and generators out of its attributes",
                "or give the class that holds them a `__reduce__`",
            ),
        ) from error


def dump(value: Any, file: IO[bytes]) -> None:
    """Pickle a value by cloudpickle (closures and `__main__` included), for `pickle.load`.

    Code objects keep their file names, which cloudpickle drops from 3.1.3 on: without them a rank's
    traceback shows no lines, and the source of a function cannot be found. `marshal` keeps them;
    both processes run the same interpreter.
    """
    import cloudpickle  # type: ignore[import-untyped]

    reduce = _reduce_tensor if "torch" in sys.modules else lambda value: NotImplemented

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, types.CodeType):
                return marshal.loads, (marshal.dumps(value),)
            if isinstance(value, types.FunctionType) and _is_inner_of_library(value):
                return _make_function, _parts_of(value)
            if type(value).__module__ == "torch._ops":  # operators, and namespaces of them
                name = value.__name__ if isinstance(value, types.ModuleType) else str(value)
                if _operator_of(name) is value:
                    return _operator_of, (name,)
            reduced = reduce(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)


def _is_inner_of_library(function: types.FunctionType) -> bool:
    """Return whether this is a function inside a function of a library of models: a hook, say.

    cloudpickle would copy the library's globals with it, among them a context variable, which
    cannot be pickled, and of which there must be one.
    """
    library = (function.__module__ or "").split(".")[0]
    return library in LIBRARIES and "<locals>" in function.__qualname__


def _parts_of(function: types.FunctionType) -> tuple[Any, ...]:
    state = function.__qualname__, function.__kwdefaults__, function.__dict__
    return (
        function.__module__,
        function.__code__,
        function.__defaults__,
        function.__closure__,
        state,
    )


def _make_function(
    module: str, code: types.CodeType, defaults: Any, closure: Any, state: tuple[Any, ...]
) -> types.FunctionType:
    space = vars(importlib.import_module(module))
    function = types.FunctionType(code, space, code.co_name, defaults, closure)
    function.__qualname__, function.__kwdefaults__, attributes = state
    function.__dict__.update(attributes)
    return function


def _operator_of(name: str) -> Any:
    """Return an operator of torch ("aten.mm.default"), or a namespace; None: there is none."""
    import torch

    path = name.removeprefix("torch.ops").removeprefix(".")
    try:
        return functools.reduce(getattr, path.split(".") if path else [], torch.ops)
    except (AttributeError, RuntimeError):
        return None


def _reduce_tensor(value: Any) -> Any:
    from schedlang.runtime.comm import tensor_pickling

    return tensor_pickling.reduce_tensor(value)
