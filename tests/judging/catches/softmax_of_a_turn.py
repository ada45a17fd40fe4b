"""https://github.com/tenstorrent/tt-metal/issues/53205: a ring derives each turn's own softmax.

What the softmax takes off is the mean over all words of what comes back; backward takes that over
the words of a turn. Values have the right gradients, queries and keys do not.
"""

from __future__ import annotations

from tests.judging.catches import ring
from tests.judging.catches.words import pair

NAMED = r"the gradient of the output of `inner\.(key|query)`: .*right before it: `inner(\.value)?`"
model = ring.model
# as it was written: the mean of a turn; mended: that of all words
wrong, right = pair(ring.program, "alone", "")
