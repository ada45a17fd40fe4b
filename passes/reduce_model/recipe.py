"""A recipe: the whole numbers from which a model was made, and the model for other numbers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal

if TYPE_CHECKING:
    from torch import nn

TOKENS = ("token_id", "token_index")  # how transformers names numbers that are ids, not sizes

LAYERS = "layer"  # in the names of their numbers of layers: n_layer, num_hidden_layers

TITLES = {
    "S751": "this model cannot be reduced",
    "S752": "no reduced model keeps all that the schedule does",
    "S753": "the batch does not fit the reduced model",
}


def refused(code: str, reason: str, *helps: str) -> Refusal:
    """Make the refusal of a reduction, with what to write instead."""
    offer = "define `small()` in the model file: it returns the model to verify"
    return Refusal(Diagnostic(code, TITLES[code], notes=(reason,), helps=(offer, *helps)))


@dataclass(frozen=True)
class Recipe:
    """`sizes` by name, dotted inside nested configurations; `make` takes those that change.

    `specials` are the ids that stand for something: padding, the end of a text.
    """

    sizes: Mapping[str, int]
    make: Callable[[Mapping[str, int]], nn.Module]
    specials: tuple[int, ...] = ()

    def meta(self, changed: Mapping[str, int]) -> nn.Module | None:
        """The model of other sizes on the meta device; None where its constructor fails."""
        import torch

        try:
            with torch.device("meta"):
                return self.make(changed)
        except Exception:  # whatever a constructor raises, it refuses these numbers
            return None


def recipes(model: nn.Module, function: Callable[..., nn.Module] | None = None) -> Iterator[Recipe]:
    """Yield ways to make a model anew: by its class from its `config`, or by a function of sizes.

    A config is one of transformers' kind, with `to_dict`; the numbers of a function are those of
    its parameters whose defaults are whole.
    """
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        yield Recipe(
            {name: value for name, value in _numbers(config) if not name.endswith(TOKENS)},
            lambda changed: type(model)(changed_config(config, changed)),
            tuple(sorted({v for name, v in _numbers(config, least=0) if name.endswith(TOKENS)})),
        )
    numbers = _defaults(function) if function is not None else {}
    if function is not None and numbers:
        yield Recipe(numbers, lambda changed: function(**{**numbers, **changed}))


def _defaults(function: Callable[..., Any]) -> dict[str, int]:
    """The keyword parameters of a function whose defaults are whole numbers."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if type(p.default) is int and p.name != "seed"}


def _numbers(config: Any, prefix: str = "", least: int = 2) -> Iterator[tuple[str, int]]:
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if type(value) is int and value >= least:
            yield prefix + name, value
        elif isinstance(value, list | tuple) and name.endswith(TOKENS):
            yield from ((prefix + name, one) for one in value if type(one) is int)
        elif hasattr(value, "to_dict"):
            yield from _numbers(value, f"{prefix}{name}.", least)


def changed_config(config: Any, changed: Mapping[str, int]) -> Any:
    """A copy of a configuration with other numbers.

    Lists with an entry for each layer become as short as the number of layers; ids of tokens stay
    below the vocabulary.
    """
    new = copy.deepcopy(config)
    for path, value in changed.items():
        *above, name = path.split(".")
        holder, before = new, config
        for part in above:
            holder, before = getattr(holder, part), getattr(before, part)
        old = getattr(before, name)
        setattr(holder, name, value)
        for key, entry in vars(before).items() if LAYERS in name else ():
            if value < old and isinstance(entry, list | tuple) and len(entry) == old:
                setattr(holder, key, entry[:value])
    _tokens_inside(new, None)
    return new


def _tokens_inside(config: Any, above: int | None) -> None:
    """Ids beyond the vocabulary become its last ones, different ids different ones."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    own = getattr(config, "vocab_size", None)
    size = (
        own or above or next((s for s in (getattr(c, "vocab_size", None) for c in inner) if s), 0)
    )
    named = {
        key: entry
        for key, entry in vars(config).items()
        if key.endswith(TOKENS) and entry is not None and size
    }
    known = [v for e in named.values() for v in (e if isinstance(e, list | tuple) else (e,))]
    folded = special_ids(tuple(v for v in known if type(v) is int), size)
    for key, entry in named.items():
        if isinstance(entry, list | tuple):
            setattr(config, key, type(entry)(folded.get(v, v) for v in entry))
        else:
            setattr(config, key, folded.get(entry, entry))
    for value in inner:
        _tokens_inside(value, size)


def special_ids(ids: tuple[int, ...], size: int) -> dict[int, int]:
    """Map special ids into a vocabulary of `size`: an id stays, or becomes one of the last."""
    ids = tuple(sorted({v for v in ids if v >= 0}))
    high = [v for v in ids if v >= size - len(ids)]
    return {v: v for v in ids} | {v: size - len(high) + k for k, v in enumerate(high)}
