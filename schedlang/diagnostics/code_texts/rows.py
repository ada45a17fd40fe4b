"""Codes of one row, and of two rows that meet."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S401": ("the primitive does not fit the module", "The message names the module's class."),
    "S402": (
        "a size does not divide",
        "Every rank gets an equal part.  Choose another size of the axis, or `pad` first.",
    ),
    "S403": (
        "heads do not divide",
        "Attention splits by whole heads, and by whole key-value heads; the message names the\n"
        "sizes that fit.",
    ),
    "S404": ("a module with a forward of its own", "Shard the modules inside of it."),
    "S405": (
        "a module gets a shard, and needs the full tensor",
        "Following the shapes through the model on the meta device, a call got a shard where it\n"
        "needs the full tensor.  The message names the module and the call.",
    ),
    "S406": ("blocks do not add up to the dim", "`blocks=` lists sizes that add up to it."),
    "S407": (
        "weight and bias do not fit together",
        "Shard the bias along `out` if the weight is sharded along `out`, and only then.",
    ),
    "S408": ("not for this scope", "Some rows are about the whole model, some never are."),
    "S409": (
        "nothing is left to balance",
        "Single modules say where stages start; only a list can be balanced.",
    ),
    "S410": ("the kernel computes something else", "The module is not what the kernel replaces."),
    "S411": ("no weight gradient", "`split_backward` is for modules with trained weights."),
    "S412": ("nothing is sent", "Transfers overlap where a model is cut into stages."),
    "S413": (
        "nothing is frozen, or everything",
        "Something is frozen, and something still trained.",
    ),
    "S414": (
        "a weight that cannot lie in codes",
        "A quantised weight is frozen, lies on the device, and has each block of inputs on one\n"
        "rank: shards end where blocks end.",
    ),
    "S416": ("nothing to tie or untie", "Parameters of one shape become one; a shared one, two."),
    "S417": ("no full gradient to compress", "Compress over the axes of a `zero(stage=0)` row."),
    "S418": (
        "no adapter can stand here",
        "A projection has one adapter, and a weight of its own, into which that can be merged.",
    ),
    "S419": (
        "windows do not fit the shards",
        "Where positions are sharded, each shard is a multiple of the stride and at least as long\n"
        "as the window reaches, and the full tensor gives one output for each stride.",
    ),
    "S420": (
        "a length that the ranks do not divide",
        "A tensor is sharded along a dim whose size in this batch the ranks do not divide.",
    ),
    "S421": (
        "not a module of experts",
        "It is called with tokens, the experts of each token and their weights, gives their\n"
        "sum of weight times output, and holds parameters whose first dim are the experts.\n"
        "A small copy was tried; the message says what differs, and by how much.",
    ),
    "S422": (
        "arguments of `expert_parallel` that do not go together",
        "The message says which arguments of `expert_parallel` exclude each other, or do not fit\n"
        "the rest of the schedule.",
    ),
    "S425": ("nothing to complete", "`complete` adds to rows that stand beside it."),
    "S426": ("two ways to complete", "Write the rows of one of them, or gather."),
    "S427": (
        "no way to complete",
        "No rows were found that fit those of the schedule; the message says why.",
    ),
    "S428": (
        "experts that cannot be sharded inside",
        "`inner=` shards every expert along its own hidden dim, into equal parts.",
    ),
    "S501": ("done twice", "Two rows do the same at one module; drop one."),
    "S502": ("one region inside another", "The inner module would be recomputed twice."),
    "S503": (
        "rows in the wrong order",
        "The order follows from what each verb reads and writes: `schedlang explain --conflicts`\n"
        "shows it for all of them.",
    ),
    "S504": ("an axis shards a tensor only once", "Name another axis, or drop one of the rows."),
    "S505": (
        "a row changes numerics more than its step allows",
        'Rounding is always allowed; anything else must be named: `step "..." relax(rng) {`.',
    ),
    "S506": (
        "a tied weight is sharded in one module only",
        "Both modules that share a weight need a row.",
    ),
    "S508": (
        "an axis cannot shard the optimizer state",
        "It is used by another row, or shards the state already.",
    ),
    "S509": ("two rows order the pipeline", "One axis cuts the model, one row orders it."),
    "S510": (
        "a grid whose rows do not split the batch",
        "The first axis of a grid or a cube holds different rows of the batch: `zero` names it.\n"
        "The others hold parts of the hidden dim, and see the same rows.",
    ),
}
