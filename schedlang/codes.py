"""Every code of a message: what it is about, and what usually helps."""

from __future__ import annotations

from collections.abc import Mapping

FAMILIES: Mapping[str, str] = {
    "0": "reading the text",
    "1": "declarations",
    "2": "names and selectors",
    "3": "arguments",
    "4": "one row",
    "5": "two rows",
    "6": "the pipeline, the batch and the structure of the model",
    "7": "verification and expectations",
    "8": "running: precision, randomness, kernels",
    "9": "the model file",
}

CODES: Mapping[str, tuple[str, str]] = {
    "S000": ("the file cannot be read", "It is missing, a directory, not permitted, or not UTF-8."),
    "S001": (
        "a character means nothing here",
        "Strings stand in double quotes and end on their line; comments begin with `#`.",
    ),
    "S002": (
        "a bracket is never closed",
        "Newlines inside ( ) and [ ] end nothing, so the mistake shows on a later line; the\n"
        "message points at the bracket that was opened.",
    ),
    "S003": (
        "something else was expected",
        "A row is `selector  primitive(arguments)`, with a space between; a declaration begins\n"
        "with its keyword and stands outside of steps.",
    ),
    "S004": (
        "the form of a row or a number is wrong",
        "Most often a colon or nothing at all stands between a selector and its primitive:\n"
        "write `h.*  checkpoint()`, not `h.*: checkpoint()`.  A colon asks for modules of a type.",
    ),
    "S005": (
        "parsed, but not interpreted yet",
        "The grammar has this statement and `fmt` formats it; executing it is still to come.",
    ),
    "S006": ("another version of the language", "This schedlang reads `schedule 1`."),
    "S007": (
        "a word of the language cannot be a name",
        "Knobs, axes, views, definitions and parameters need other names.  Modules may be called\n"
        "anything: put such a name in backquotes.",
    ),
    "S008": (
        "a primitive is not whole",
        "A subclass of Primitive has a docstring, an example, check and apply, facets that exist,\n"
        "and a name that no other module uses.",
    ),
    "S009": (
        "an extension cannot be imported",
        "Installed packages add primitives by entry points of the group `schedlang.primitives`;\n"
        "one of them fails when it is imported.",
    ),
    "S101": (
        "declared twice",
        "Knobs, axes, views, definitions and steps have names of their own.",
    ),
    "S102": ("a value of another type", "Knobs are int, float, bool or choice, and stay so."),
    "S103": (
        "a knob outside its domain",
        "`in [1, 2, 4]` and `in 1..8` say which values a knob may have, for you and for a tuner.",
    ),
    "S104": (
        "a requirement does not hold",
        "`require` is checked with the knobs, the mesh and the model before any row; the message\n"
        "lists knob values that would satisfy it.",
    ),
    "S105": ("a knob has no value", "Give it a default or set it: `--knob name=value`."),
    "S106": ("no such knob", "A setting must be of a knob that the schedule declares."),
    "S107": ("division by zero", "`/`, `//` and `%` need a right side that is not zero."),
    "S109": ("a setting cannot be read", "Write `--knob name=value` and `--mesh dp=2,tp=4`."),
    "S110": ("a schedule for another model", "`schedule 1 for Class` names the model's class."),
    "S111": (
        "the mesh does not add up",
        "Axes are named with sizes, slowest first; one may be `_`, the rest of the ranks.",
    ),
    "S112": ("files use each other", "`use` brings in what a file defines; it cannot be circular."),
    "S113": ("not here", "Steps do not nest; declarations and `undo` stand outside of them."),
    "S114": (
        "no such step in a base",
        "`override` and `drop` change steps that a `use` above brings in; a file's own steps are\n"
        "changed where they are written.",
    ),
    "S115": (
        "a base under a name",
        "A file with steps becomes part of this one; only libraries of\ndefinitions take `as`.",
    ),
    "S201": (
        "a selector matches no module",
        "Every segment must match under every module found so far: 31 of 32 layers is a mistake.\n"
        "End the path in `?` to take what there is.  `schedlang tree` shows all names.",
    ),
    "S202": ("an index out of range", "Indices count children from 0, slices work as in Python."),
    "S203": ("no module of this type", "`:Class` keeps modules of a class or of its subclasses."),
    "S204": ("no such axis", "`over=` names an axis or a view of the mesh."),
    "S205": ("an axis that no row uses", "Every axis of the mesh splits something, or the batch."),
    "S206": (
        "not a plain value of the model",
        "`model.a.b` reads numbers and texts.  A schedule never runs code, so methods, properties\n"
        "and private names cannot be read.",
    ),
    "S207": ("nothing is left of a selection", "`where` and `except` must keep some module."),
    "S208": ("no such attribute", "`where` sees a module's data, and params, dtype, fqn, index."),
    "S209": ("no such module or parameter", "Names are those of `model.named_modules()`."),
    "S210": ("nothing has this name", "A name in an expression is a knob, an axis or an argument."),
    "S211": (
        "`init` does not know the axis",
        "It reads what an axis is for from its name: `dp`, `data`, `fsdp` split the batch, `pp`\n"
        "and `pipe` the blocks, `tp` and `model` the tensors.",
    ),
    "S212": (
        "`init` found nothing for an axis to do",
        "Every way to split this model over the axis was refused; the notes say why.",
    ),
    "S301": (
        "no such primitive",
        "`schedlang explain` lists them; a definition must stand above its use.",
    ),
    "S302": ("no such argument", "`schedlang explain` shows what a primitive takes."),
    "S303": ("an unknown word", "Where words are expected there is a closed list of them."),
    "S304": ("a value of the wrong kind", "The message says which kind is meant."),
    "S305": ("an argument is missing", "The message shows an example."),
    "S306": ("this call does not fit its place", "Some primitives act on modules, some on all."),
    "S307": (
        "no such dim",
        "Linear and Conv1D have `in` and `out`, Embedding `vocab` and `hidden`; dims of other\n"
        "classes are counted: `S(0)`.",
    ),
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
        "the model cannot compute with the parts",
        "Following the shapes through the model on the meta device, some call met a part where it\n"
        "needs the whole.  The message names the module and the call.",
    ),
    "S406": ("blocks do not make up the dim", "`blocks=` lists sizes that add up."),
    "S407": (
        "weight and bias do not fit together",
        "A bias lies as the outputs of its weight: split along `out` if the weight is.",
    ),
    "S408": ("not for this scope", "Some rows are about the whole model, some never are."),
    "S409": (
        "nothing is left to balance",
        "Single modules are where stages start; a list is shared out.",
    ),
    "S419": (
        "windows do not fit the parts",
        "Where positions are split, each rank's part is a multiple of the stride, reaches as far\n"
        "as a window does, and the whole gives one output for each stride.",
    ),
    "S410": ("the kernel computes something else", "The module is not what the kernel replaces."),
    "S411": ("no weight gradient", "`split_backward` is for modules with trained weights."),
    "S412": ("nothing is sent", "Transfers overlap where a model is cut into stages."),
    "S420": (
        "a length that the ranks do not divide",
        "A tensor is split along a dim whose size in this batch is no multiple of the ranks.",
    ),
    "S413": (
        "nothing is frozen, or everything",
        "Something is frozen, and something still trained.",
    ),
    "S416": ("nothing to tie or untie", "Parameters of one shape become one; a shared one, two."),
    "S417": ("nothing whole to compress", "Compress over the axes of a `zero(stage=0)` row."),
    "S425": ("nothing to complete", "`complete` adds to rows that stand beside it."),
    "S426": ("two ways to complete", "Write the rows of one of them, or gather."),
    "S427": ("no way to complete", "What was begun cannot be followed; the message says where."),
    "S421": (
        "no module of experts",
        "It is called with tokens, the experts of each token and their weights, gives their\n"
        "sum of weight times output, and holds parameters whose first dim are the experts.\n"
        "A small copy was tried; the message says what it does otherwise, and by how much.",
    ),
    "S422": (
        "experts that do not work together so",
        "The message says which arguments of `expert_parallel` exclude each other, or do not fit\n"
        "the rest of the schedule.",
    ),
    "S501": ("done twice", "Two rows do the same at one module; drop one."),
    "S502": ("one region inside another", "The inner module would be recomputed twice."),
    "S503": (
        "rows in the wrong order",
        "The verbs stand in this order: replace_kernel and fuse, cast, pad, shard, checkpoint,\n"
        "offload, unroll, pipeline_split, zero, pipeline.  It follows from what each reads and\n"
        "writes.",
    ),
    "S504": ("an axis splits a tensor once", "Name another axis, or drop one of the rows."),
    "S505": (
        "more is given up than the step allows",
        'Rounding is always allowed; anything else is named: `step "..." relax(rng) {`.',
    ),
    "S506": ("a tied weight is split on one side", "Both modules that share a weight name it."),
    "S507": ("padding after splitting", "Pad first."),
    "S508": ("an axis cannot slice the state", "It is used otherwise, or sliced already."),
    "S509": ("the pipeline is arranged twice", "One axis cuts the model, one row orders it."),
    "S510": (
        "a grid whose rows do not split the batch",
        "The first axis of a grid or a cube holds different rows of the batch: `zero` names it.\n"
        "The others hold parts of the hidden dim, and see the same rows.",
    ),
    "S601": (
        "a cut inside a loop",
        "A cut falls between two calls that the model makes once; this module is called often.",
    ),
    "S602": ("a cut separates tied names", "`tied=replicate` keeps a copy on each side."),
    "S603": (
        "a cut inside a region",
        "What is recomputed, fused or replaced as one runs on one stage: cut before or after it.",
    ),
    "S604": ("the model rejects the batch", "The model itself raised; its message is shown."),
    "S605": ("the batch has no rows", "Tensors of a batch have rows along their first dim."),
    "S606": ("too few rows", "Every part of the batch needs a row: fewer parts or a larger batch."),
    "S607": ("the mesh and the job differ", "The mesh needs as many ranks as the job has."),
    "S608": ("no such order of the pipeline", "The message says what the order needs."),
    "S609": ("cuts and stages differ", "Cuts must make as many stages as the order needs."),
    "S610": ("a hidden value crosses the cut", "A stage hands over what its modules return."),
    "S611": ("the forward reads values", "It cannot be recorded without data."),
    "S612": ("the model fails while it is recorded", "The model's own message is shown."),
    "S613": ("not a place to cut", "Cuts stand before modules of the trunk."),
    "S614": ("a stage is never reached", "The model did not call what follows the cut."),
    "S615": ("no loss", "The model returns none: give `loss(output, batch)`."),
    "S616": ("not built yet", "Without `batch=` a program is built at its first step."),
    "S617": ("a pipeline has no module", "Each rank holds a stage: use `train_step`, `eval_step`."),
    "S618": ("`build` takes something else", "`sch.build(batch=, loss=, optimizer=, clip=, ...)`."),
    "S619": ("another batch than it was built for", "Build from a batch as it will be trained on."),
    "S621": ("parts of the batch do not add up", "Say what a part weighs: `weight(batch)`."),
    "S655": (
        "sequences that cannot be cut",
        "Slices need a causal model whose tokens meet in attention only: by a cache of\n"
        "transformers or in `scaled_dot_product_attention(.., is_causal=True)`.",
    ),
    "S656": ("no sequences", "Slices cut dim 1 of the batch's tensors."),
    "S657": ("padding before a slice", "Pad on the right, or leave sequences whole."),
    "S658": ("packed rows in slices", "One document per row, or sequences that stay whole."),
    "S659": (
        "a model that cannot be split by tokens",
        "Only the attentions that rows name meet the tokens of other ranks; the message names the\n"
        "first module that gives a token something else than it gives within the whole sequence.",
    ),
    "S660": (
        "an attention that no row names",
        "Where sequences are split, all attentions of a model meet the keys of the same ranks.",
    ),
    "S661": (
        "an attention that cannot be split by tokens",
        "Its mask must follow from positions, documents and padding, and what is added to its\n"
        "scores from positions and from integers of the batch.",
    ),
    "S663": (
        "units that not every rank calls",
        "ZeRO gathers a module on all ranks together; where values decide whether it is called,\n"
        "ranks would gather different ones.",
    ),
    "S674": (
        "no tokens in the batch",
        "Images become tokens inside of the model: split rows, heads, or a dim between modules.",
    ),
    "S662": ("sequences are split twice", "Over ranks, or in slices one after the other."),
    "S428": (
        "experts that cannot be cut inside",
        "`inner=` cuts every expert along its own hidden dim, in equal parts that add up to it.",
    ),
    "S668": (
        "statistics of a batch in microbatches",
        "A loss made of means over the whole batch (router losses) needs all of its rows; the\n"
        "backward of a microbatch begins before later ones are there.",
    ),
    "S669": (
        "statistics that were not found again",
        "Sums over rows are shared by ranks where the model was seen to make them: the k-th call\n"
        "of that name in the forward of that module.",
    ),
    "S680": ("too few tokens", "Every rank that shares a sequence needs one of its tokens."),
    "S681": (
        "heads that cannot be divided",
        "Ulysses gives every rank the same number of heads; a ring leaves heads whole.",
    ),
    "S623": (
        "a model without values",
        "It lies on the meta device: `plan` and `diff` work, runs need values.",
    ),
    "S624": (
        "state that cannot be kept",
        "Parameters and buffers are; extra state of modules is not.",
    ),
    "S622": ("an optimizer that looks at all tensors", "One tensor at a time can be put together."),
    "S625": (
        "weights are updated inside the step",
        "Orders with stale weights (PipeDream and its kin) update each stage by itself, several\n"
        "times a step: no norm over all stages exists to clip by, and no stage shares a weight.",
    ),
    "S631": ("a checkpoint cannot be written", "Nothing was changed; the message gives the cause."),
    "S632": ("not a place for a checkpoint", "Only a checkpoint or an empty folder is replaced."),
    "S633": ("no readable checkpoint", "Nothing was changed; the message gives the cause."),
    "S634": ("names are missing or unknown", "A checkpoint fits the model that it was saved from."),
    "S635": ("another shape or dtype", "Layouts may differ, whole tensors may not."),
    "S636": ("another optimizer", "It must be of the same class and train the same parameters."),
    "S641": (
        "a state dict of another model",
        "Nothing was changed; the message lists names and shapes.",
    ),
    "S637": ("state that no checkpoint can hold", "Tensors, and plain numbers alike on all ranks."),
    "S702": (
        "too many ranks for one machine",
        "`verify` and `run` start local processes.  A smaller mesh, `--mesh ...`, keeps the rows.",
    ),
    "S703": (
        "the loss of the whole is not the mean of the parts",
        "Checked on the original, before anything else: the parts of a batch, weighed, must give\n"
        "its loss.  Say what a part weighs, `weight(batch)`, or `relax(batch_stats)`.",
    ),
    "S708": (
        "a buffer depends on how the batch is split",
        "A forward writes it, once for each microbatch and on each rank for its own rows.\n"
        "Measured on the original, like S703.",
    ),
    "S709": (
        "equal bits of rows that round",
        "`verify(exact)` is about the rows of its step.  Sums over ranks come in another order.",
    ),
    "S706": (
        "the model returns no loss",
        "Define `loss(output, batch)`, or give labels in the batch.",
    ),
    "S711": (
        "a gradient is not summed",
        "`check --model` follows on every axis whether a gradient is whole or a part of a sum.\n"
        "This one is still a part when it is used: ranks would train on different gradients.",
    ),
    "S712": (
        "a gradient is summed too often",
        "It was whole already, or was summed before: it is too large by the size of the axis.",
    ),
    "S713": (
        "what is summed is no pending sum",
        "Ranks hold parts that add up to the whole only after a product over a split dim.  From\n"
        "there to the sum only linear calls may stand, and nothing that every rank adds alike.",
    ),
    "S714": (
        "ranks do not agree",
        "`check --model` plays a step of several ranks without values and writes down what each\n"
        "sends.  Members of a group must ask for the same collectives in the same order, and the\n"
        "two ends of a channel for the same messages; these would wait for ever, or mix values up.",
    ),
    "S716": (
        "parts do not weigh one together",
        "The loss of each part of the batch is weighed so that all together are the mean of the\n"
        "whole.  These weights are not: gradients would be too large or too small.",
    ),
    "S715": (
        "state without an owner",
        "Every parameter and buffer belongs to a stage that uses it.",
    ),
    "S704": ("no working dtype", "Float64 is always checked; this names the dtype checked beside."),
    "S705": ("no row on these lines", "`--only 11,14-17` names lines of the schedule file."),
    "S721": (
        "no readable lock",
        "`schedlang plan FILE --lock` writes `FILE.lock`, and `--locked` compares it.",
    ),
    "S751": (
        "a model that cannot be made smaller",
        "`--shrink` makes the class from smaller numbers: those of its `config`, or those that\n"
        "`model()` has as defaults.  Else `small()` of the model file makes the reduced model.",
    ),
    "S752": (
        "no smaller model shows all that the schedule does",
        "Divisibility, order of sizes, kinds of layers and cut points must stay as they are.",
    ),
    "S753": (
        "the batch does not fit the reduced model",
        "It was derived from the batch of the whole: ids, lengths and sizes.  Define `small()`\n"
        "and `small_batch(seed)` in the model file.",
    ),
    "S811": ("no float64 for this operation", "It reads the bits of a float."),
    "S813": ("a checkpointed module changes its buffers", "Recomputation would change them twice."),
    "S812": ("randomness of its own", "It cannot be drawn logically, alike under every layout."),
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
    "S850": (
        "what a row puts on disk cannot be written",
        "The step is undone on all ranks.  Files lie in the temporary folder: set TMPDIR, or make\n"
        "room; a step needs room for the new beside the old.",
    ),
    "S854": (
        "parameters that are gathered together lie apart",
        "`zero` gathers a layer as one, so all of it lies on one tier: select whole layers.",
    ),
    "S855": (
        "a step on whole tensors cannot be undone",
        "Parameters in parts are put together for an optimizer that looks at whole tensors; with\n"
        "anything on disk such a step might fail half done.",
    ),
    "S870": ("the kernel takes no such argument", "`chunk` bounds the logits of a head's loss."),
    "S880": (
        "nothing that could replace a module",
        "`replacements` of the model file says what is.",
    ),
    "S881": (
        "a replacement that does not fit",
        "It has the same parameters, or says what its own are made of, and takes the same call.",
    ),
    "S882": ("a pattern that is nowhere in the module", "The message has the nearest miss."),
    "S883": ("a data flow that cannot be followed", "It chooses by values; name a smaller module."),
    "S884": ("nothing to gain", "One kernel is what fusing makes of several."),
    "S885": ("not a pattern", "Functions of torch, `+ - * / @`, literals and all its parameters."),
    "S886": ("a bias that cannot stand apart", "Linear layers have one that nothing looks at."),
    "S901": ("the model file has no batch", "Define `batch(seed)`: a dict of tensors."),
    "S902": ("`batch` returns something else", "Return the forward's keyword arguments as a dict."),
    "S903": ("`model` returns something else", "Return a torch.nn.Module."),
    "S904": ("no model file", "Put a `model.py` beside the schedule, or name one: `--model`."),
    "S905": ("the model file fails to import", "Its own error is shown, with the line."),
    "S907": ("no plan to be read", "It must be one that `schedlang plan --out` wrote."),
    "S906": ("the model file has no `model()`", "Define it; it may build on the meta device."),
}


WARNINGS: Mapping[str, str] = {
    "W101": "a knob is never used",
    "W102": "a definition is never called",
    "W701": "a step is never verified",
}


def explain(code: str) -> str:
    """The page of a code; KeyError if there is none."""
    title, text = CODES[code]
    return f"{code}: {title}\n\n{text}\n\nCodes {code[:2]}.. are about {FAMILIES[code[1]]}.\n"
