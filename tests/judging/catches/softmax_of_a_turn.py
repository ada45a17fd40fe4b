"""https://github.com/tenstorrent/tt-metal/issues/53205: a ring derives each turn's own softmax.

The softmax's backward subtracts a mean over all tokens; here it is taken over the tokens of one
turn. Values have the right gradients, queries and keys do not.
"""

from __future__ import annotations

from tests.judging.catches import ring
from tests.judging.catches.language_model import program_pair

NAMED = r"the gradient of the output of `inner\.(key|query)`: .*right before it: `inner(\.value)?`"
model = ring.model
# bug: the mean of a turn; fixed: that of all tokens
wrong, right = program_pair(ring.program, "alone", "")
