"""The loss of one forward; the refusal of a model that gives none, with what would give one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, kind_of
from schedlang.ir import pytree
from schedlang.runtime.batch import called, named_arguments


def forward(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None,
) -> tuple[Any, Tensor | None]:
    """The output of a model, and its loss."""
    output = called(model, batch)
    return output, loss_of(output, batch, loss)


def loss_of(
    output: Any,
    batch: Mapping[str, Any],
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None,
) -> Tensor | None:
    """The loss of a forward: by the function given, by the model, or the output if a scalar."""
    if loss is not None:
        return loss(output, batch)
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) else None


# ---- No loss: how one would be had of what the model gives.


LABELS = ("labels", "label", "targets", "target", "y")
OUTPUTS = ("logits", "sample", "prediction", "last_hidden_state")


def no_loss(model: Any, output: Any, batch: Mapping[str, Any]) -> Diagnostic:
    """A model without a loss (S615), and a function for its file, made for what it returns."""
    return Diagnostic(
        "S615",
        "the model returns no loss",
        notes=(
            f"it returns {kind_of(output)}, and there is no `loss(output, batch)`",
            *_absent(model, batch),
        ),
        helps=(
            "add to the model file:\n      def loss(output, batch):\n"
            f"          return {_loss(model, output, batch)}",
            "or let the model return one: put labels into the batch",
        ),
    )


def not_a_loss(value: Any, model: Any = None, batch: Mapping[str, Any] | None = None) -> Diagnostic:
    """A loss function that returns something else than one number (S615)."""
    if isinstance(value, Tensor):
        said = f"a tensor of shape {list(value.shape)}"
        help_ = "return one number: its mean, `value.mean()`"
    else:
        said = "None" if value is None else kind_of(value)
        help_ = "return a tensor of one number"
    return Diagnostic(
        "S615",
        f"`loss(output, batch)` returns {said}, not one number that has a gradient",
        notes=tuple(_absent(model, batch)) if batch is not None else (),
        helps=(help_,),
    )


def is_loss(value: Any) -> bool:
    """Return whether a loss function gave what a backward can begin from."""
    return isinstance(value, Tensor) and value.numel() == 1


def _absent(model: Any, batch: Mapping[str, Any]) -> list[str]:
    """Return notes on arguments of the forward that look like labels and are not in the batch."""
    names = named_arguments(model) if model is not None else None
    return [
        f"its forward takes `{name}`, which is not in the batch"
        for name in LABELS
        if name in (names or ()) and name not in batch
    ]


def _loss(model: Any, output: Any, batch: Mapping[str, Any]) -> str:
    leaves, _ = pytree.tree_flatten_with_path(output)
    floats = [(path, v) for path, v in leaves if isinstance(v, Tensor) and v.is_floating_point()]
    scalar = next((path for path, v in floats if v.dim() == 0 and v.requires_grad), None)
    if scalar is not None:
        return _place(scalar, output)
    if not floats:
        return 'torch.nn.functional.mse_loss(output, batch["target"])'
    path, value = next((one for one in floats if _word(one[0]) in OUTPUTS), floats[0])
    said, key = _place(path, output), _labels(model, batch)
    label = batch.get(key)
    if isinstance(label, Tensor) and label.is_floating_point():
        return f'torch.nn.functional.mse_loss({said}, batch["{key}"])'
    flat = value.dim() > 2 and (not isinstance(label, Tensor) or label.dim() > 1)
    if flat:
        said = f"{said}.flatten(0, -2)"
    return f'torch.nn.functional.cross_entropy({said}, batch["{key}"]{".flatten()" * flat})'


def _labels(model: Any, batch: Mapping[str, Any]) -> str:
    """The key that looks like labels: by its name, or as one that the forward does not take."""
    names = named_arguments(model)
    left = [key for key in batch if names is not None and key not in names]
    return next((key for key in LABELS if key in batch), left[0] if left else LABELS[0])


def _word(path: Any) -> str:
    return str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""


def _place(path: Any, output: Any) -> str:
    """A place in an output as Python says it: an attribute, where there is one."""
    said, held = "output", output
    for key in path:
        word = getattr(key, "key", getattr(key, "name", None))
        if isinstance(word, str) and word.isidentifier() and hasattr(held, word):
            said, held = f"{said}.{word}", getattr(held, word)
        else:
            index = word if word is not None else key.idx
            said, held = f"{said}[{index!r}]".replace("'", '"'), held[index]
    return said
