"""Run transformers' own `Trainer` under a schedule: the same program, and one argument more.

    from schedlang.hf import Trainer  # in place of `from transformers import Trainer`

    Trainer(model=model, args=args, train_dataset=rows, schedule="dp.sched").train()

Arguments, collator, logs and callbacks of logs are transformers'; the loop is `schedlang.Trainer`.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import schedlang
from schedlang.trainer import Trainer as Loop
from schedlang.trainer import refusal_of

# settings of `args` that the loop follows, or that change neither what is trained nor what is kept:
# any other with a value of its own is refused, so that none is left out in silence
_FOLLOWED = frozenset(
    """
    output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps max_grad_norm
    optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon seed data_seed
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_level
    log_level_replica log_on_each_node disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id include_num_input_tokens_seen skip_memory_metrics
    eval_strategy eval_steps per_device_eval_batch_size prediction_loss_only label_names
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics metric_for_best_model greater_is_better resume_from_checkpoint
    save_strategy save_steps save_total_limit save_only_model save_on_each_node
    hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    use_cpu use_cache tf32 torch_empty_cache_steps local_rank do_train do_eval do_predict
    remove_unused_columns length_column_name dataloader_drop_last dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_static_graph ddp_backend ddp_timeout
    """.split()  # noqa: SIM905  (a list has a line for each)
)
_ROWS = {  # rows that do what a setting asks for
    "fp16": "cast(fp16)",
    "bf16": "cast(bf16)",
    "fsdp": "zero(stage=3, over=dp)",
    "deepspeed": "zero(stage=3, over=dp)",
    "gradient_checkpointing": "checkpoint()",
    "activation_checkpointing": "checkpoint()",
    "torch_compile": "fuse()",
}
# methods of a derived class that transformers' loop would call, and this one does not
_NOT_CALLED = (
    "compute_loss",
    "training_step",
    "create_optimizer",
    "create_optimizer_and_scheduler",
    "get_train_dataloader",
    "_get_train_sampler",
    "get_batch_samples",
)


class _Scheduled:
    """The methods of a `transformers.Trainer` that trains under a schedule.

    schedule  a path, a text or a `Schedule`
    """

    model: Any
    args: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

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

        if self._created_lr_scheduler:  # of an earlier call, for an optimizer that is gone
            self.lr_scheduler, self._created_lr_scheduler = None, False
        loop = self._loop(resume_from_checkpoint)
        self.state.max_steps = loop.steps
        self.program = loop.fit()
        self.model.load_state_dict(self.program.state_dict())
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        return TrainOutput(self.program.step, losses[-1] if losses else math.nan, {})

    def _loop(self, resume: Any) -> Loop:
        args = self.args
        if mistake := self._find_unsupported():
            raise refusal_of(*mistake)
        folder = self._folder(resume)
        loop = Loop(
            schedule=self.schedule,
            model=self.model,
            data=(),
            steps=1,
            optimizer=self._optimizer,
            scheduler=lambda optimizer: self.create_scheduler(loop.steps, optimizer),  # type: ignore[attr-defined]
            clip=args.max_grad_norm or None,
            folder=folder,
            keep=args.save_total_limit,
        )
        loop.data = data = self._data(loop.schedule.plan().shares)  # type: ignore[union-attr]
        loop.callbacks = (_Events(self, len(data)),)
        loop.steps = args.max_steps
        if loop.steps <= 0:
            loop.steps = math.ceil(len(data) * args.num_train_epochs)

        def interval(strategy: Any, steps: float) -> int:
            """Return the steps between two events, 0 for none; below 1 it is a part of the run."""
            steps = len(data) if strategy == "epoch" else steps
            steps = math.ceil(steps * loop.steps) if steps < 1 else int(steps)
            return 0 if strategy == "no" else steps

        loop.log_every = interval(args.logging_strategy, args.logging_steps) or loop.steps
        loop.evaluate_every = interval(args.eval_strategy, args.eval_steps or args.logging_steps)
        loop.save_every = interval(args.save_strategy, args.save_steps) if folder else 0
        if loop.evaluate_every:
            loop.evaluation = self._evaluation(loop.schedule.plan().shares)  # type: ignore[union-attr]
        return loop

    def _find_unsupported(self) -> tuple[str, str] | None:
        """Return what transformers' loop would follow and this one cannot, and what to do
        instead."""
        import transformers

        args, owner = self.args, type(self)
        # not of a class of the user: its own fields are the user's, its defaults are settings too
        known = next(k for k in type(args).__mro__ if k.__module__.startswith("transformers."))
        defaults = known(output_dir=args.output_dir, use_cpu=args.use_cpu)
        for name in (field.name for field in fields(defaults) if field.name not in _FOLLOWED):
            if getattr(args, name) != getattr(defaults, name):
                row = f"write a row of the schedule instead: `{_ROWS.get(name)}`"
                help_ = row if name in _ROWS else "leave it out"
                return f"`{name}` of `args` is not supported under a schedule", help_
        if args.save_strategy == "best":
            return '`save_strategy="best"` is not supported under a schedule', (
                '`save_strategy="steps"`, with `save_steps`'
            )
        for name in _NOT_CALLED:
            if getattr(owner, name, None) is not getattr(transformers.Trainer, name, None):
                return f"`{name}` of `{owner.__qualname__}` would not be called", (
                    "compute the loss in the model's forward; or use `schedlang.Trainer`, which "
                    "takes `loss=`, `optimizer=` and `data=`"
                )
        if self.compute_loss_func is not None:  # type: ignore[attr-defined]
            return "`compute_loss_func` would not be called", (
                "compute the loss in the model's forward; or use `schedlang.Trainer(loss=...)`"
            )
        if self.optimizer is not None or self.lr_scheduler is not None:
            return "`optimizers` hold parameters of the model, not those of the ranks", (
                "give a class: `optimizer_cls_and_kwargs=(torch.optim.SGD, {'lr': 0.1})`, and "
                "`lr_scheduler_type` of `args`"
            )
        if not hasattr(self.train_dataset, "__len__"):  # type: ignore[attr-defined]
            return "`train_dataset` has no length", "use `schedlang.Trainer` for a stream"
        return None

    def _folder(self, resume: Any) -> Path | None:
        """Return the folder of checkpoints; refuse to resume from what is not in it, or to begin
        over an earlier run."""
        folder = Path(self.args.output_dir, "schedlang")
        if self.args.save_strategy == "no":
            if resume:
                raise refusal_of(
                    'with `save_strategy="no"` there is nothing to resume from',
                    '`save_strategy="steps"`, or leave out `resume_from_checkpoint`',
                )
            return None
        last = schedlang.last_checkpoint(folder)
        if resume and last is None:
            raise refusal_of(
                f"there is no checkpoint in `{folder}` to resume from",
                "leave out `resume_from_checkpoint`; weights of other runs: `from_pretrained`",
            )
        places = [place.resolve() for place in (folder, folder.parent, Path(last or ""))]
        if resume and resume is not True and Path(resume).resolve() not in places:
            raise refusal_of(
                f"`{resume}` is not the last checkpoint of `{folder}`",
                "`resume_from_checkpoint=True`",
            )
        if last is not None and not resume:
            raise refusal_of(
                f"`{folder}` has checkpoints of an earlier run",
                "go on: `train(resume_from_checkpoint=True)`; or give another `output_dir`",
            )
        return folder

    def _evaluation(self, shares: int) -> Any:
        """Return full batches of the evaluation rows, in their order."""
        from torch.utils.data import DataLoader

        rows = self.eval_dataset  # type: ignore[attr-defined]
        if isinstance(rows, dict) or self.compute_metrics is not None:  # type: ignore[attr-defined]
            unsupported = "several sets" if isinstance(rows, dict) else "`compute_metrics`"
            help_ = '`eval_strategy="no"`, and `evaluate()` after `train`'
            raise refusal_of(f"{unsupported} cannot be evaluated while a schedule trains", help_)
        size = self.args.per_device_eval_batch_size * shares
        return DataLoader(rows, size, collate_fn=self._collate())

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
            collate_fn=self._collate(),
            drop_last=args.dataloader_drop_last,
        )

    def _collate(self) -> Any:
        """Return the collator, without the columns that transformers' loop removes."""
        return self._get_collator_with_removed_columns(self.data_collator)  # type: ignore[attr-defined]

    def _optimizer(self, named_params: Any) -> Any:
        """Return the optimizer of `args` for this rank's parameters, with transformers' weight
        decay."""
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(  # type: ignore[attr-defined]
            self.args, self.model
        )
        if not isinstance(kind, type) or {"params", "model", "optimizer_dict"} & options.keys():
            raise refusal_of(
                f"`optim={str(self.args.optim.value)!r}` reads the whole model's parameters",
                '`optim="adamw_torch"`, or a class: `optimizer_cls_and_kwargs`',
            )
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


