"""Codes of the pipeline, the batch and the structure of the model."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S601": (
        "a cut inside a loop",
        "A stage must start at a module that the forward calls once. This module is called more\n"
        "often.",
    ),
    "S602": (
        "a cut separates tied names",
        "The cut puts two names of one weight on two stages. `tied=replicate` keeps a copy on\n"
        "each.",
    ),
    "S603": (
        "a cut inside a region",
        "A region that is recomputed, fused or replaced as one must run on one stage. Cut before\n"
        "or after it.",
    ),
    "S604": (
        "the model rejects the batch",
        "The model itself raised an error. Its message is shown.",
    ),
    "S605": ("the batch has no rows", "Dim 0 of a batch's tensors must be the samples."),
    "S606": (
        "too few rows",
        "Every microbatch on every data-parallel rank needs at least one row. Use fewer\n"
        "microbatches or ranks, or a larger batch.",
    ),
    "S607": ("the mesh and the job differ", "The mesh must have as many ranks as the job."),
    "S608": ("no such order of the pipeline", "The message says what the order needs."),
    "S609": ("cuts and stages differ", "The cuts must make as many stages as the order needs."),
    "S610": (
        "a hidden value crosses the cut",
        "A stage sends only values that its modules return. Here a later stage needs another\n"
        "value.",
    ),
    "S611": (
        "the forward reads values",
        "The forward is recorded without data, so it must not read values of tensors between\n"
        "modules.",
    ),
    "S612": ("the model fails while it is recorded", "The model's own message is shown."),
    "S613": (
        "not a place to cut",
        "A stage starts at an outermost module that the forward calls, and not at the first one.\n"
        "The message lists the possible modules.",
    ),
    "S614": (
        "the forward calls other modules than at build",
        "A stage expects the module calls that were recorded at build. The model left one out or\n"
        "made one more. Or draws from Python or numpy decide which modules are called.",
    ),
    "S615": (
        "no loss",
        "The model returns no loss. Define `loss(output, batch)` in the model file, or pass\n"
        "`loss=`.",
    ),
    "S616": (
        "not built yet",
        "Without `batch=` a program is built at its first step. This call came before.",
    ),
    "S617": (
        "no module for your own loop",
        "Each rank of a pipeline holds only its stages, and only a step all-reduces gradients.\n"
        "Use `train_step` and `eval_step`. Without `optimizer=` a step leaves the gradients for\n"
        "your loop.",
    ),
    "S618": (
        "an argument of `build` has a wrong type",
        "`sch.build(batch=, loss=, optimizer=, clip=, ...)`.",
    ),
    "S619": (
        "a batch with other keys than at build",
        "Build with a batch that has all keys that training uses.",
    ),
    "S621": (
        "the weight of a part of the batch is not known",
        "The losses of microbatches and data-parallel ranks are averaged by weight. Define\n"
        "`weight(batch)`: for example the number of rows or tokens that the loss counts. Several\n"
        "means over labels are weighted one by one if the loss is a weighted sum of them.",
    ),
    "S622": (
        "an optimizer that needs all tensors at once",
        "A step gathers one full parameter at a time and calls no closure. In your own loop\n"
        "nothing is gathered: pass `optimizer=` and `clip=` to `build`. There a number of a\n"
        "rank's part changes no weight and no gradient, and gradients serve one step.",
    ),
    "S623": (
        "a model without values",
        "The model is on the meta device. `plan` and `diff` work without values. A program takes\n"
        "its values from what `deferred_init` recorded, or from files: `build(weights=path)`.",
    ),
    "S624": (
        "state that cannot be saved",
        "schedlang saves parameters and buffers, but not the extra state of modules.",
    ),
    "S625": (
        "weights are updated inside the step",
        "Orders with stale weights (such as PipeDream) update each stage separately, several\n"
        "times in a step. So there is no gradient norm over all stages to clip by, and stages\n"
        "cannot share a weight.",
    ),
    "S626": (
        "an initialisation that cannot be recorded",
        "`deferred_init` records torch operators and random draws from torch's default generator.",
    ),
    "S627": (
        "generation that a program does not support",
        "`program.generate` runs transformers' own loop on every rank. The key-value cache stays\n"
        "on the rank that computed it, so its rows cannot be reordered, as beam search does.",
    ),
    "S631": ("a checkpoint cannot be written", "Nothing was changed. The message gives the cause."),
    "S632": (
        "not a folder for a checkpoint",
        "`save` needs a folder of checkpoints or an empty folder. `export` needs an empty folder,\n"
        "or one that `export` has written.",
    ),
    "S633": (
        "no readable checkpoint",
        "The folder is missing, damaged or incomplete, or `program.save` did not write it.\n"
        "Checksums, sizes and dtypes are checked before anything is changed. The message names\n"
        "the file and the tensor. If a rank has too little memory to read the checkpoint, the\n"
        "message gives the bytes that it needs.",
    ),
    "S634": (
        "names are missing or unknown",
        "A checkpoint fits only the model from which it was saved.",
    ),
    "S635": (
        "a different shape or dtype",
        "Placements may differ from those of the checkpoint. Shapes of full tensors and dtypes\n"
        "must be the same.",
    ),
    "S636": (
        "a different optimizer",
        "The optimizer must be of the same class and train the same parameters.",
    ),
    "S637": (
        "state that no checkpoint can hold",
        "A checkpoint holds tensors, and plain numbers and strings that are equal on all ranks.",
    ),
    "S638": (
        "two jobs save into one folder",
        "Only one job at a time may save into a folder. The message names the other job. A job\n"
        "that has ended does not block the folder.",
    ),
    "S639": (
        "no adapters to write",
        "Adapters come from `adapt` rows. A PEFT folder holds adapters of one kind.",
    ),
    "S641": (
        "a state dict of another model",
        "Nothing was changed. The message lists the names and shapes that differ.",
    ),
    "S642": (
        "not a source or target of a transfer",
        "A source or target is a program, a module, or a state dict of dense tensors. A rank that\n"
        "has no part of it passes None. All ranks of the job must call `transfer` in the same\n"
        "way.",
    ),
    "S643": (
        "no weights to load",
        "Files of safetensors must have the names, shapes and dtypes of the model, or those that\n"
        "transformers converts to the model's.",
    ),
    "S650": (
        "ranks would build different programs",
        "At build all ranks compare their versions, mesh, model, rows, options, initial weights\n"
        "and optimizer settings. With `compare='nothing'` they compare nothing.",
    ),
    "S651": (
        "a rank has not called `build`",
        "All ranks must call `build`. `build(wait=300)` waits longer. If the store of the job\n"
        "does not answer, the node of rank 0 is unreachable or has ended.",
    ),
    "S652": (
        "ranks were given different batches",
        "Ranks compare their batches in the first step. With `compare='batches'` they compare\n"
        "batches and optimizer settings in every step, and with `compare='nothing'` in none.",
    ),
    "S653": (
        "an index outside of a sharded table",
        "Token ids and labels count from 0. A loss ignores labels that equal its `ignore_index`.\n"
        "The original model raises IndexError.",
    ),
    "S654": (
        "variables of a job that cannot be used",
        "A launcher sets WORLD_SIZE (the number of ranks), RANK (from 0), and MASTER_ADDR and\n"
        "MASTER_PORT (where rank 0 listens) for each rank. torchrun sets all of them.",
    ),
    "S655": (
        "a model that cannot be split into slices",
        "Slices need a causal model. Its tokens may interact only in attention, through a cache\n"
        "of transformers or `scaled_dot_product_attention(.., is_causal=True)`.",
    ),
    "S656": ("no sequences", "Slices split dim 1 of the batch's tensors."),
    "S657": ("padding before a slice", "Pad on the right, or leave out `slices`."),
    "S658": ("packed rows in slices", "Put one document into each row, or leave out `slices`."),
    "S659": (
        "a model that cannot be split by tokens",
        "Only the attentions that rows select exchange tokens with other ranks. The message names\n"
        "the first module that computes a token differently than in the full sequence.",
    ),
    "S660": (
        "an attention that no row selects",
        "If sequences are split, every attention of the model needs the keys of the same ranks.\n"
        "Select all of them, over the same axes.",
    ),
    "S661": (
        "an attention that cannot be split by tokens",
        "The mask must follow from positions, documents and padding. Terms that are added to the\n"
        "scores must follow from positions and from integers of the batch.",
    ),
    "S662": (
        "sequences are split twice",
        "Split sequences over ranks, or into slices that run one after the other, not both.",
    ),
    "S663": (
        "modules that not every rank calls",
        "With ZeRO all ranks together gather a module and reduce its gradients. If values decide\n"
        "which modules are called, and in which order, ranks would wait for different modules.",
    ),
    "S664": (
        "a sharded module that the batch of the build does not reach",
        "The values of a batch can decide which modules are called (such as adapters by\n"
        "language). schedlang learns the placement of a sharded module's inputs only from a\n"
        "forward that calls it.",
    ),
    "S668": (
        "statistics of a batch in microbatches",
        "A loss with means over the full batch (such as router losses) needs all rows. The\n"
        "backward of a microbatch starts before later microbatches are computed.",
    ),
    "S669": (
        "statistics that were not found again",
        "Sums over rows are all-reduced at the calls that were recorded at build. A call is found\n"
        "by its name, its module and its number in that module's forward. Here the calls differ\n"
        "from those recorded.",
    ),
    "S670": (
        "the batch holds indices of its rows",
        "Edges of a graph, or pairs of samples, are row numbers. After a split they would name\n"
        "rows of another microbatch or rank. One object of many graphs that can split itself\n"
        "(`to_data_list`, `from_data_list`) is split by graph.",
    ),
    "S674": (
        "no tokens in the batch",
        "The model makes tokens from images in its forward. Split rows, heads, or a dim between\n"
        "modules instead.",
    ),
    "S680": (
        "too few tokens",
        "Every rank that shares a sequence needs at least one of its tokens.",
    ),
    "S681": (
        "heads that cannot be divided",
        "Ulysses gives every rank the same number of heads. A ring does not split heads.",
    ),
    "S691": (
        "arguments of a trainer that do not go together",
        "`Trainer(schedule, model, data, steps, optimizer)`, and the options in docs/training.md.",
    ),
    "S692": (
        "data that end before the run does",
        "A list or a loader starts again at its end. An iterator cannot.",
    ),
    "S693": (
        "a checkpoint of another schedule or other data",
        "The checkpoint records its schedule and its place in the data; these do not fit this\n"
        "run. `accept=True` continues under this run's schedule, and starts its data anew if the\n"
        "checkpoint has no place.",
    ),
    "S694": (
        "a loss that is not finite, or far above those before",
        "`Trainer(on_spike=)` chooses: stop the run, skip such updates, or roll back.",
    ),
    "S695": (
        "an elastic run that does not fit the available ranks",
        "`Trainer(elastic=True)` looks for knob values that use all ranks and keep what the\n"
        "schedule computes. Each round of torchrun needs its own store.",
    ),
}
