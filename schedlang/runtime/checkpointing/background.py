"""A save in the background: a copy of the state in host memory, written while training goes on.

A thread of each rank writes, and communicates with those of other ranks in a process group of its
own (CheckFreq: Mohan et al. 2021). Until all of it is on the disk, the folder names the previous
checkpoint, as with a save in the foreground.
"""

from __future__ import annotations

import atexit
import copy
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from schedlang.runtime import device as devices
from schedlang.runtime.checkpointing.boxes import BoxedTensor, without_function_modes
from schedlang.runtime.comm import world as comm
from schedlang.runtime.launch.hang_watch import waits_for_ranks

if TYPE_CHECKING:
    from schedlang.runtime.checkpointing.archive import PreparedCheckpoint

PURPOSE = "saves"  # of the process group of the writing threads
_FINISH, _STOP = 1.0, 2.0  # seconds at the end after an error, to finish a save and to stop it


@dataclass(eq=False)
class BackgroundSave:
    """The save in flight of a program, and the host memory for its copies.

    copies   by index of the tensor: allocated by the first save, reused by later ones
    failure  the error that ended the last save, equal on all ranks; raised once, by `finish`
    stops    set at the end of a process that does not wait for the save
    """

    thread: threading.Thread | None = None
    failure: BaseException | None = None
    stops: bool = False
    copies: dict[int, Tensor] = field(default_factory=dict)

    def start(self, checkpoint: PreparedCheckpoint, world: comm.World) -> None:
        """Copy the values, and start to write them; all ranks together, with no save in flight."""
        with comm.enter_thread_groups(world, PURPOSE):
            _ = world.control_group  # created here, where all ranks are together
        ready = self._copy_tensors(checkpoint.tensors)
        copied = replace(checkpoint, tensors=ready[0], values=copy.deepcopy(checkpoint.values))
        self.thread = threading.Thread(
            target=self._write, args=(copied, ready[1], world), name="schedlang: saves", daemon=True
        )
        self.thread.start()
        atexit.register(self._at_exit)

    def finish(self) -> None:
        """Wait for the save in flight. Raises the error that has ended it."""
        if self.thread is not None:
            with waits_for_ranks():  # a wait for other ranks
                self.thread.join()
            self.thread = None
            atexit.unregister(self._at_exit)
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _write(
        self, checkpoint: PreparedCheckpoint, copied: list[torch.Event], world: comm.World
    ) -> None:
        try:
            with comm.enter_thread_groups(world, PURPOSE):
                for event in copied:  # then the device has copied all
                    devices.host_wait(event)
                replace(checkpoint, tensors=self._until_stopped(checkpoint.tensors)).write()
        except BaseException as error:  # raised by the next `finish`, in the main thread
            self.failure = error

    def _until_stopped(self, tensors: Iterable[BoxedTensor]) -> Iterator[BoxedTensor]:
        """Yield the tensors one by one. Raises SystemExit once the save is to stop."""
        for tensor in tensors:
            if self.stops:
                raise SystemExit("the process ends")
            yield tensor

    def _at_exit(self) -> None:
        """Wait at the end of a process; after an error for moments only: other ranks may be gone.

        The thread must not return to the interpreter while it ends: Python would end the thread in
        a C++ destructor, and the process would abort.
        """
        if self.thread is None:
            return
        with waits_for_ranks():
            if getattr(sys, "last_value", None) is None:
                self.thread.join()
            else:
                self.thread.join(_FINISH)
                self.stops = True
                self.thread.join(_STOP)

    def _copy_tensors(
        self, tensors: Iterable[BoxedTensor]
    ) -> tuple[list[BoxedTensor], list[torch.Event]]:
        """Return copies of the parts that this rank writes, in host memory, and events behind them.

        An accelerator copies in the order of its stream, before any later work: the host does not
        wait, and the next step changes nothing that is still to be copied.
        """
        copied, streams = [], {}
        with without_function_modes(), torch.no_grad():
            for index, tensor in enumerate(tensors):
                if not tensor.primary:
                    continue
                source = tensor.local.detach()
                target = self.copies.get(index)
                if target is None or (target.shape, target.dtype) != (source.shape, source.dtype):
                    target = devices.host_empty(source.shape, source.dtype, beside=source.device)
                    self.copies[index] = target
                target.copy_(source, non_blocking=True)
                if devices.on_accelerator(source):
                    streams[source.device] = devices.current_stream(source.device)
                copied.append(replace(tensor, local=target))
        events = [devices.mark_stream(stream) for stream in streams.values()]
        return copied, [event for event in events if event is not None]
