"""Run transformers' own `Trainer` under a schedule: the same program, and one argument more.

    from schedlang.hf import Trainer  # in place of `from transformers import Trainer`

    Trainer(model=model, args=args, train_dataset=rows, schedule="dp.sched").train()

Arguments, collator, logs and callbacks of logs are transformers'; the loop is `schedlang.Trainer`.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import schedlang
from schedlang.trainer import Trainer as Loop
from schedlang.trainer import refusal_of

# settings that a schedule has rows for, or that this loop does not support
_UNSUPPORTED = ("fp16", "bf16", "fsdp", "deepspeed", "label_smoothing_factor", "torch_compile")


class _Scheduled:
    """The methods of a `transformers.Trainer` that trains under a schedule.

    schedule  a path, a text or a `Schedule`
    """

    model: Any
    args: Any
    state: Any

    def __init__(self, *args: Any, schedule: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.schedule = schedule
        self.program: Any = None

    def train(self, resume_from_checkpoint: Any = None, *_: Any, **__: Any) -> Any:
        """Train as `args` say, and give the model the trained values; all ranks together.

        A step has `per_device_train_batch_size * gradient_accumulation_steps` rows for each of the
        ranks that the schedule splits rows over. Raises Refusal S691 for unsupported arguments, and
        what `schedlang.Trainer.fit` raises.
        """
        from transformers.trainer_utils import TrainOutput

        loop = self._loop(resume_from_checkpoint)
        self.state.max_steps = loop.steps
        self.program = loop.fit()
        if loop.evaluate_every and self.program.step % loop.evaluate_every:
            _LossLogger(self).on_evaluate(loop, loop.evaluate())  # the end of a run, too
        self.model.load_state_dict(self.program.state_dict())
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        return TrainOutput(self.program.step, losses[-1] if losses else math.nan, {})

    def _loop(self, resume: Any) -> Loop:
        args, owner = self.args, _LossLogger(self)
        unsupported = [name for name in _UNSUPPORTED if getattr(args, name, None)]
        if unsupported:
            raise refusal_of(
                f"`{unsupported[0]}` is not supported under a schedule",
                "leave it out: use rows instead",
            )
        folder = Path(args.output_dir, "schedlang") if args.save_strategy == "steps" else None
        if folder is not None and not resume and schedlang.last_checkpoint(folder) is not None:
            raise refusal_of(
                f"`{folder}` has checkpoints of an earlier run",
                "go on: `train(resume_from_checkpoint=True)`; or give another `output_dir`",
            )
        loop = Loop(
            schedule=self.schedule,
            model=self.model,
            data=(),
            steps=1,
            optimizer=self._optimizer,
            scheduler=lambda optimizer: self.create_scheduler(loop.steps, optimizer),  # type: ignore[attr-defined]
            clip=args.max_grad_norm or None,
            folder=folder,
            save_every=int(args.save_steps) if folder is not None else 0,
            keep=args.save_total_limit,
            log_every=int(args.logging_steps),
            callbacks=(owner,),
        )
        loop.data = data = self._data(loop.schedule.plan().shares)  # type: ignore[union-attr]
        loop.steps = args.max_steps
        if loop.steps <= 0:
            loop.steps = math.ceil(len(data) * args.num_train_epochs)
        if (strategy := str(args.eval_strategy.value)) != "no":
            interval = args.eval_steps or args.logging_steps
            interval = math.ceil(interval * loop.steps) if interval < 1 else int(interval)
            loop.evaluate_every = interval if strategy == "steps" else len(data)
            loop.evaluation = self._evaluation(loop.schedule.plan().shares)  # type: ignore[union-attr]
        return loop

    def _evaluation(self, shares: int) -> Any:
        """Return full batches of the evaluation rows, in their order."""
        from torch.utils.data import DataLoader

        rows = self.eval_dataset  # type: ignore[attr-defined]
        if isinstance(rows, dict) or self.compute_metrics is not None:  # type: ignore[attr-defined]
            unsupported = "several sets" if isinstance(rows, dict) else "`compute_metrics`"
            help_ = '`eval_strategy="no"`, and `evaluate()` after `train`'
            raise refusal_of(f"{unsupported} cannot be evaluated while a schedule trains", help_)
        size = self.args.per_device_eval_batch_size * shares
        return DataLoader(rows, size, collate_fn=self.data_collator)  # type: ignore[attr-defined]

    def _data(self, shares: int) -> Any:
        """Return full batches, in the order in which transformers' own loop takes the rows."""
        from accelerate.data_loader import SeedableRandomSampler  # type: ignore[import-untyped]
        from torch.utils.data import DataLoader

        args, rows = self.args, self.train_dataset  # type: ignore[attr-defined]
        seed = args.seed if args.data_seed is None else args.data_seed
        return DataLoader(
            rows,
            args.per_device_train_batch_size * args.gradient_accumulation_steps * shares,
            sampler=SeedableRandomSampler(rows, data_seed=seed),
            collate_fn=self.data_collator,  # type: ignore[attr-defined]
            drop_last=args.dataloader_drop_last,
        )

    def _optimizer(self, named_params: Any) -> Any:
        """Return the optimizer of `args` for this rank's parameters, with transformers' weight
        decay."""
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)  # type: ignore[attr-defined]
        decayed = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
        named_params = list(named_params)
        groups = [
            {
                "params": [p for name, p in named_params if (name in decayed) == decays],
                "weight_decay": rate,
            }
            for decays, rate in ((True, self.args.weight_decay), (False, 0.0))
        ]
        return kind([group for group in groups if group["params"]], **options)


class _LossLogger:
    """Passes figures to transformers' logs, and evaluations to its callbacks."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def on_log(self, trainer: Loop, figures: dict[str, float]) -> None:
        """Log the figures under transformers' names."""
        self.owner.state.global_step = int(figures["step"])
        names = {"loss": "loss", "gradient norm": "grad_norm", "learning rate": "learning_rate"}
        self.owner.log({names[key]: value for key, value in figures.items() if key in names})

    def on_evaluate(self, trainer: Loop, figures: dict[str, float]) -> None:
        """Log the evaluation loss; what callbacks return has no effect."""
        owner, metrics = self.owner, {"eval_loss": figures["evaluation loss"]}
        owner.state.global_step = int(figures["step"])
        owner.log(dict(metrics))
        owner.callback_handler.on_evaluate(owner.args, owner.state, owner.control, metrics)


@cache
def make_scheduled_trainer(kind: type[Any]) -> type[Any]:
    """Return a class like `transformers.Trainer`, or derived from it, with the argument
    `schedule`."""
    return type(kind.__name__, (_Scheduled, kind), {"__doc__": _Scheduled.__doc__})


def __getattr__(name: str) -> Any:
    """Return `Trainer`, made on first use: importing this module does not import transformers."""
    if name != "Trainer":
        raise AttributeError(f"module `schedlang.hf` has no `{name}`")
    import transformers

    return make_scheduled_trainer(transformers.Trainer)
