"""Codes of running, precision, kernels, memory and the model file."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S811": ("no float64 for this operation", "It reads the bits of a float."),
    "S812": ("randomness of its own", "Other ranks cannot reproduce its numbers."),
    "S813": ("a checkpointed module changes its buffers", "Recomputation would change them twice."),
    "S821": ("the kernel does not fit the call", "Leave this module as it is."),
    "S831": ("inductor cannot compile here", "It needs a compiler; the message says which."),
    "S832": ("a kernel of its own already", "Fuse or replace, not both."),
    "S833": ("not one graph", "The region cannot be compiled whole; choose a smaller one."),
    "S834": ("compiled too often", "Something that it reads differs from call to call."),
    "S840": (
        "no regions of these modules",
        "A group is of modules that follow each other in a list, and has one at least.",
    ),
    "S841": (
        "too little memory for any plan",
        "A module that is recomputed keeps all that it saves while its backward runs.",
    ),
    "S842": (
        "half of a plan, or two",
        "`plan` and `memory` stand together, without `group`, `every` and `save`, on one list.",
    ),
    "S843": (
        "recomputed with other numbers",
        "A module draws from Python, from numpy, or keeps something from call to call.  Only\n"
        "torch's generators, also those that a module holds itself, are replayed.",
    ),
    "S844": (
        "nothing is left to move",
        "Modules within a budget drop and make again what they save; no store sees it.",
    ),
    "S845": (
        "two rows choose where stages start",
        "`plan=adapipe` cuts the list of a `pipeline_split` row; named cuts or `balance` do, too.",
    ),
    "S846": (
        "written into before it was made again",
        "An operator runs again on what it was given; nothing may have written into that.",
    ),
    "S847": (
        "moved by two rows",
        "`plan=pofo` says which modules keep, repeat or move what they save; with another row\n"
        "that moves the same its count of bytes and copies would be untrue.",
    ),
    "S850": (
        "what a row puts on disk cannot be written",
        "The step is undone on all ranks.  Files lie in the temporary folder: set TMPDIR, or make\n"
        "room; a step needs room for the new beside the old.",
    ),
    "S851": (
        "a peer that cannot hold this",
        "`layers[:2]  offload(optimizer, to=peer, over=pp)` sends optimizer state to the next\n"
        "rank of the pipeline, `offload(activations, to=peer, over=pp)` what forwards save.  All\n"
        "else, and every other axis, uses `to=cpu` or `zero`.",
    ),
    "S854": (
        "parameters that are gathered together lie apart",
        "`zero` gathers a layer as one, so all of it lies on one tier: select complete layers.",
    ),
    "S855": (
        "a step on full tensors cannot be undone",
        "Sharded parameters are gathered for an optimizer that needs full tensors; with\n"
        "anything on disk such a step might fail half done.",
    ),
    "S856": (
        "half of a compression",
        "Sums of gradients: `compress(gradients, powersgd | int8 | onebit, over=dp)`.\n"
        "What modules save: `layers.*  compress(activations, int8 | int4 | int2)`,\n"
        "or `compress(activations, adaptive, bits=4)`, whose tensors share a budget.",
    ),
    "S857": (
        "two rows about what a module saves",
        "It is rounded, or saved by something else: one of them.  What is rounded may move:\n"
        "select modules to `offload` that are rounded, or hold those that are.  `checkpoint` of\n"
        "modules that are rounded, or lie in such, keeps what it keeps in fewer bits: inputs of\n"
        "modules, groups and regions of plans, and results that are spared (`save=`, `pareto`).\n"
        "Not where modules choose by values, where `plan=dtr` drops tensors as it runs, where\n"
        "messages are kept, nor single operators (`pareto`) of ranks that split weights.",
    ),
    "S858": (
        "parts of activations in fewer bits",
        "Whole numbers stand for blocks of a tensor; those of a part are others.  Of parts along\n"
        "one axis that splits weights, and one that splits tokens, one process can round the same\n"
        "blocks.  What experts save that ranks share out is kept as it is; with a\n"
        "`capacity`, which counts tokens of the whole batch, the batch may not be split.",
    ),
    "S859": (
        "activations in fewer bits, in an order that saves several of them",
        "Stale weights and cut sequences: one process would not save the same tensors.",
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
    "S866": ("no collective of this number", "`why FILE --collectives` lists them."),
    "S870": ("the kernel takes no such argument", "`chunk` bounds the logits of a head's loss."),
    "S871": (
        "angles that are learned",
        "The kernel `rope` turns queries and keys by constant angles: these need no gradient.",
    ),
    "S875": (
        "a head whose logits could not wait for the loss",
        "`linear_cross_entropy` needs a head that is replicated, or sharded along `vocab` over\n"
        "one axis.  Sharded in another way the logits would be computed as without the kernel.",
    ),
    "S876": ("a package that is not installed", "Its kernel is called where the package is."),
    "S877": (
        "an attention that the kernel does not know",
        "It is asked for with an argument that the kernel has not; leave the module as it is.",
    ),
    "S878": (
        "two rows for one attention",
        "`context_parallel` computes attention over ranks itself; no other kernel would be run.",
    ),
    "S880": (
        "nothing that could replace a module",
        "`replacements` of the model file says what is.",
    ),
    "S881": (
        "a replacement that does not fit",
        "It has the same parameters, or says what its own are made of, and takes the same call.",
    ),
    "S882": ("a pattern without a match in the module", "The message has the nearest miss."),
    "S883": ("a data flow that cannot be followed", "It chooses by values; name a smaller module."),
    "S884": ("nothing to gain", "One kernel is what fusing makes of several."),
    "S885": ("not a pattern", "Functions of torch, `+ - * / @`, literals and all its parameters."),
    "S886": ("a bias that cannot stand apart", "Linear layers have one that nothing looks at."),
    "S887": (
        "no chain of rows",
        "A generated kernel takes pointwise operators, and sums and extremes along the last dim.\n"
        "The message names the operator that is none of them; inductor may take it.",
    ),
    "S888": (
        "nothing is gained by fusing",
        "`plan` counts the kernels and the bytes of a fused region beside those of the model.",
    ),
    "S890": (
        "a cast that means nothing",
        "`fp32` is an island inside of a lower dtype; `scale` and `growth` are of `fp16`.",
    ),
    "S891": (
        "no master weights",
        "A parameter that is stored in few bits loses steps that are smaller than its rounding.",
    ),
    "S892": (
        "casts within casts",
        "A module computes in one dtype; only `cast(fp32)` may stand inside of a lower one.",
    ),
    "S893": (
        "the rows name two loss scales",
        "There is one loss, and all its gradients have one scale.",
    ),
    "S894": (
        "a scaled loss, and sums in fewer bytes",
        "What a code leaves out is kept for the next step, which may have another scale.",
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
    "S907": ("no plan to be read", "It must be one that `schedlang plan --out` wrote."),
    "S909": ("no language server", "It needs pygls: `pip install 'schedlang[editors]'`."),
    "S910": (
        "nothing reads a key of the batch",
        "A batch holds what the forward takes by name, and what `loss` and `weight` read.",
    ),
    "S914": (
        "measured times of another plan",
        "What `run --timeline t.html --json` measured counts for the same mesh, microbatches and\n"
        "slices, and for operations that ran: another order of them may be simulated.",
    ),
    "S915": (
        "no measured times to be read",
        "`plan --cost T.json` reads what `run FILE --timeline t.html --json` printed.  Times may\n"
        "be given as text too, in milliseconds: `--cost F=18,B=37,step=4`.",
    ),
    "S935": (
        "unequal parts of activations in fewer bits",
        "What a rank saves of a module is compared with what the whole module saves: each tensor\n"
        "the same, or an equal part along one dim.  Else one process has other blocks to round.\n"
        "Attention that drops weights saves scores in one process, and none where ranks split\n"
        "tokens.",
    ),
}
