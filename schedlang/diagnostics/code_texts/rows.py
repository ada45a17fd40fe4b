"""Codes of one row, and of two rows that meet."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S401": (
        "the primitive does not fit the module",
        "The message gives the class of the module and what the primitive needs.",
    ),
    "S402": (
        "a size does not divide",
        "Every rank needs an equal shard. Choose another axis size, or write `pad` above this\n"
        "row.",
    ),
    "S403": (
        "heads do not divide",
        "Attention is sharded by complete heads, and by complete key-value heads. The message\n"
        "lists the axis sizes that fit.",
    ),
    "S404": (
        "a module whose forward cannot be sharded",
        "The module computes more than a plain module of its type, so its shards would give a\n"
        "wrong result. Shard the modules inside it, or keep it replicated.",
    ),
    "S405": (
        "a module gets a shard but needs the full tensor",
        "schedlang follows shapes through the model on the meta device. A call got a shard where\n"
        "it needs the full tensor. The message names the module and the call.",
    ),
    "S406": (
        "blocks do not add up to the dim",
        "`blocks=` lists sizes. Their sum must be the size of the dim.",
    ),
    "S407": (
        "weight and bias do not fit together",
        "Shard weight and bias along `out`, or neither of them. A module with `weight_norm`,\n"
        "`spectral_norm` or a parametrization has no parameter `weight`: it computes the weight\n"
        "of others, so only its bias could be sharded.",
    ),
    "S408": ("the wrong scope", "Some rows apply to the whole model only, others never do."),
    "S409": (
        "nothing is left to balance",
        "Single modules already say where stages start. `balance` needs a list of modules.",
    ),
    "S410": (
        "the kernel computes something else",
        "The module does not compute what the kernel computes, so the kernel cannot replace it.",
    ),
    "S411": ("no weight gradient", "`split_backward` needs modules with trainable weights."),
    "S412": (
        "nothing is sent",
        "`overlap(transfers)` overlaps transfers between stages: it needs stages. `gather_rows`\n"
        "gathers the rows of all ranks that split the batch: it needs the axes of `zero`.",
    ),
    "S413": (
        "no parameter or every parameter is frozen",
        "`freeze` must freeze at least one parameter and leave at least one trainable.",
    ),
    "S414": (
        "a weight that cannot be quantised here",
        "A quantised weight is frozen and stays on the device. Each block of inputs has one scale\n"
        "and must be on one rank, so a shard must end where a block ends.",
    ),
    "S416": (
        "nothing to tie or untie",
        "`tie` needs two or more parameters of the same shape. `untie` needs a parameter that two\n"
        "modules share.",
    ),
    "S417": (
        "no full gradient to compress",
        "Compress over the axes of a `zero(stage=0)` row. Only there does a rank all-reduce full\n"
        "gradients.",
    ),
    "S418": (
        "no adapter is possible here",
        "A projection can have one adapter. It needs a weight that no other module shares, so\n"
        "that the adapter can be merged into it.",
    ),
    "S419": (
        "windows do not fit the shards",
        "If positions are sharded, each shard must be a multiple of the stride and at least as\n"
        "long as the window reaches. The full tensor must give one output for each stride.",
    ),
    "S420": (
        "the ranks do not divide a length",
        "A row shards a tensor along a dim. The number of ranks does not divide the size of this\n"
        "dim in this batch.",
    ),
    "S421": (
        "not a module of experts",
        "An experts module gets tokens, the experts of each token and their routing weights. It\n"
        "returns the weighted sum of the experts' outputs. Dim 0 of its parameters counts the\n"
        "experts. schedlang tried a small copy; the message gives the difference.",
    ),
    "S422": (
        "arguments of `expert_parallel` that do not go together",
        "The message names arguments that exclude each other, or that do not fit the rest of the\n"
        "schedule.",
    ),
    "S425": (
        "nothing to complete",
        "`complete` adds the missing rows to the `shard` rows of a schedule. This schedule has\n"
        "none over the axis.",
    ),
    "S426": ("two ways to complete", "Write the rows of one of them, or gather the output."),
    "S427": (
        "no way to complete",
        "No rows fit those of the schedule. The message lists what was tried, and why it was\n"
        "refused.",
    ),
    "S428": (
        "experts that cannot be sharded inside",
        "`inner=` shards each expert along its own hidden dim, into equal shards.",
    ),
    "S501": ("done twice", "Two rows do the same at one module. Drop one of them."),
    "S502": ("one recomputed region inside another", "The inner module would be recomputed twice."),
    "S503": (
        "rows in the wrong order",
        "Each primitive reads and writes some facets of the plan, and this gives the order.\n"
        "`schedlang explain --conflicts` shows the order of all primitives.",
    ),
    "S504": (
        "an axis shards a tensor only once",
        "Name another axis, or drop one of the two rows.",
    ),
    "S505": (
        "a row changes numerics more than its step allows",
        "Rounding is always allowed. Name any other change in the step:\n"
        '`step "..." relax(rng) {`.',
    ),
    "S506": (
        "a tied weight is sharded in one module only",
        "Write a `shard` row for each module that shares the weight.",
    ),
    "S508": (
        "an axis cannot shard the optimizer state",
        "Another row uses the axis, or already shards the state over it.",
    ),
    "S509": (
        "two rows order the pipeline",
        "One axis cuts the model, and one row orders its pipeline.",
    ),
    "S510": (
        "a grid whose rows do not split the batch",
        "The ranks of the first axis of a grid or cube hold different rows of the batch: add a\n"
        "`zero` row over it. The ranks of the other axes hold the same rows and different shards\n"
        "of the hidden dim.",
    ),
}
