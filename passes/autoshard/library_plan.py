"""Notes where transformers' own plan of tensor parallelism splits a model otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from schedlang.ir.plan import Plan
from schedlang.passes.complete.proposed_rows import names_text
from schedlang.passes.reduce_model.blocks import Blocks

STYLES = {"colwise": "out", "rowwise": "in", "embedding_rowwise": "vocab"}


def notes_on_differences(plan: Plan, blocks: Blocks, axis: str) -> Iterator[str]:
    """Yield notes where transformers' own plan for the model splits otherwise."""
    their_plan = getattr(blocks.facts.model, "tp_plan", None)
    names_by_text: dict[str, dict[str, None]] = {}
    for pattern, style in (their_plan or {}).items() if isinstance(their_plan, Mapping) else ():
        their_dim = STYLES.get(next((s for s in STYLES if str(style).startswith(s)), ""))
        if their_dim is None:
            continue
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for fqn in filter(regex.fullmatch, blocks.facts.sites):
            our_dim = _ours(plan, blocks, fqn, axis)
            if our_dim not in (their_dim, None):
                here = f"split along {our_dim}" if our_dim else "replicated"
                text = f"`{style}` there, {here} here"
                names_by_text.setdefault(text, {})[blocks.common_name(fqn)] = None
    for text, names in names_by_text.items():
        yield f"transformers' own plan differs: {names_text(list(names))}: {text}"


def _ours(plan: Plan, blocks: Blocks, fqn: str, axis: str) -> str | None:
    """Return the dim of the weight that is split, "" for none; None where it has no named dims."""
    site = blocks.facts.sites[fqn]
    dims = site.dims.get("weight", ())
    if not dims or "weight" not in site.parameters:
        return None
    layout = plan.effective_layout(site.parameters["weight"].name)
    return next((dims[s.dim] for s in layout.splits if s.axis == axis), "")
