"""Codes of verification and expectations."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S702": (
        "too many ranks for one machine",
        "`verify` and `run` start local processes.  Use a smaller mesh: `--mesh ...`.",
    ),
    "S703": (
        "splitting the batch changes the loss",
        "Checked on the original, before anything else: the weighted mean of the losses of the\n"
        "parts must be the loss of the batch.  Define `weight(batch)`, or `relax(batch_stats)`.",
    ),
    "S704": (
        "not a working dtype",
        "Float64 is always checked; this option names a second dtype to check.",
    ),
    "S705": ("no row on these lines", "`--only 11,14-17` names lines of the schedule file."),
    "S707": (
        "the original's loss is not finite",
        "NaN or inf without any schedule: what is compared with it could be anything.  Where it\n"
        "arises is named: in the batch, its labels, a module, the loss, a gradient, or a step.",
    ),
    "S708": (
        "a buffer, or an attribute, depends on how the batch is split, or the model cut",
        "A forward writes it, once for each microbatch and on each rank for its own rows; and\n"
        "only in the stage whose part of the model does.  Measured on the original, like S703.",
    ),
    "S709": (
        "equal bits of rows that round",
        "`verify(exact)` is about the rows of its step.  Sums over ranks come in another order.",
    ),
    "S710": (
        "nothing is trained",
        "A proof compares gradients and steps: some parameter must require a gradient and get one.",
    ),
    "S711": (
        "a gradient is not summed",
        "`check --model` follows on every axis whether a gradient is replicated or partial.\n"
        "This one is still partial when it is used: ranks would train on different gradients.",
    ),
    "S712": (
        "a gradient is summed too often",
        "It was replicated already, or summed before: it is too large by the size of the axis.",
    ),
    "S713": (
        "what is summed is not partial",
        "Ranks hold partial sums only after a product over a sharded dim.  From there to the\n"
        "all-reduce only linear calls may stand, and no addition of a replicated tensor.",
    ),
    "S714": (
        "ranks do not agree",
        "`check --model` plays a step of several ranks without values and writes down what each\n"
        "sends.  Members of a group must ask for the same collectives in the same order, and the\n"
        "two ends of a channel for the same messages; these would wait for ever, or mix values up.",
    ),
    "S715": (
        "state without an owner",
        "Every parameter and buffer belongs to a stage that uses it.",
    ),
    "S716": (
        "weights of parts do not add up",
        "The losses of all parts, each times its weight, must give the mean over the batch.  With\n"
        "these weights they do not: gradients would be too large or too small.",
    ),
    "S717": (
        "sums over ranks beside rows that lose bits",
        "What `compress` and stale weights do is compared with one process that takes the parts\n"
        "of a batch one after the other.  A loss made of means over the whole batch (of tokens\n"
        "that a mask keeps, of a router) needs them at once.",
    ),
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
        "no reduced model keeps all that the schedule does",
        "Divisibility, order of sizes, kinds of layers and cut points must stay as they are.",
    ),
    "S753": (
        "the batch does not fit the reduced model",
        "It was derived from the batch of the full model: ids, lengths and sizes.  Define\n"
        "`small()` and `small_batch(seed)` in the model file.",
    ),
    "S761": (
        "no program to be judged",
        "`verify --against FILE` calls `program(model)` of that file on every rank; it returns\n"
        "`schedlang.TrainingProgram(module, step)`, with a module of torch and a function.",
    ),
    "S762": (
        "a program raises",
        "What a function of a program that is judged raises, at its own line, with the rank.",
    ),
    "S763": (
        "weights that are none of the original's",
        "A weight of a rank is found by its values: the original's all differ.  One whose values\n"
        "were changed is found by its name, shape and placement, or as `names` and `layouts` say.",
    ),
    "S764": (
        "a program changes its batch in place",
        "The next step, the loss, or another microbatch would see it changed.",
    ),
    "S765": (
        "a program asks for a GPU",
        "The judge runs ranks on CPUs, under gloo.  Take the device from the model's parameters.",
    ),
    "S766": (
        "a step returns no loss",
        "`step(batch)` returns the rank's loss, or None where the rank has none, or a pair of the\n"
        "loss and the output.  At least one rank has a loss.",
    ),
    "S767": (
        "an argument of a program that cannot be",
        "The number of ranks, `world_loss`, `names`, `layouts` or `optimizer`, or a `load`\n"
        "without the `state_dict` that gives it what was saved: the message says what is legal.",
    ),
}
