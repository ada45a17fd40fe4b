"""Codes of running, precision, kernels, memory and the model file."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S811": (
        "no float64 for this operation",
        "The operation reads the bits of a float, and they differ in float64.",
    ),
    "S812": (
        "randomness that other ranks cannot reproduce",
        "The forward draws random numbers in a way that other ranks cannot reproduce. The message\n"
        "names the call.",
    ),
    "S813": (
        "a checkpointed module changes its buffers or inputs",
        "Recomputation would change the buffers twice, or start from the changed inputs.",
    ),
    "S821": ("the kernel does not fit the call", "Leave this module out of the row."),
    "S831": (
        "inductor cannot compile here",
        "Inductor needs a compiler. The message says which one.",
    ),
    "S832": (
        "a module that already has a kernel",
        "Fuse the module or replace its kernel, not both.",
    ),
    "S833": (
        "more than one graph",
        "The region cannot be compiled as one graph. Choose a smaller region.",
    ),
    "S834": (
        "compiled too often",
        "The region reads something that differs from call to call, so it is compiled again and\n"
        "again.",
    ),
    "S840": (
        "a group of modules that does not exist",
        "A group is one or more consecutive modules of a list.",
    ),
    "S841": (
        "too little memory for any plan",
        "During the backward of a recomputed module all its activations are in memory. The\n"
        "message gives the bytes that a plan needs.",
    ),
    "S842": (
        "arguments of a plan that do not go together",
        "`plan` needs `memory` and excludes `group`, `every` and `save`. It applies to one list\n"
        "of modules.",
    ),
    "S843": (
        "recomputation gives other values",
        "A module draws random numbers from Python or numpy, or keeps state from call to call.\n"
        "Recomputation replays only torch's generators, including those that a module holds.",
    ),
    "S844": (
        "nothing is left to offload",
        "Modules with a memory budget drop and recompute their activations. No activation is left\n"
        "to offload.",
    ),
    "S845": (
        "two rows choose where stages start",
        "`plan=adapipe` chooses the cuts for the list of a `pipeline_split` row. So that row must\n"
        "not select single modules or use `balance`.",
    ),
    "S846": (
        "changed in place before recomputation",
        "Recomputation calls an operator again with its saved inputs. Here an input was changed\n"
        "in place.",
    ),
    "S847": (
        "offloaded by two rows",
        "`plan=pofo` chooses for each module: save, recompute or offload. If another row offloads\n"
        "the same activations, the plan's bytes and copies are wrong.",
    ),
    "S850": (
        "offloaded state cannot be written to disk",
        "The step is undone on all ranks. The files are in the temporary folder: set TMPDIR, or\n"
        "free disk space. A step needs space for the new files beside the old ones.",
    ),
    "S851": (
        "state that a peer cannot hold",
        "Over the axis of a pipeline, `layers[:2]  offload(optimizer, to=peer, over=pp)` sends\n"
        "optimizer state to the next rank, and `offload(activations, to=peer, over=pp)` sends\n"
        "saved tensors. For other state and other axes use `to=cpu` or `zero`.",
    ),
    "S854": (
        "parameters that are gathered together are on two devices",
        "`zero` gathers all parameters of a layer together, so they must be on one device. Select\n"
        "complete layers.",
    ),
    "S855": (
        "a step on full tensors cannot be undone",
        "This optimizer needs full tensors, so sharded parameters are gathered. If state is on\n"
        "disk, such a step could fail halfway and could not be undone.",
    ),
    "S856": (
        "arguments of `compress` that do not go together",
        "For gradients: `compress(gradients, powersgd | int8 | onebit, over=dp)`.\n"
        "For saved tensors: `layers.*  compress(activations, int8 | int4 | int2)`, or\n"
        "`compress(activations, adaptive, bits=4)`, where the tensors share a budget of bits.",
    ),
    "S857": (
        "two rows for the activations of a module",
        "Only one of the two rows may apply, except:\n"
        "`offload` may select modules that are compressed or contain such modules.\n"
        "`checkpoint` may select compressed modules or modules inside them. Then its saved\n"
        "tensors are compressed: inputs of modules, groups and regions of plans, and saved\n"
        "results (`save=`, `pareto`). This excludes modules that read values to choose,\n"
        "`plan=dtr`, saved collectives, and `pareto` for single operators on ranks that shard\n"
        "weights.",
    ),
    "S858": (
        "compressed shards of activations",
        "Activations are compressed in blocks, and a shard has other blocks than the full tensor.\n"
        "A single process can reproduce the blocks for one axis that shards weights and one that\n"
        "splits tokens. The saved tensors of distributed experts are not compressed. With\n"
        "`capacity`, which counts tokens of the whole batch, the batch may not be split.",
    ),
    "S859": (
        "compressed activations in an order with several versions",
        "With stale weights or slices, a single process would save other tensors than the ranks.\n"
        "So the two cannot be compared.",
    ),
    "S860": (
        "the plan costs more than is expected",
        "`expect` compares a bound with what `plan` counts: peak bytes of a step, bytes sent,\n"
        "pipeline bubble. The time of a step comes from a measurement of `run` or the simulation\n"
        "of `plan --cost`. `plan` shows the parts of each figure.",
    ),
    "S861": (
        "not a measure of a plan",
        "Compare a measure with a bound: `expect peak_memory < 70GiB on h100x64`,\n"
        "`expect comm_bytes(tp) < 2GiB`, `expect bubble < 0.2`, `expect time(step) < 180ms`.",
    ),
    "S862": (
        "an expectation that cannot be computed",
        "Counting bytes needs a batch. Counting memory needs a step that can be simulated without\n"
        "values.",
    ),
    "S863": ("`model()` raises", "The message gives the error and its line in the model file."),
    "S864": ("`batch()` raises", "The message gives the error and its line in the model file."),
    "S865": (
        "`loss` or `weight` raises",
        "These functions are first called on the meta device. There the output and the tensors of\n"
        "the batch have no values.",
    ),
    "S866": ("no collective with this number", "`why FILE --collectives` lists the numbers."),
    "S867": (
        "a model that cannot be copied",
        "schedlang never changes your model; it changes copies. So `copy.deepcopy(model)` must\n"
        "work, also for attributes that are not modules. Local ranks get a pickled copy.",
    ),
    "S868": (
        "a sparse gradient",
        "Gradients are all-reduced, clipped and sliced as dense tensors.",
    ),
    "S870": (
        "the kernel takes no such argument",
        "Only `linear_cross_entropy` takes `chunk`: it bounds the memory of its logits.",
    ),
    "S871": (
        "angles that need a gradient",
        "The kernel `rope` rotates queries and keys by constant angles. It computes no gradient\n"
        "for the angles.",
    ),
    "S875": (
        "a head whose logits are computed before the loss",
        "`linear_cross_entropy` needs a head that is replicated, or sharded along `vocab` over\n"
        "one axis. With another placement the full logits are computed, as without the kernel.",
    ),
    "S876": (
        "a package that is not installed",
        "The kernel is part of another package. Install it where the program runs.",
    ),
    "S877": (
        "an attention that the kernel does not support",
        "The module passes an argument that the kernel does not have. Leave the module out of the\n"
        "row.",
    ),
    "S878": (
        "two rows for one attention",
        "`context_parallel` computes the attention over ranks with its own kernels. Another\n"
        "kernel would never run.",
    ),
    "S880": ("an unknown replacement", "Define it in `replacements` of the model file."),
    "S881": (
        "a replacement that does not fit",
        "The new module needs the same arguments, and the same parameter names or a mapping of\n"
        "names.",
    ),
    "S882": (
        "a pattern without a match in the module",
        "The message shows the nearest match, and where it differs.",
    ),
    "S883": (
        "a data flow that cannot be followed",
        "The module's forward cannot be traced, for example because it reads values to choose,\n"
        "runs a part without gradients or under another autocast, or sets attributes of modules.\n"
        "Select a smaller module.",
    ),
    "S884": (
        "nothing to gain",
        "`fuse` makes one kernel of several. This module is one kernel already.",
    ),
    "S885": (
        "not a pattern",
        "A pattern may contain functions of torch, `+ - * / @` and literals. It must use all its\n"
        "parameters.",
    ),
    "S886": (
        "a bias that cannot be separated",
        "The bias must belong to a linear layer, and nothing may read the product without the\n"
        "bias.",
    ),
    "S887": (
        "not a chain of row-wise operators",
        "A generated kernel supports pointwise operators, and sum, max and min along the last\n"
        "dim. The message names the operator that is something else. Inductor may support it.",
    ),
    "S888": (
        "nothing is gained by fusing",
        "`plan` counts the kernels and bytes of a fused region and of the unfused model. Here\n"
        "fusing saves neither.",
    ),
    "S890": (
        "an argument without effect in `cast`",
        "`fp32` is for modules inside a lower dtype. `scale` and `growth` are for `fp16`.",
    ),
    "S891": (
        "no master weights",
        "If a parameter is stored in a low-precision dtype, updates smaller than its rounding are\n"
        "lost.",
    ),
    "S892": (
        "casts within casts",
        "A module computes in one dtype. Inside a lower dtype only `cast(fp32)` is allowed.",
    ),
    "S893": (
        "the rows name two loss scales",
        "There is one loss, so all gradients have the same loss scale.",
    ),
    "S894": (
        "a scaled loss and compressed gradients",
        "The compression error is kept for the next step. That step may have another loss scale.",
    ),
    "S895": (
        "an operation that torch does not run under a cast",
        "torch.autocast casts only the operations in its lists. Another operation may get tensors\n"
        "of two dtypes, or a dtype that it does not support. Keep its module in float32:\n"
        "`cast(fp32)`.",
    ),
    "S901": ("the model file has no batch", "Define `batch(seed)`. It returns a dict of tensors."),
    "S902": (
        "`batch` does not return a dict",
        "Return a dict with the arguments of the forward and what the loss reads.",
    ),
    "S903": ("`model` does not return a module", "Return a torch.nn.Module."),
    "S904": (
        "no model file",
        "Put a `model.py` into the folder of the schedule, or `gpt.py` beside `gpt.sched`; or\n"
        "name a file: `--model`.",
    ),
    "S905": (
        "the model file fails to import",
        "The message shows the error of the file, with its line.",
    ),
    "S906": (
        "the model file has no `model()`",
        "Define this function. It may build the model on the meta device.",
    ),
    "S907": ("not a saved plan", "The file must be one that `schedlang plan --out` wrote."),
    "S909": (
        "no language server",
        "The language server needs pygls: `pip install 'schedlang[editors]'`.",
    ),
    "S910": (
        "nothing reads a key of the batch",
        "Each key of a batch must be an argument of the forward, or be read by `loss` or\n"
        "`weight`.",
    ),
    "S914": (
        "measured times of a different plan",
        "Times of `run --timeline t.html --json` apply only to the same mesh, microbatches and\n"
        "slices, and only to operations that ran. A different order of these operations may be\n"
        "simulated.",
    ),
    "S915": (
        "no readable measured times",
        "`plan --cost T.json` reads the output of `run FILE --timeline t.html --json`. You can\n"
        "also give times in milliseconds: `--cost F=18,B=37,step=4`.",
    ),
    "S935": (
        "unequal compressed shards of activations",
        "For each module, a rank must save the tensors that a single process saves, or equal\n"
        "shards of them along one dim. Otherwise a single process would round other blocks. For\n"
        "example, attention with dropout saves scores in a single process, but not on ranks that\n"
        "split tokens.",
    ),
    "S936": (
        "no readable machine",
        "`--on mine.toml` reads a table that describes a machine: the output of\n"
        "`schedlang calibrate`, or data-sheet figures (speed, stream, link, network, node,\n"
        "memory). If nodes differ, add one `[[node]]` for each kind, with the `device` of its\n"
        "ranks.",
    ),
    "S938": (
        "no table of runs",
        "`calibrate model.py --runs FILE` reads one row for each run, from CSV or from a JSON\n"
        "list of objects. A row has `step_s` and words of a search (`tp`, `pp`, `rows`, `micro`,\n"
        "..). At least three runs need a time, and the model must allow each setting.",
    ),
}
