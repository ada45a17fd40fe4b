"""https://github.com/huggingface/diffusers/issues/14265: a ring derives its first turn only.

Keys and values go around the ring in forward and in backward, but each backward turn reads the
saved ones of the first turn: the rank's own.
"""

from __future__ import annotations

from tests.judging.catches import ring
from tests.judging.catches.language_model import program_pair

NAMED = r"the gradient of the output of `inner\.(key|query|value)`: .*right before it: `inner`"
model = ring.model
# bug: the rank's own keys and values; fixed: those of the turn
wrong, right = program_pair(ring.program, "stale", "")
