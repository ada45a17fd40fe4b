"""Places of tokens in the form that an attention takes: found by calling it."""

from __future__ import annotations

import inspect
import itertools
from contextlib import suppress
from typing import Any

import torch
from torch import nn


def with_tables(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call with places of tokens in the form that the module takes.

    Tables of cosines and sines are as wide as a head, or half of it (gpt-oss) or a quarter, or one
    of complex numbers (Llama 4); some modules look places up by themselves.
    """
    tables = kwargs.get("position_embeddings")
    forms: list[Any] = [None]
    if tables is not None:
        half = [t.chunk(2, -1)[0] for t in tables]
        quarter = [t.chunk(4, -1)[0] for t in tables]
        forms = [tables, tuple(half), tuple(quarter), torch.complex(*half)]
    hidden = kwargs.get("hidden_states")
    places = None if hidden is None else torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    takes = inspect.signature(module.forward).parameters
    for form, told in itertools.product(forms, (False, True)):
        tried = kwargs if form is None else {**kwargs, "position_embeddings": form}
        if told and "position_ids" not in takes:
            continue
        tried = {**tried, "position_ids": places} if told else tried
        with torch.no_grad(), suppress(Exception):  # of the module's own code: the next form
            module(**tried)
            return tried
    return kwargs
