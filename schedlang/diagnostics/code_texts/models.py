"""Codes of the pipeline, the batch and the structure of the model."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S601": (
        "a cut inside a loop",
        "A stage starts at a module that the forward calls once; this one is called more often.",
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
    "S610": ("a hidden value crosses the cut", "A stage sends only what its modules return."),
    "S611": ("the forward reads values", "It cannot be recorded without data."),
    "S612": ("the model fails while it is recorded", "The model's own message is shown."),
    "S613": (
        "not a place to cut",
        "A stage starts at a module that the forward calls outside of all others.",
    ),
    "S614": ("a stage is never reached", "The model did not call what follows the cut."),
    "S615": (
        "no loss",
        "The model returns none: define `loss(output, batch)` in its file, or give `loss=`.",
    ),
    "S616": ("not built yet", "Without `batch=` a program is built at its first step."),
    "S617": (
        "no module for a loop of one's own",
        "Each rank of a pipeline holds a stage, and only a step sums gradients over ranks: use\n"
        "`train_step`, `eval_step`. Without `optimizer=` a step leaves gradients for your loop.",
    ),
    "S618": (
        "an argument of `build` has a wrong type",
        "`sch.build(batch=, loss=, optimizer=, clip=, ...)`.",
    ),
    "S619": (
        "a different batch than at build",
        "Build with a batch that has all keys of training.",
    ),
    "S621": ("the weight of a part of the batch is not known", "Define `weight(batch)`."),
    "S622": (
        "an optimizer that needs all tensors at once",
        "A step gathers one full parameter at a time, and calls no closure. In a loop of your own\n"
        "nothing is gathered: give `optimizer=` and `clip=` to `build`.",
    ),
    "S623": (
        "a model without values",
        "It is on the meta device: `plan` and `diff` work; a program takes its values from what\n"
        "`deferred_init` has recorded, or from files: `build(weights=path)`.",
    ),
    "S624": (
        "state that cannot be saved",
        "Parameters and buffers are saved; extra state of modules is not.",
    ),
    "S625": (
        "weights are updated inside the step",
        "Orders with stale weights (PipeDream and its kin) update each stage by itself, several\n"
        "times a step: no norm over all stages exists to clip by, and no stage shares a weight.",
    ),
    "S626": (
        "an initialisation that cannot be recorded",
        "`deferred_init` notes torch's operators, and draws of torch's own generator.",
    ),
    "S627": (
        "generation that a program does not follow",
        "`program.generate` runs transformers' own loop on every rank; keys and values stay where\n"
        "they are made, so that their rows are not moved, as beams do.",
    ),
    "S631": ("a checkpoint cannot be written", "Nothing was changed; the message gives the cause."),
    "S632": (
        "not a place for a checkpoint",
        "Checkpoints are added to a folder of checkpoints or to an empty one; `export` replaces\n"
        "what it has written, or fills an empty folder.",
    ),
    "S633": (
        "no readable checkpoint",
        "It is missing, damaged, incomplete, or not what `program.save` writes: checksums, sizes\n"
        "and kinds are looked at before anything is changed. The message names file and tensor.\n"
        "Or a rank has no memory for what it reads: the message says so, and how much it takes.",
    ),
    "S634": ("names are missing or unknown", "A checkpoint fits the model that it was saved from."),
    "S635": (
        "a different shape or dtype",
        "Placements may differ, shapes of full tensors may not.",
    ),
    "S636": (
        "a different optimizer",
        "It must be of the same class and train the same parameters.",
    ),
    "S637": ("state that no checkpoint can hold", "Tensors, and plain numbers alike on all ranks."),
    "S638": (
        "two jobs save into one folder",
        "One job at a time: the message names the other one. A job that has ended holds nothing.",
    ),
    "S639": (
        "no adapters to write",
        "Rows `adapt` bring them; a folder of PEFT has adapters of one kind.",
    ),
    "S641": (
        "a state dict of another model",
        "Nothing was changed; the message lists names and shapes.",
    ),
    "S642": (
        "not an end of a transfer",
        "Programs, modules and state dicts of dense tensors are; a rank that has no part of one\n"
        "passes None for it, and all ranks of the job call `transfer` alike.",
    ),
    "S643": (
        "no weights to take",
        "Files of safetensors have the model's names, shapes and kinds of numbers, or those that\n"
        "transformers converts to the model's.",
    ),
    "S650": (
        "ranks would build different programs",
        "All ranks of a job compare what they build from: versions, mesh, model, rows,\n"
        "options, initial weights, the optimizer's settings; not with `compare='nothing'`.",
    ),
    "S651": (
        "a rank has not called `build`",
        "All ranks build together.  `build(wait=300)` gives them longer.  Or the store in which\n"
        "they meet does not answer: the node of the first rank is cut off, or has ended.",
    ),
    "S652": (
        "ranks were given different batches",
        "The first step compares them, and with `compare='batches'` each step, and the\n"
        "optimizer's settings; with `compare='nothing'` none does.",
    ),
    "S653": (
        "a number outside of a table that is split",
        "Words and labels are counted from 0; a loss leaves out those that are its\n"
        "`ignore_index`. The model alone raises IndexError.",
    ),
    "S655": (
        "a model that cannot be split into slices",
        "Slices need a causal model whose tokens meet in attention only: by a cache of\n"
        "transformers or in `scaled_dot_product_attention(.., is_causal=True)`.",
    ),
    "S656": ("no sequences", "Slices split dim 1 of the batch's tensors."),
    "S657": ("padding before a slice", "Pad on the right, or do not slice sequences."),
    "S658": ("packed rows in slices", "One document per row, or sequences that are not sliced."),
    "S659": (
        "a model that cannot be split by tokens",
        "Only the attentions that rows select exchange tokens with other ranks; the message names\n"
        "the first module that computes a token differently than in the full sequence.",
    ),
    "S660": (
        "an attention that no row selects",
        "Where sequences are split, all attentions of a model need the keys of the same ranks.",
    ),
    "S661": (
        "an attention that cannot be split by tokens",
        "Its mask must follow from positions, documents and padding, and what is added to its\n"
        "scores from positions and from integers of the batch.",
    ),
    "S662": ("sequences are split twice", "Over ranks, or in slices one after the other."),
    "S663": (
        "modules that not every rank calls",
        "ZeRO gathers a module, and sums its gradients, on all ranks together; where values\n"
        "decide whether, and in which order, modules are called, it would be different ones.",
    ),
    "S664": (
        "a sharded module that the batch of the build does not reach",
        "Where the values of a batch decide which modules are called (adapters by language), what\n"
        "a sharded one gets is known only once the forward that is followed has called it.",
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
    "S670": (
        "the batch holds indices of its rows",
        "Edges of a graph, or pairs of samples, are numbers of rows: a part of the batch would\n"
        "name rows that lie in another part.  One object of many graphs that gives them back\n"
        "(`to_data_list`, `from_data_list`) is split by graph.",
    ),
    "S674": (
        "no tokens in the batch",
        "Images become tokens inside of the model: split rows, heads, or a dim between modules.",
    ),
    "S680": ("too few tokens", "Every rank that shares a sequence needs one of its tokens."),
    "S681": (
        "heads that cannot be divided",
        "Ulysses gives every rank the same number of heads; a ring does not split heads.",
    ),
    "S691": (
        "arguments of a trainer that do not go together",
        "`Trainer(schedule, model, data, steps, optimizer)`, and what its page lists.",
    ),
    "S692": (
        "data that end before the run does",
        "A list or a loader is begun again; an iterator ends for good.",
    ),
    "S693": (
        "a run that goes on under something else",
        "The checkpoint tells schedule and place in the data; `accept=True` goes on all the same.",
    ),
    "S694": (
        "a loss that is not finite, or far above those before",
        "`Trainer(on_spike=)` says whether the run stops, skips such updates, or rolls back.",
    ),
    "S695": (
        "an elastic run that cannot go on with the ranks there are",
        "`Trainer(elastic=True)` looks for a setting of the schedule's knobs that makes a mesh of\n"
        "all ranks and keeps what is computed; each round of torchrun needs a store of its own.",
    ),
}
