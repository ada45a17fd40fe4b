"""Codes of verification and expectations."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S702": (
        "too many ranks for one machine",
        "`verify` and `run` start all ranks on this machine. Use a smaller mesh: `--mesh ...`.",
    ),
    "S703": (
        "splitting the batch changes the loss",
        "This is checked on the original, before anything else. The weighted mean of the losses\n"
        "of the parts must equal the loss of the batch. Define `weight(batch)`; gather the rows\n"
        "that a loss compares with `gather_rows`; or allow it: `relax(batch_stats)`.",
    ),
    "S704": (
        "not a working dtype",
        "Float64 is always checked. This option names a second dtype to check.",
    ),
    "S705": ("no row on these lines", "`--only 11,14-17` takes line numbers of the schedule file."),
    "S707": (
        "the original's loss is not finite",
        "The loss is NaN or inf even without a schedule, so nothing can be compared with it. The\n"
        "message names the place where the value arises: the batch, its labels, a module, the\n"
        "loss, a gradient, or a step.",
    ),
    "S708": (
        "a buffer or attribute depends on how the batch or the model is split",
        "A forward writes a buffer or an attribute. It runs once for each microbatch and rank,\n"
        "with different rows, and each stage writes only what its modules write. This is measured\n"
        "on the original, as for S703.",
    ),
    "S709": (
        "`exact` for rows that round",
        "`verify(exact)` requires equal bits from all rows of its step. A row that all-reduces\n"
        "adds numbers in another order, so it rounds differently.",
    ),
    "S710": (
        "nothing is trained",
        "A proof compares gradients and steps. At least one parameter must require a gradient and\n"
        "get one.",
    ),
    "S711": (
        "a gradient is not all-reduced",
        "`check --model` follows for every axis whether a gradient is replicated or partial. This\n"
        "gradient is still partial when the optimizer uses it: ranks would train with different\n"
        "gradients.",
    ),
    "S712": (
        "a gradient is all-reduced too often",
        "The gradient was already replicated or all-reduced. It is too large by a factor: the\n"
        "size of the axis.",
    ),
    "S713": (
        "an all-reduce of a value that is not partial",
        "Only a product over a sharded dim gives partial values. Between that product and the\n"
        "all-reduce only linear calls are allowed, and no addition of a replicated tensor.",
    ),
    "S714": (
        "ranks do not agree",
        "`check --model` simulates a step on several ranks without values, and records what each\n"
        "rank sends. All ranks of a group must issue the same collectives in the same order. Both\n"
        "ends of a channel must issue the same messages. Here they differ: the ranks would hang,\n"
        "or mix up values.",
    ),
    "S715": (
        "state without an owner",
        "Every parameter and buffer must belong to a stage that uses it.",
    ),
    "S716": (
        "weights do not add up",
        "The losses of all microbatches and ranks, each times its weight, must give the mean over\n"
        "the batch. With these weights they do not: gradients would be too large or too small.",
    ),
    "S717": (
        "lossy rows, and a loss over the whole batch",
        "`compress` and stale weights are compared with a single process that computes one part\n"
        "of the batch after another. A loss with means over the whole batch (of unmasked tokens,\n"
        "of a router) needs all parts at the same time.",
    ),
    "S721": (
        "no readable lock",
        "`schedlang plan FILE --lock` writes `FILE.lock`. `--locked` compares the plan with it.",
    ),
    "S751": (
        "a model that cannot be reduced",
        "`--shrink` builds the model from smaller numbers: those of its `config`, or the defaults\n"
        "of `model()`. If the model has neither, define `small()` in the model file: it returns\n"
        "the reduced model.",
    ),
    "S752": (
        "no reduced model fits the schedule",
        "A reduced model must keep divisibility, the order of sizes, the kinds of layers and the\n"
        "cut points. None was found.",
    ),
    "S753": (
        "the batch does not fit the reduced model",
        "schedlang derives this batch from the batch of the full model: its ids, lengths and\n"
        "sizes. Define `small()` and `small_batch(seed)` in the model file.",
    ),
    "S761": (
        "no program to check",
        "`verify --against FILE` calls `program(model)` of that file on every rank. The function\n"
        "must return `schedlang.TrainingProgram(module, step)`, with a torch module and a\n"
        "function.",
    ),
    "S762": (
        "a program raises",
        "A function of the program under test raised this error. The message gives its line and\n"
        "the rank.",
    ),
    "S763": (
        "weights that do not match the original's",
        "schedlang finds the original of a weight by its values, which differ between all\n"
        "weights. If the program changed the values, it uses name, shape and placement, or what\n"
        "`names` and `layouts` give.",
    ),
    "S764": (
        "a program changes its batch in place",
        "The next step, the loss or another microbatch would read the changed batch.",
    ),
    "S765": (
        "a program asks for a GPU",
        "This check runs all ranks on CPUs, with gloo. Take the device from the model's\n"
        "parameters.",
    ),
    "S766": (
        "a step returns no loss",
        "`step(batch)` returns the rank's loss, or a pair of loss and output, or None if this\n"
        "rank has no loss. At least one rank must return a loss.",
    ),
    "S767": (
        "an illegal argument of a program",
        "This is about the number of ranks, `world_loss`, `names`, `layouts`, `optimizer`, or a\n"
        "`load` without the `state_dict` that makes its input. The message says what is legal.",
    ),
}
