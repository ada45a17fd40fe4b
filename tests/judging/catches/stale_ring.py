"""https://github.com/huggingface/diffusers/issues/14265: a ring derives its first turn only.

Forward keys and values go around. Backward they go around, too, but what derives a turn reads those
that were saved in the first one: the rank's own.
"""

from __future__ import annotations

from tests.judging.catches import ring
from tests.judging.catches.words import pair

NAMED = r"the gradient of the output of `inner\.(key|query|value)`: .*right before it: `inner`"
model = ring.model
# as it was written: the rank's own keys and values; mended: those of the turn
wrong, right = pair(ring.program, "stale", "")
