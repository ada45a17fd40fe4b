"""Run a `LightningModule` under a schedule: the same program, and one argument more.

    from schedlang.lightning import ScheduleStrategy

    Trainer(devices=2, strategy=ScheduleStrategy("dp.sched")).fit(module, loader)

Data, epochs, callbacks, logs and checkpoints are Lightning's; the forward, the backward and the
update of a step are those of the schedule's program.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from schedlang.ir.module_copies import deepcopy_module
from schedlang.language.syntax import parse, source_of
from schedlang.passes.elaborate.state import Settings
from schedlang.runtime.checkpointing.data_generators import generator_states, restore_generators
from schedlang.schedule import Schedule
from schedlang.trainer import refusal_of

# Lightning is published under two names, with classes of their own
_ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_PACKAGES = tuple(_ROOTS)
_Logs = dict[str, dict[str, Any] | None]
_LOG = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
)  # the arguments of `log` after the value, in order
# arguments of `build` that are not options here, and where their values come from
_REFUSED_OPTIONS = {
    "batch": "the loader's first batch is taken",
    "clip": "`Trainer(gradient_clip_val=1.0)`",
    "optimizer": "`configure_optimizers` makes it",
}
# methods that Lightning calls outside of the step
_NOT_STEP_METHODS = ("on_", "configure_", "validation_", "test_", "predict_", "setup", "__init__")
_PLAIN = (bool, int, float, str, type(None))
BESIDE = ".schedlang"  # suffix of the folder with the program's state, beside a checkpoint
# hooks around gradients and updates, which the program handles
_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)


class _Scheduled:
    """The methods of a Lightning strategy that trains under a schedule.

    schedule  a path or a text, whose selectors name modules inside of the `LightningModule`
    options   further arguments of `Schedule.build`: `weight=`, `dropout=`, `compare=`, ...

    `training_step` is the forward of the program, and its loss is minimised. Between two steps the
    module has no values, and no hook may write into it: the values are gathered for evaluations,
    checkpoints, and at the end.
    """

    accelerator: Any
    lightning_module: Any
    lr_scheduler_configs: Any
    optimizers: Any
    root_device: torch.device
    world_size: int
    batch_to_device: Any
    broadcast: Any
    connect: Any
    checkpoint_io: Any
    is_global_zero: bool
    precision_plugin: Any
    setup_optimizers: Any

    def __init__(self, schedule: Any, **options: Any) -> None:
        super().__init__()
        for name in sorted(_REFUSED_OPTIONS.keys() & options.keys()):
            raise refusal_of(
                f"`{name}` is Lightning's to give", f"leave it out: {_REFUSED_OPTIONS[name]}"
            )
        self.schedule, self.options = schedule, options
        self.program: Any = None
        self._step: Any = None  # the module with its `training_step` as the forward
        self._logs: _Logs = {}  # the arguments with which `training_step` logs the loss
        # the module's plain attributes when the program was built
        self._plain_attributes: dict[str, Any] = {}
        self._has_values = True  # whether the module has values
        # versions of the module's tensors, with or without values
        self._seen_versions: dict[str, Any] = {}
        self._checkpoint_path = ""  # the checkpoint that the run continues

    # -- before the first step -------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The number of parts that the rows of a step are split into, and this rank's part."""
        if self.program is None:
            return super().distributed_sampler_kwargs  # type: ignore[misc,no-any-return]
        return {"num_replicas": self.program.dp_size, "rank": self.program.dp_rank}

    def setup(self, trainer: Any) -> None:
        """Build the program of the schedule, if the module is to be fitted; all ranks together.

        Raises Refusal S691 for unsupported settings, and what `Schedule.build` raises.
        """
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if trainer.state.fn != "fit":
            module.to(self.root_device)
            return
        if problem := _find_unsupported(trainer, module):
            raise refusal_of(*problem)
        self._step = _with_step_as_forward(module, self._logs)
        settings = Settings(world=self.world_size)
        self.program = Schedule(self._step, parse(source_of(self.schedule)), settings).build(
            optimizer=lambda named_params: self._optimizer(trainer, module, dict(named_params)),
            clip=trainer.gradient_clip_val,
            **self.options,
        )
        trainer.fit_loop.setup_data()  # this rank's rows are known now
        first = self._first_batch(trainer, module)
        type(self._step).form = _Form.of(first)
        self.program._built(type(self._step).form.keywords(first), True)
        self.program = self.program._program
        self._plain_attributes = {
            name: vars(module).get(name) for name in _names_used(type(module))
        }
        self._seen_versions = _versions(module)

    def _first_batch(self, trainer: Any, module: Any) -> Any:
        """Return the first batch, as `training_step` will get it; the loaders' positions do not
        change."""
        loaders = trainer.train_dataloader
        states = generator_states(loaders)
        batch = _pytree.tree_map(lambda loader: next(iter(loader)), loaders)
        restore_generators(loaders, states)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch)

    def _optimizer(self, trainer: Any, module: Any, params: dict[str, Any]) -> Any:
        """Return the optimizer that `configure_optimizers` makes, for parameters by name.

        Names that belong to no part of the module are those of a probe, which measures how
        parameters move: they stand for parameters of the module, its matrices first.
        """
        originals = dict(module.named_parameters())
        parts = {name.partition(".")[0] for name in params}
        if probe := not parts & {name.partition(".")[0] for name in originals}:
            trained = [name for name, p in originals.items() if p.requires_grad]
            names = sorted(trained, key=lambda name: originals[name].dim() < 2)
            params = dict(zip(names, params.values(), strict=False))
        placeholder = nn.Parameter(torch.empty(0), requires_grad=False)
        twin = deepcopy_module(
            module, {id(p): params.pop(n, placeholder) for n, p in originals.items()}
        )
        for submodule in twin.modules():
            for name in [name for name, p in submodule._parameters.items() if p is placeholder]:
                del submodule._parameters[name]
        for name, p in params.items():  # parameters added by rows, such as adapters'
            _submodule(twin, name.split(".")[:-1]).register_parameter(name.rpartition(".")[2], p)
        twin.trainer = trainer
        before = self.optimizers, self.lr_scheduler_configs
        self.connect(twin)
        try:
            self.setup_optimizers(trainer)
            return self.optimizers[0]
        finally:
            self.connect(module)
            if probe:
                self.optimizers, self.lr_scheduler_configs = before

    # -- a step ----------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Train on this rank's rows: forward, backward and update; return the loss of all ranks'
        rows."""
        module = self.lightning_module
        self._release_values()
        for name, previous in self._plain_attributes.items():
            current = vars(module).get(name)
            if current is not previous and not (type(current) in _PLAIN and current == previous):
                raise refusal_of(
                    f"a hook has changed `{name}`, but the program uses the old value",
                    "compute it in `training_step`, from `self.global_step` for example",
                )
        type(self._step).batch_idx = batch_idx
        loss = self.program.train_step(self._step.form.keywords(batch), local=True)
        for name, options in self._logs.items():
            if options is not None:
                module.log(name, loss, **options)
        return loss

    def backward(self, closure_loss: Any, *_: Any, **__: Any) -> Any:
        """Return the loss: the step of the program has run the backward."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, *_: Any, **__: Any) -> Any:
        """Run the step of the program, which includes the update."""
        return closure()

    # -- the values of the module ----------------------------------------------------------------

    def _gather_values(self) -> None:
        """Copy the program's values into the module; all ranks together."""
        module = self.lightning_module
        if self.program is None or self._has_values:
            return
        self._check_unwritten()
        state = self.program.state_dict() | self.program.buffers()
        for name, tensor in _tensors(module).items():
            _swap_value(tensor, state[name].to(self.root_device))
        self._has_values, self._seen_versions = True, _versions(module)

    def _release_values(self) -> None:
        """Move the module to the meta device; first load values that hooks have written into the
        program."""
        module = self.lightning_module
        if not self._has_values:
            self._check_unwritten()
            return
        if self._seen_versions != _versions(module):
            self.program.load_state_dict(module.state_dict())
        for tensor in _tensors(module).values():
            _swap_value(tensor, torch.empty_like(tensor, device="meta"))
        self._has_values, self._seen_versions = False, _versions(module)

    def _check_unwritten(self) -> None:
        """Refuse writes of hooks into a module without values: they would be lost."""
        versions = _versions(self.lightning_module)
        written = [name for name, sign in self._seen_versions.items() if versions.get(name) != sign]
        if written:
            raise refusal_of(
                f"a hook has written into `{written[0]}` between two steps, where it has no values",
                "write at the end of an epoch or of an evaluation: that is taken over",
            )

    def on_validation_start(self) -> None:
        """Give the module the program's values, so that Lightning evaluates it as usual."""
        self._gather_values()

    def on_train_end(self) -> None:
        """Leave the trained values in the module."""
        self._gather_values()

    def teardown(self) -> None:
        """End; the program stays as it is, and so does a module without values after an error."""
        if self._has_values:
            self.lightning_module.cpu()
        for plugin in (self.precision_plugin, self.accelerator, self.checkpoint_io):
            plugin.teardown()

    # -- checkpoints -----------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's own state dict, with the values of the program; all ranks
        together."""
        self._gather_values()
        state: dict[str, Any] = self.lightning_module.state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {}: the state is in the folder beside the checkpoint, sharded as on the ranks."""
        return {}

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Save the program's state into a folder beside Lightning's file, then Lightning's file."""
        filepath = self.broadcast(filepath)
        if "optimizer_states" in checkpoint:
            self.program.save(f"{filepath}{BESIDE}", 1)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and the folder beside it."""
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}{BESIDE}", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read Lightning's file; the program's state is read when the program is built."""
        self._checkpoint_path = str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the program's state, of any schedule and number of ranks.

        Raises Refusal S691 if another strategy has written the checkpoint.
        """
        folder = Path(f"{self._checkpoint_path}{BESIDE}")
        if not folder.is_dir():
            raise refusal_of(
                f"there is no `{folder}`: this checkpoint has no state of a schedule's program",
                'begin with its weights: `module.load_state_dict(torch.load(path)["state_dict"])`',
            )
        self.program.load(folder)


# -- the module and its batches ------------------------------------------------------------------


def _with_step_as_forward(module: Any, logs: _Logs) -> Any:
    """Return the module, with the same submodules, with `training_step` as its forward.

    logs  is filled by the step: the arguments of `log` for the loss, None for other values
    """
    kind = type(module)
    inner, step_params = kind.forward, inspect.signature(kind.training_step).parameters

    class Step(kind):  # type: ignore[misc,valid-type]
        form, batch_idx = _Form(None), 0
        # trainer, epoch and step are those of the module
        _trainer = property(lambda self: module._trainer, lambda self, value: None)
        _device = property(lambda self: _device_of(self, module), lambda self, value: None)

        def __call__(self, *args: Any, **batch: Any) -> Any:
            if "_logged" in vars(self):  # `self(x)` inside of its `training_step`
                return inner(self, *args, **batch)
            return super().__call__(*args, **batch)

        def forward(self, **batch: Any) -> dict[str, Any]:
            logged: dict[str, Any] = {}
            self.__dict__["_logged"] = logged
            try:
                index = (self.batch_idx,) if len(step_params) > 2 else ()
                output = self.training_step(self.form.batch(batch), *index)
            finally:
                del self.__dict__["_logged"]
            loss = output["loss"] if isinstance(output, Mapping) else output
            for name, (value, options) in logged.items():
                if name not in logs:
                    logs[name] = options if value is loss else None
                    if value is not loss:
                        _warn_not_logged(name)
            return {"loss": loss}

        def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
            self.__dict__["_logged"][name] = value, dict(zip(_LOG, args, strict=False)) | options

        def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
            for name, value in dictionary.items():
                self.log(name, value, *args, **options)

    Step.__name__ = kind.__name__
    Step.__qualname__ = kind.__qualname__
    Step.__module__ = kind.__module__
    step = copy.copy(module)
    step.__class__ = Step
    return step


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _swap_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor another value, also on another device; the tensor stays the same object."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]


def _submodule(module: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the module at a path, made if there is none."""
    for name in path:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


