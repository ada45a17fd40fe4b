"""Codes of running, precision, kernels, memory and the model file."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S811": ("no float64 for this operation", "It reads the bits of a float."),
    "S812": ("randomness of its own", "Other ranks cannot reproduce its numbers."),
    "S813": (
        "a checkpointed module changes its buffers, or what it is given",
        "Recomputation would change them twice, or begin with what they have become.",
    ),
    "S821": ("the kernel does not fit the call", "Leave this module as it is."),
    "S831": ("inductor cannot compile here", "It needs a compiler; the message says which."),
    "S832": ("a module that has a kernel already", "Fuse or replace, not both."),
    "S833": ("not one graph", "The region cannot be compiled as one graph; choose a smaller one."),
    "S834": ("compiled too often", "Something that it reads differs from call to call."),
    "S840": (
        "a group of modules that does not exist",
        "A group is one or more consecutive modules of a list.",
    ),
    "S841": (
        "too little memory for any plan",
        "A module that is recomputed saves all its activations while its backward runs.",
    ),
    "S842": (
        "arguments of a plan that do not go together",
        "`plan` needs `memory`, and excludes `group`, `every` and `save`; it is for one list.",
    ),
    "S843": (
        "recomputation gives other values",
        "A module draws from Python, from numpy, or keeps something from call to call.  Only\n"
        "torch's generators, also those that a module holds itself, are replayed.",
    ),
    "S844": (
        "nothing is left to offload",
        "Modules with a memory budget drop and recompute activations: none is left to offload.",
    ),
    "S845": (
        "two rows choose where stages start",
        "`plan=adapipe` cuts the list of a `pipeline_split` row; so do single modules and\n"
        "`balance`.",
    ),
    "S846": (
        "changed in place before it was recomputed",
        "An operator is recomputed from its inputs, which nothing may have changed in place.",
    ),
    "S847": (
        "offloaded by two rows",
        "`plan=pofo` chooses which modules save, recompute or offload activations; with another\n"
        "row that offloads the same its count of bytes and copies would be wrong.",
    ),
    "S850": (
        "what a row offloads to disk cannot be written",
        "The step is undone on all ranks.  Files lie in the temporary folder: set TMPDIR, or make\n"
        "room; a step needs room for the new beside the old.",
    ),
    "S851": (
        "state that a peer cannot hold",
        "`layers[:2]  offload(optimizer, to=peer, over=pp)` sends optimizer state to the next\n"
        "rank of the pipeline, `offload(activations, to=peer, over=pp)` what forwards save.  All\n"
        "else, and every other axis, uses `to=cpu` or `zero`.",
    ),
    "S854": (
        "parameters that are gathered together are on two devices",
        "`zero` gathers a layer as one, so all of it lies on one tier: select complete layers.",
    ),
    "S855": (
        "a step on full tensors cannot be undone",
        "Sharded parameters are gathered for an optimizer that needs full tensors; with\n"
        "anything on disk such a step might fail half way.",
    ),
    "S856": (
        "arguments of `compress` that do not go together",
        "Sums of gradients: `compress(gradients, powersgd | int8 | onebit, over=dp)`.\n"
        "What modules save: `layers.*  compress(activations, int8 | int4 | int2)`,\n"
        "or `compress(activations, adaptive, bits=4)`, whose tensors share a budget.",
    ),
    "S857": (
        "two rows about the activations of a module",
        "Only one of them may apply.  Compressed activations may be offloaded: select modules to\n"
        "`offload` that are compressed, or contain such.  `checkpoint` of compressed modules, or\n"
        "of modules inside them, compresses what it saves: inputs of modules, groups and regions\n"
        "of plans, and results that are saved (`save=`, `pareto`). Not where modules read values\n"
        "to choose, where `plan=dtr` drops tensors at run time, where collectives are saved, nor\n"
        "single operators (`pareto`) of ranks that shard weights.",
    ),
    "S858": (
        "compressed shards of activations",
        "Activations are compressed block by block; a shard has other blocks.  Of shards along\n"
        "one axis that shards weights, and one that splits tokens, a single process can round the\n"
        "same blocks.  What distributed experts save is not compressed; with a `capacity`, which\n"
        "counts tokens of the whole batch, the batch may not be split.",
    ),
    "S859": (
        "compressed activations in an order with several versions",
        "With stale weights or slices a single process would not save the same tensors.",
    ),
    "S860": (
        "the plan costs more than is expected",
        "`expect` is held against what `plan` counts: bytes at the peak of a step, bytes sent,\n"
        "the pipeline's bubble; and the time of a step against what `run` measured, or `plan\n"
        "--cost` simulated.  `plan` shows where they come from.",
    ),
    "S861": (
        "nothing that can be expected of a plan",
        "A measure is compared with a bound: `expect peak_memory < 70GiB on h100x64`,\n"
        "`expect comm_bytes(tp) < 2GiB`, `expect bubble < 0.2`, `expect time(step) < 180ms`.",
    ),
    "S862": (
        "an expectation that cannot be computed",
        "Bytes are counted with a batch, and memory where a step can be played without values.",
    ),
    "S863": ("`model()` raises", "The message has the line of the model file, and the error."),
    "S864": ("`batch()` raises", "The message has the line of the model file, and the error."),
    "S865": (
        "`loss` or `weight` raises",
        "They are tried on the meta device first: they see the output, and the batch's tensors,\n"
        "without values.",
    ),
    "S866": ("a collective number that does not exist", "`why FILE --collectives` lists them."),
    "S867": (
        "the model has no copy",
        "A model is never changed: its copies are. So `copy.deepcopy(model)` has to work, also\n"
        "for attributes that are no modules.  To local ranks a copy is sent: it is pickled.",
    ),
    "S868": (
        "a sparse gradient",
        "Gradients are summed over ranks, clipped and sliced as dense tensors.",
    ),
    "S870": ("the kernel takes no such argument", "`chunk` bounds the logits of a head's loss."),
    "S871": (
        "angles that are learned",
        "The kernel `rope` turns queries and keys by constant angles: these need no gradient.",
    ),
    "S875": (
        "a head whose logits are computed before the loss",
        "`linear_cross_entropy` needs a head that is replicated, or sharded along `vocab` over\n"
        "one axis.  Sharded in another way the logits would be computed as without the kernel.",
    ),
    "S876": ("a package that is not installed", "Its kernel is called where the package is."),
    "S877": (
        "an attention that the kernel does not support",
        "It is called with an argument that the kernel does not have; leave the module as it is.",
    ),
    "S878": (
        "two rows for one attention",
        "`context_parallel` computes attention over ranks itself; no other kernel would be run.",
    ),
    "S880": (
        "an unknown replacement",
        "`replacements` in the model file defines them.",
    ),
    "S881": (
        "a replacement that does not fit",
        "It needs the same parameters, or a mapping of names, and the same arguments.",
    ),
    "S882": ("a pattern without a match in the module", "The message has the nearest miss."),
    "S883": (
        "a data flow that cannot be followed",
        "It reads values to choose; select a smaller module.",
    ),
    "S884": ("nothing to gain", "Fusing makes one kernel of several."),
    "S885": ("not a pattern", "Functions of torch, `+ - * / @`, literals and all its parameters."),
    "S886": (
        "a bias that cannot be separated",
        "It must be of a linear layer, and nothing may read the product without it.",
    ),
    "S887": (
        "not a chain of row-wise operators",
        "A generated kernel takes pointwise operators, and sums and extremes along the last dim.\n"
        "The message names the operator that is not one of them; inductor may support it.",
    ),
    "S888": (
        "nothing is gained by fusing",
        "`plan` counts the kernels and the bytes of a fused region beside those of the model.",
    ),
    "S890": (
        "a cast without effect",
        "`fp32` is for modules inside a lower dtype; `scale` and `growth` are for `fp16`.",
    ),
    "S891": (
        "no master weights",
        "A parameter that is stored in few bits loses steps that are smaller than its rounding.",
    ),
    "S892": (
        "casts within casts",
        "A module computes in one dtype; only `cast(fp32)` may be inside a lower one.",
    ),
    "S893": (
        "the rows name two loss scales",
        "There is one loss, and all its gradients have one scale.",
    ),
    "S894": (
        "a scaled loss and compressed gradients",
        "The error of compression is kept for the next step, which may have a different scale.",
    ),
    "S895": (
        "an operation that torch does not run under a cast",
        "torch.autocast casts what its lists name; another operation may meet tensors of two\n"
        "dtypes, or one that it has no code for. An island, `cast(fp32)`, keeps it in float32.",
    ),
    "S901": ("the model file has no batch", "Define `batch(seed)`: a dict of tensors."),
    "S902": (
        "`batch` returns something else",
        "Return a dict: what the forward and the loss take.",
    ),
    "S903": ("`model` returns something else", "Return a torch.nn.Module."),
    "S904": ("no model file", "Put a `model.py` beside the schedule, or name one: `--model`."),
    "S905": ("the model file fails to import", "Its own error is shown, with the line."),
    "S906": ("the model file has no `model()`", "Define it; it may build on the meta device."),
    "S907": ("not a saved plan", "It must be one that `schedlang plan --out` wrote."),
    "S909": ("no language server", "It needs pygls: `pip install 'schedlang[editors]'`."),
    "S910": (
        "nothing reads a key of the batch",
        "A batch holds what the forward takes by name, and what `loss` and `weight` read.",
    ),
    "S914": (
        "measured times of a different plan",
        "What `run --timeline t.html --json` measured counts for the same mesh, microbatches and\n"
        "slices, and for operations that ran: a different order of them may be simulated.",
    ),
    "S915": (
        "no readable measured times",
        "`plan --cost T.json` reads what `run FILE --timeline t.html --json` printed.  Times may\n"
        "be given as text too, in milliseconds: `--cost F=18,B=37,step=4`.",
    ),
    "S935": (
        "unequal compressed shards of activations",
        "What a rank saves of a module is compared with what the whole module saves: each tensor\n"
        "the same, or an equal shard along one dim.  Else a single process would round other\n"
        "blocks. Attention with dropout saves scores in a single process, and none where ranks\n"
        "split tokens.",
    ),
    "S936": (
        "no readable machine",
        "`--on mine.toml` reads a table with the fields of a machine: what `schedlang calibrate`\n"
        "wrote, or figures of a data sheet: speed, stream, link, network, node, memory.  A\n"
        "cluster of unlike nodes has a `[[node]]` for each kind, with the `device` of its ranks.",
    ),
}
