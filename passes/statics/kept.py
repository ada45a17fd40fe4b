"""Proof that rows which change how a module computes leave what it is: names, hooks, state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from schedlang.passes.laying.propagate import Traced
from schedlang.plan import Action, Plan

if TYPE_CHECKING:
    from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
         "_state_dict_hooks", "_load_state_dict_post_hooks")  # fmt: skip


def kept(plan: Plan) -> Iterator[tuple[str, str, Action]]:
    """Apply kernels and regions to a copy, one module of each kind a row, and compare.

    Gives module, reason and row where a parameter, its dtype or `requires_grad`, a buffer, a child
    or a hook is no longer what it was.
    """
    from schedlang.passes.running.build import Builder
    from schedlang.runtime.recording.meta import hollow_model

    rows = [a for a in plan.actions if "structure" in a.primitive.writes]
    if not rows:
        return
    model: Any = hollow_model(plan.model.model, {})
    builder = Builder(plan, model, Traced(), None)  # type: ignore[arg-type]
    for action in rows:
        seen = set()
        for fqn in action.sites:
            site = plan.model.sites[fqn]
            if site.kind in seen:
                continue
            seen.add(site.kind)
            before = _facts(model.get_submodule(fqn))
            action.primitive.apply(site, builder)
            after = _facts(model.get_submodule(fqn))
            for what in before:
                if before[what] != after[what]:
                    yield fqn, f"`{action.name}` changes its {what}", action


def _facts(module: nn.Module) -> dict[str, object]:
    """What may not change, by words."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    hooks = {
        (name, kind): tuple(getattr(part, kind, {}).values())
        for name, part in module.named_modules()
        for kind in HOOKS
    }
    return {
        "parameters": {name: id(p) for name, p in parameters.items()},
        "dtypes": {name: p.dtype for name, p in parameters.items()},
        "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
        "buffers": {n: id(b) for n, b in module.named_buffers(remove_duplicate=False)},
        "children": [name for name, _ in module.named_modules()],
        "hooks": hooks,
        "mode": module.training,
    }
