"""Sizes of messages between stages, which each receiver is told once per shape of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from schedlang.runtime.pipeline.flight import Message
from schedlang.runtime.pipeline.p2p import Layout, layout_of
from schedlang.runtime.tracing.graph import refusal

FIXED = (
    "let shapes depend only on the shapes of the batch",
    "or cut at another module, so that these values stay within one stage",
)


@dataclass(eq=False)
class Sizes:
    """Layouts of the values that go forward along each edge, by signature of the microbatch.

    Each replica of an edge has one sender and one receiver, and both keep this book alike.
    """

    _layouts: dict[Any, Layout] = field(default_factory=dict)

    def known(self, signature: Any, name: Message) -> Layout | None:
        """The layout of a message, if both ends know it."""
        return self._layouts.get(_key(signature, name))

    def learn(self, signature: Any, name: Message, layout: Layout) -> None:
        """Note the layout that a header told."""
        self._layouts[_key(signature, name)] = layout

    def told(self, signature: Any, name: Message, tensors: Sequence[torch.Tensor]) -> bool:
        """Note what is sent; whether the receiver must be told its layout first.

        Raises Refusal S612 for another layout than before, of which the receiver knows nothing.
        """
        layout = layout_of(tensors)
        before = self.known(signature, name)
        if before not in (None, layout):
            reason = f"stage {name.source} sends tensors whose shapes depend on values"
            raise refusal("S612", "", reason, *FIXED, note="the receiving stage must know them")
        self.learn(signature, name, layout)
        return before is None


def _key(signature: Any, name: Message) -> Any:
    return (name.source, name.target, name.replica, name.slice, signature)