def _device_of(step: nn.Module, module: Any) -> torch.device:
    device: torch.device = module.device
    p = next(step.parameters(), None)
    return device if p is None else p.device


def _warn_not_logged(name: str) -> None:
    message = f"`{name}` is not logged: under a schedule only the loss leaves `training_step`"
    warnings.warn(message, stacklevel=2)


@dataclass(frozen=True)
class _Form:
    """The form of a loader's batches, and the keyword arguments that they become.

    kind    type of batches that consist of parts, else None
    """

    kind: type[Any] | None

    @classmethod
    def of(cls, batch: Any) -> _Form:
        """Return the form of a batch."""
        return cls(type(batch) if isinstance(batch, (Mapping, tuple, list)) else None)

    def keywords(self, batch: Any) -> Mapping[str, Any]:
        """Return a batch as keyword arguments."""
        if isinstance(batch, Mapping):
            return batch
        if self.kind is None:
            return {"batch": batch}
        return {f"batch_{i}": part for i, part in enumerate(batch)}

    def batch(self, keywords: Mapping[str, Any]) -> Any:
        """Return the batch that `keywords` was made from."""
        if self.kind is None:
            return keywords["batch"]
        if issubclass(self.kind, Mapping):
            return self.kind(keywords)  # type: ignore[call-arg]
        parts = keywords.values()
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


