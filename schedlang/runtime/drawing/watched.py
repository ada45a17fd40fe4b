"""What a forward draws on the meta device, seen where it ends: in the operators of torch.

Names of functions tell too little: attention, recurrent layers and samplers draw inside of others.
Every random operator counts, unless it runs inside of a function that has a logical form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from schedlang.runtime.drawing.draws import LOGICAL, active, illogical
from schedlang.runtime.drawing.random import name
from schedlang.runtime.modes import Ambient


class Watched(Ambient):
    """Runs beside a forward; it opens the functions that LogicalDropout opens, and no others.

    random  some operator draws
    apart   what draws as logical masks cannot, and the module that it runs in
    """

    def __init__(self, site: Callable[[], str]) -> None:
        super().__init__()
        self.site, self.random, self.apart = site, False, dict[str, str]()
        self._inside = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        refused = illogical(func, args, kwargs)
        if refused:
            self._note(name(func))
        if not refused and func not in LOGICAL:
            return self.run(func, types, args, kwargs)
        self._inside += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._inside -= 1

    def drew(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """To be told of every random operator that runs."""
        if not active(func, args, kwargs):
            return
        self.random = True
        if not self._inside:
            self._note(func._schema.name.replace("aten::", "torch."))

    def _note(self, drawing: str) -> None:
        self.random = True
        self.apart.setdefault(drawing, self.site())