class _Events:
    """Passes events and figures to transformers' callbacks and logs.

    A callback may stop the run at a log, an evaluation or an epoch's end, on whichever rank it says
    so.
    """

    def __init__(self, owner: Any, epoch: int) -> None:
        self.owner, self.epoch = owner, epoch  # steps of an epoch
        self._in_epoch = False

    def _call(self, *names: str, **values: Any) -> None:
        owner = self.owner
        for name in names:
            call = getattr(owner.callback_handler, name)
            owner.control = call(owner.args, owner.state, owner.control, **values)

    def _count(self, loop: Loop) -> None:
        self.owner.state.global_step = loop.program.step
        self.owner.state.epoch = loop.program.step / self.epoch

    def _stop_if_asked(self, loop: Loop) -> None:
        from schedlang.runtime.comm import world

        if world.any_rank(bool(self.owner.control.should_training_stop)):
            loop.steps = loop.program.step

    def on_begin(self, loop: Loop) -> None:
        """Begin the run, and an epoch of it."""
        self.owner.state.compute_steps(self.owner.args, loop.steps)
        self._count(loop)
        self._in_epoch = True
        self._call("on_train_begin", "on_epoch_begin")

    def on_step(self, loop: Loop) -> None:
        """End a step, and the epoch if it is the last of one."""
        if not self._in_epoch:
            self._call("on_epoch_begin")
        self._count(loop)
        self._call("on_step_end")
        self.owner.control.should_training_stop &= loop.program.step < loop.steps
        self._in_epoch = True
        self._end_epoch(loop, self._logs_now(loop) or self._evaluates_now(loop))

    def _logs_now(self, loop: Loop) -> bool:
        by_steps = self.owner.args.logging_strategy == "steps"
        return by_steps and loop.program.step % loop.log_every == 0

    def _evaluates_now(self, loop: Loop) -> bool:
        by_steps = self.owner.args.eval_strategy == "steps" and loop.evaluate_every
        return bool(by_steps) and loop.program.step % loop.evaluate_every == 0

    def _end_epoch(self, loop: Loop, later: bool = False) -> None:
        """End an epoch after what is due by steps, and before what is due by epochs."""
        if self._in_epoch and not later and loop.program.step % self.epoch == 0:
            self._in_epoch = False
            self._call("on_epoch_end")
            self._stop_if_asked(loop)

    def on_log(self, loop: Loop, figures: dict[str, float]) -> None:
        """Log the figures under transformers' names."""
        names = {"loss": "loss", "gradient norm": "grad_norm", "learning rate": "learning_rate"}
        self.owner.log({names[key]: value for key, value in figures.items() if key in names})
        self._stop_if_asked(loop)
        if loop.evaluate_every and loop.program.step >= loop.steps:
            loop.evaluate_every = loop.program.step  # the end is evaluated, too
        self._end_epoch(loop, self._evaluates_now(loop))

    def on_evaluate(self, loop: Loop, figures: dict[str, float]) -> None:
        """Log the evaluation loss, and compare it with the best."""
        metrics = {"eval_loss": figures["evaluation loss"]}
        self.owner.log(dict(metrics))
        self._call("on_evaluate", metrics=metrics)
        self.owner._determine_best_metric(metrics, None)
        self._stop_if_asked(loop)
        self._end_epoch(loop)

    def on_save(self, loop: Loop) -> None:
        """Tell of a checkpoint."""
        self._call("on_save")

    def on_end(self, loop: Loop) -> None:
        """End the run, and an epoch that it has not finished."""
        if self._in_epoch:
            self._call("on_epoch_end")
        self._call("on_train_end")


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