def _versions(module: nn.Module) -> dict[str, Any]:
    """Return numbers that change with each write into a parameter or a buffer."""
    return {name: (tensor._version, tensor.data_ptr()) for name, tensor in _tensors(module).items()}


def _names_used(kind: type[Any]) -> set[str]:
    """Return the names used in methods that `training_step` may call; plain attributes are among
    them."""
    bases = kind.__mro__[: kind.__mro__.index(_lightning_base(kind))]
    codes = [
        value.__code__
        for item in bases
        for method, value in vars(item).items()
        if inspect.isfunction(value) and not method.startswith(_NOT_STEP_METHODS)
    ]
    names: set[str] = set()
    for code in codes:
        codes += [item for item in code.co_consts if isinstance(item, CodeType)]  # nested functions
        names |= {*code.co_names}
    return names - {"training"}


def _lightning_base(kind: type[Any]) -> type[Any]:
    """Return the base class of a module or callback that Lightning defines."""
    return next(base for base in kind.__mro__ if base.__module__.split(".")[0] in _PACKAGES)


# -- unsupported settings ----------------------------------------------------------------------


def _find_unsupported(trainer: Any, module: Any) -> tuple[str, str] | None:
    """Return a setting that a schedule does not support, and what to write instead; None if
    none."""
    strategy = trainer.strategy
    if not module.automatic_optimization:
        return "`automatic_optimization` is off", "let Lightning's loop call `training_step`"
    if trainer.accumulate_grad_batches != 1:
        n = trainer.accumulate_grad_batches
        help_ = f"larger batches, and a row: `pipeline(micro={n})`"
        return f"`accumulate_grad_batches={n}` is not supported under a schedule", help_
    if str(trainer.precision) != "32-true":
        help_ = "leave it out: use a row instead, such as `cast(bf16)`"
        return f"`precision={trainer.precision}` is not supported under a schedule", help_
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm") != "norm":
        return "gradients are clipped by value", "clip by their norm"
    if strategy._layer_sync is not None:
        return "`sync_batchnorm` is not supported under a schedule", "leave it out"
    for owner in (module, *trainer.callbacks):
        base = _lightning_base(type(owner))
        for name in _HOOKS:
            if getattr(type(owner), name, None) is not getattr(base, name, None):
                title = f"`{type(owner).__name__}.{name}` is not called under a schedule"
                return title, "leave it out: the program does backward and update"
    if not list(module.parameters()):
        return f"`{type(module).__name__}` has no parameters", "make them before `fit`"
    return None


@cache
def make_schedule_strategy(kind: type[Any]) -> type[Any]:
    """Return a strategy like `DDPStrategy`, or derived from it, with a schedule."""
    return type("ScheduleStrategy", (_Scheduled, kind), {"__doc__": _Scheduled.__doc__})


def __getattr__(name: str) -> Any:
    """Return `ScheduleStrategy`, made on first use: importing this module does not import
    Lightning."""
    if name != "ScheduleStrategy":
        raise AttributeError(f"module `schedlang.lightning` has no `{name}`")
    at_hand = [candidate for candidate in _PACKAGES if candidate in sys.modules] or list(_PACKAGES)
    package = next(
        (candidate for candidate in at_hand if importlib.util.find_spec(candidate)), _PACKAGES[0]
    )
    strategies = importlib.import_module(f"{_ROOTS[package]}.strategies")
    return make_schedule_strategy(strategies.DDPStrategy)
