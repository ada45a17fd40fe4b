"""Callbacks of `Trainer`: the figures of a run, and where they are shown.

Each is a plain object with some of the methods that `trainer` names; write others like them.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal

if TYPE_CHECKING:
    from schedlang.trainer import Batch, Figures, Trainer


@dataclass
class Meter:
    """Figures of a run since the last query.

    tokens      elements of `input_ids` in the batches so far, else rows; of all ranks
    last_query  of the last query: seconds, step, tokens
    """

    tokens: int = 0
    last_query: tuple[float, int, int] = (0.0, 0, 0)

    def begin(self, step: int) -> None:
        """Start counting at this step."""
        self.last_query = time.perf_counter(), step, self.tokens

    def add(self, batch: Batch, times: int) -> None:
        """Count a batch of one rank; `times` ranks have equally many rows."""
        ids = batch.get("input_ids")
        if ids is not None:
            self.tokens += ids.numel() * times
            return
        sized = (x for x in batch.values() if getattr(x, "shape", ()))
        self.tokens += len(next(sized, ())) * times

    def figures(self, trainer: Trainer, loss: float) -> Figures:
        """Return loss, norm and learning rate of the last step, and means since the last query.

        `utilisation`: 6 operations per parameter and token (Chowdhery et al. 2022, without
        attention) relative to the devices' 16-bit peak, where it is known; `memory`: the peak bytes
        of this rank's device, where the device counts them.
        """
        from schedlang.runtime.device import peak_bytes

        program, (last_time, before, tokens) = trainer.program, self.last_query
        self.begin(program.step)
        seconds = self.last_query[0] - last_time
        figures: Figures = {"step": program.step, "loss": loss}
        if (norm := program.grad_norm) is not None:
            figures["gradient norm"] = norm
        if program.optimizer is not None:
            lr = program.optimizer.param_groups[0]["lr"]
            figures["learning rate"] = float(lr if trainer.rate is None else trainer.rate)
        figures["seconds a step"] = seconds / max(1, program.step - before)
        figures["tokens per second"] = rate = (self.tokens - tokens) / seconds
        if (peak := _peak_flops(trainer)) is not None:
            count = sum(parameter.numel() for parameter in trainer.model.parameters())
            figures["utilisation"] = 6 * count * rate / peak
        if (memory := peak_bytes(program.assembly.ranks.device)) is not None:
            figures["memory"] = memory
        return figures


def _peak_flops(trainer: Trainer) -> float | None:
    """Return the operations per second of the devices of all ranks; None: unknown."""
    import torch

    from schedlang.passes.simulate.machine import CLUSTERS
    from schedlang.runtime.device import on_accelerator

    ranks = trainer.program.assembly.ranks
    if not on_accelerator(ranks.device):
        return None
    get_name = getattr(torch.get_device_module(ranks.device), "get_device_name", None)
    name = get_name(ranks.device).lower() if get_name is not None else ""
    speeds = [cluster.speed for key, cluster in CLUSTERS.items() if key in name]
    return speeds[0] * ranks.mesh.world if speeds else None


# -- where figures are shown -----------------------------------------------------------------------


def is_first_rank(trainer: Trainer) -> bool:
    """Return whether this is the first rank, which prints for all."""
    return trainer.program.assembly.ranks.rank == 0


@dataclass
class Console:
    """Prints a line at each log, and on a terminal a progress bar; on the first rank only."""

    _bar: Any = field(default=None, init=False)
    _task: Any = field(default=None, init=False)

    def on_begin(self, trainer: Trainer) -> None:
        """Start the bar."""
        from rich.console import Console as Rich
        from rich.progress import Progress

        if is_first_rank(trainer):
            rich = Rich()
            self._bar = Progress(console=rich, disable=not rich.is_terminal)
            self._task = self._bar.add_task("", total=trainer.steps)
            self._bar.start()

    def on_log(self, trainer: Trainer, figures: Figures) -> None:
        """Print a line."""
        if self._bar is not None:
            self._bar.update(self._task, completed=figures["step"])
            self._bar.console.print(format_figures(figures), highlight=False, soft_wrap=True)

    on_evaluate = on_log

    def on_end(self, trainer: Trainer) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()


_FORMS = {
    "loss": "{:.4f}",
    "evaluation loss": "{:.4f}",
    "learning rate": "{:.2e}",
    "utilisation": "{:.1%}",
    "tokens per second": "{:,.0f}",
}


def format_figures(figures: Figures) -> str:
    """Format figures as a line: step 10  loss 3.1416  gradient norm 1.2  ..."""
    values = dict(figures)
    if "memory" in values:
        values["memory"] /= 2**30
    formats = {**_FORMS, "memory": "{:.1f} GiB"}
    return "  ".join(
        f"{name} {formats.get(name, '{:.4g}').format(values[name])}" for name in values
    )


@dataclass
class TensorBoard:
    """Writes figures for TensorBoard into a folder; on the first rank only. Needs `tensorboard`."""

    folder: str | os.PathLike[str]
    _writer: Any = field(default=None, init=False)

    def on_begin(self, trainer: Trainer) -> None:
        """Open the folder. Raises Refusal S691 if TensorBoard is not installed."""
        module = _import_optional("torch.utils.tensorboard", "tensorboard")
        if is_first_rank(trainer):
            self._writer = module.SummaryWriter(str(self.folder))

    def on_log(self, trainer: Trainer, figures: Figures) -> None:
        """Write a point for each figure."""
        if self._writer is not None:
            for name, value in figures.items():
                if name != "step":
                    self._writer.add_scalar(name, value, int(figures["step"]))

    on_evaluate = on_log

    def on_end(self, trainer: Trainer) -> None:
        """Close the folder."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Sends figures to Weights & Biases; on the first rank only. Needs `wandb`; `options` go to its
    `init`."""

    def __init__(self, **options: Any) -> None:
        self.options, self._run = options, None

    def on_begin(self, trainer: Trainer) -> None:
        """Begin a run. Raises Refusal S691 if `wandb` is not installed."""
        module = _import_optional("wandb", "wandb")
        if is_first_rank(trainer):
            self._run = module.init(**self.options)

    def on_log(self, trainer: Trainer, figures: Figures) -> None:
        """Send the figures."""
        if self._run is not None:
            self._run.log(dict(figures), step=int(figures["step"]))

    on_evaluate = on_log

    def on_end(self, trainer: Trainer) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


def _import_optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        title = f"a callback needs `{package}`, which is not installed here"
        helps = (f"install it: `pip install {package}`", "or leave this callback out")
        raise Refusal.of("S691", title, notes=(str(error),), helps=helps) from None


@dataclass
class Profile:
    """Profiles steps `begin` to `end` with torch's profiler: a trace for each rank in a folder."""

    folder: str | os.PathLike[str]
    begin: int
    end: int
    _profiler: Any = field(default=None, init=False)

    def on_begin(self, trainer: Trainer) -> None:
        """Start before the first step, if `begin` is the first step."""
        self.on_step(trainer)

    def on_step(self, trainer: Trainer) -> None:
        """Start or stop between two steps."""
        import torch

        step = trainer.program.step
        if step == self.begin:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif self._profiler is not None and step >= self.end:
            self.on_end(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Write the recorded trace."""
        if self._profiler is not None:
            self._profiler.stop()
            os.makedirs(self.folder, exist_ok=True)
            rank = trainer.program.assembly.ranks.rank
            name = f"rank{rank}-step{trainer.program.step}.json"
            self._profiler.export_chrome_trace(os.path.join(self.folder, name))
            self._profiler = None
