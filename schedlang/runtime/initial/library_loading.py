"""Tensors of weight files under the names and in the layouts of a model.

transformers renames, fuses and splits tensors of files while it loads them. Its own loader runs
here on a model on the meta device, with lazy tensors, so that nothing is read yet.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from schedlang.runtime.initial.lazy_tensors import FileTensor, LazyTensor, lazy_tensor
from schedlang.runtime.tracing.meta_runs import copy_with, meta_parameter


@dataclass(frozen=True)
class NamedTensors:
    """Lazy tensors by the names of a model.

    shapes  of tensors that the library has found with another shape than the model's
    errors  messages of the library, by the first name that it could not make
    """

    tensors: Mapping[str, LazyTensor]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


def load_names(
    leaves: Mapping[str, FileTensor], model: nn.Module | None, parts: bool = False
) -> NamedTensors:
    """Return the tensors of files as tensors of a model; only heads of files have been read.

    parts  the model has shards of its parameters, or layers of a program
    """
    tensors = {name: lazy_tensor(leaf) for name, leaf in leaves.items()}
    if model is None or not _is_transformers(model):
        return NamedTensors(tensors)
    return _run_library_loader(tensors, _original_on_meta(model) if parts else _meta_copy(model))


def _is_transformers(model: nn.Module) -> bool:
    """Return whether a model is of transformers, and the library has a loader for it."""
    loading = sys.modules.get("transformers.core_model_loading")
    modeling = sys.modules.get("transformers.modeling_utils")
    return None not in (loading, modeling) and isinstance(model, modeling.PreTrainedModel)  # type: ignore[union-attr]


def _meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device."""
    return copy_with(model, lambda _, tensor: meta_parameter(tensor), lambda t: t.to("meta"))


def _original_on_meta(model: Any) -> nn.Module:
    """Return the original model of a program on the meta device, by class and configuration."""
    from torch.distributed.fsdp import FSDPModule

    kind: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        original: nn.Module = kind(copy.deepcopy(model.config))
    dtypes = {name: tensor.dtype for name, tensor in _tensors(model)}
    for name, tensor in _tensors(original):
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
    return original


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers by all of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def _run_library_loader(tensors: Mapping[str, LazyTensor], on_meta: Any) -> NamedTensors:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    rules = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(on_meta))
    with _no_progress_bar():
        report, _ = convert_and_load_state_dict_in_model(on_meta, dict(tensors), rules)
    return NamedTensors(
        {name: value for name, value in _tensors(on_meta) if isinstance(value, LazyTensor)},
        {name: tuple(shape) for name, shape, _ in report.mismatched_keys},
        {name: _last_line(lines) for name, lines in report.conversion_errors.items()},
    )


def _last_line(lines: str) -> str:
    return next((line for line in lines.splitlines()[::-1] if line.strip()), lines)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Disable the progress bar of the library, because nothing is read yet."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def other_names(names: Sequence[str], model: nn.Module | None) -> Iterator[str]:
    """Yield the names that a tensor may have in files, with or without the prefix of a base
    model."""
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    yield from names
    for name in names if prefix else ():
        yield f"{prefix}.{name}"
        if name.startswith(f"{prefix}."):
            yield name.removeprefix(f"{prefix}.")
