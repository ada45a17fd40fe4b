"""Some bugs of the zoo under their function's names, and a pool whose ranks have one."""

# ruff: noqa: F401

from tests.zoo.bug import Patch
from tests.zoo.heads import mask_not_sliced, partial_sums_skipped
from tests.zoo.memory import other_masks_in_recomputation
from tests.zoo.pipeline import (
    last_microbatch_dropped,
    norm_counts_ties_twice,
    ties_not_summed,
    ties_summed_twice,
)
from tests.zoo.pool import Mutated
from tests.zoo.replicas import (
    averaged_by_fully_shard,
    mean_of_means,
    replicas_not_summed,
    tail_lost,
)
from tests.zoo.saved import saved_wrong
from tests.zoo.steps import clip_by_local_norm, clip_ignored
from tests.zoo.tensor import (
    bias_on_every_rank,
    blocks_ignored,
    embedding_without_mask,
    enter_without_all_reduce,
    gather_turns_the_other_way,
    reduce_reduces_again,
)
