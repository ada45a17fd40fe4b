"""Arguments of a row and dtypes in the words of the language."""

from __future__ import annotations

import dataclasses

from schedlang.primitive import Primitive
from schedlang.value import shown

SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def arguments(primitive: Primitive) -> str:
    """What differs from the defaults, as the language writes it: `stage=1, over=dp`."""
    said = []
    for one in dataclasses.fields(primitive):  # type: ignore[arg-type]
        value = getattr(primitive, one.name)
        if value == one.default:
            continue
        if is_rest(one.type):
            said += [f"{name}={_word(each)}" for name, each in value]
        elif one.kw_only:
            said.append(f"{one.name}={_word(value)}")
        else:
            said += [_word(v) for v in (value if isinstance(value, tuple) else (value,))]
    return ", ".join(said)


def is_rest(kind: object) -> bool:
    """Does a field hold whatever other keywords a row is given?"""
    return str(kind).startswith("Rest[")


def _word(value: object) -> str:
    """A value as the language writes it; names stand without quotes, one of several alone."""
    if isinstance(value, str) and value.isidentifier():
        return str(value)
    if isinstance(value, tuple):
        names = all(isinstance(v, str) for v in value)
        if names and len(value) == 1:
            return _word(value[0])
        return f"[{', '.join(map(_word, value))}]"
    return shown(value)


def short(dtype: str) -> str:
    """f32 for float32."""
    word = dtype.rstrip("0123456789")
    return SHORT.get(word, word) + dtype[len(word) :]
