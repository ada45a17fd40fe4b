"""How a plan is printed from Python: as the verb `plan` shows it, or as its picture."""

from __future__ import annotations

from schedlang.plan import PRINTED, Plan
from schedlang.tables import columns


class _Printed:
    def text(self, plan: Plan) -> str:
        """The text of the verb `plan`; without a batch, memory of activations is not counted."""
        from schedlang.passes.costs.account import account
        from schedlang.passes.showing.show import view
        from schedlang.passes.showing.show_text import text

        return text(view(plan, account(plan, None)), width=columns())

    def picture(self, plan: Plan) -> str:
        """The picture of `plan --svg`."""
        from schedlang.passes.costs.account import account
        from schedlang.passes.showing.picture import picture
        from schedlang.passes.showing.show import view

        return picture(view(plan, account(plan, None)))


PRINTED.append(_Printed())
