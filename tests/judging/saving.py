"""Programs that save and load: DDP, FSDP2 with torch's state dicts, a folder; right and wrong."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from schedlang import TrainingProgram
from tests.judging import wrapped


def _with_checkpoint(program: TrainingProgram, save: Any, load: Any) -> TrainingProgram:
    return TrainingProgram(
        program.module,
        program.step,
        clip=program.clip,
        world_loss=program.world_loss,
        **{"state_dict": save, "load": load},
    )


def ddp(model: nn.Module) -> TrainingProgram:
    """DDP that saves the module and the optimizer's state."""

    def save(optimizer: Any) -> Any:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: Any, optimizer: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return _with_checkpoint(wrapped.ddp(model), save, load)


def first_saves(model: nn.Module) -> TrainingProgram:
    """DDP whose rank 0 saves, and all ranks load."""
    program = ddp(model)

    def save(optimizer: Any) -> Any:
        return program.state_dict(optimizer) if dist.get_rank() == 0 else None  # type: ignore[misc]

    return _with_checkpoint(program, save, program.load)


def weights_only(model: nn.Module) -> TrainingProgram:
    """DDP that saves weights only."""
    return _with_checkpoint(wrapped.ddp(model), model.state_dict, model.load_state_dict)


def fsdp2(model: nn.Module, full: bool = False) -> TrainingProgram:
    """FSDP2 that saves DTensors, by torch.distributed.checkpoint.state_dict."""
    program = wrapped.fsdp2(model)
    options = StateDictOptions(full_state_dict=full)

    def save(optimizer: Any) -> Any:
        return get_state_dict(model, optimizer, options=options)

    def load(state: Any, optimizer: Any) -> None:
        set_state_dict(
            model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options
        )

    return _with_checkpoint(program, save, load)


def fsdp2_full(model: nn.Module) -> TrainingProgram:
    """FSDP2 that saves full tensors on every rank."""
    return fsdp2(model, full=True)


def folder(model: nn.Module) -> TrainingProgram:
    """DDP whose rank 0 writes a folder; the saved state is its path."""
    program = ddp(model)

    def save(optimizer: Any) -> Any:
        if dist.get_rank():
            return None
        path = Path(tempfile.mkdtemp()) / "state.pt"
        torch.save(program.state_dict(optimizer), path)  # type: ignore[misc]
        return path

    def load(state: Any, optimizer: Any) -> None:
        assert program.load is not None
        program.load(torch.load(state), optimizer)

    return _with_checkpoint(program, save, load)


def no_momentum(model: nn.Module) -> TrainingProgram:
    """Wrong: the optimizer's state is saved, but not loaded."""
    program = ddp(model)

    def load(state: Any, optimizer: Any) -> None:
        model.load_state_dict(state["model"])

    return _with_checkpoint(program, program.state_dict, load)


def steps_reset(model: nn.Module) -> TrainingProgram:
    """Wrong: after loading, the optimizer counts its steps from zero."""
    program = ddp(model)

    def load(state: Any, optimizer: Any) -> None:
        assert program.load is not None
        program.load(state, optimizer)
        for slots in optimizer.state.values():
            slots["step"].zero_()

    return _with_checkpoint(program, program.state_dict, load)


def fewer_bits(model: nn.Module) -> TrainingProgram:
    """Wrong: weights are rounded when they are saved."""
    program = ddp(model)

    def save(optimizer: Any) -> Any:
        state = {name: (v * 1024).round() / 1024 for name, v in model.state_dict().items()}
        return {"model": state, "optimizer": optimizer.state_dict()}

    return _with_checkpoint(program, save, program.load)


def no_buffer(model: nn.Module) -> TrainingProgram:
    """Wrong: a buffer is neither saved nor loaded."""

    def save() -> Any:
        return {k: v for k, v in model.state_dict().items() if "running" not in k}

    def load(state: Any) -> None:
        model.load_state_dict(state, strict=False)

    return _with_checkpoint(image_program(model), save, load)


def image_program(model: nn.Module) -> TrainingProgram:
    """All rows on each rank, so that batch norms agree."""

    def step(batch: Any) -> Any:
        value = wrapped.image_loss(model(batch["x"]), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


def with_buffers(model: nn.Module) -> TrainingProgram:
    """The same program, which saves its buffers too."""
    return _with_checkpoint(image_program(model), model.state_dict, model.load_state_dict)


def tied_once(model: nn.Module) -> TrainingProgram:
    """DDP that saves a tied weight under one of its names, as `named_parameters` does."""

    def save(optimizer: Any) -> Any:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return {
            "model": parameters | dict(model.named_buffers()),
            "optimizer": optimizer.state_dict(),
        }

    def load(state: Any, optimizer: Any) -> None:
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])

    return _with_checkpoint(wrapped.ddp(model), save, load)


def tied_twice(model: nn.Module) -> TrainingProgram:
    """Wrong: a tied weight is saved twice, once with its value before training."""
    initial = copy.deepcopy(model.head.weight.detach())  # type: ignore[union-attr, operator]

    def save() -> Any:
        return {**model.state_dict(), "emb.weight": initial}

    return _with_checkpoint(wrapped.ddp(model), save, model.load_state_dict)


def rate_doubled(model: nn.Module) -> TrainingProgram:
    """Wrong: loading doubles the learning rate, which only the next step shows."""
    program = ddp(model)

    def load(state: Any, optimizer: Any) -> None:
        assert program.load is not None
        program.load(state, optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= 2

    return _with_checkpoint(program, program.state_dict, load)


def prefixed(model: nn.Module) -> TrainingProgram:
    """Wrong: saved names have a wrapper's prefix, so the original cannot load them."""
    program = wrapped.ddp(model)
    module = program.module
    assert isinstance(module, nn.Module)

    def save() -> Any:
        return {**module.state_dict(), "scale": model.state_dict()["scale"]}

    return _with_checkpoint(
        program, save, lambda state: module.load_state_dict(state, strict=False)
    )


def scheduled(named_params: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose rate falls with each step."""
    optimizer: Any = torch.optim.AdamW([p for _, p in named_params], lr=3e-3, eps=1e-5)
    optimizer.falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.register_step_post_hook(lambda *_: optimizer.falling.step())
    return optimizer


def with_schedule(model: nn.Module, *, loads: bool = True) -> TrainingProgram:
    """Save and load a scheduler beside the optimizer, whose groups hold the next step's rate."""
    program = wrapped.ddp(model)

    def save(optimizer: Any) -> Any:
        schedule = optimizer.falling.state_dict()
        return model.state_dict(), optimizer.state_dict(), schedule

    def load(state: Any, optimizer: Any) -> None:
        weights, slots, schedule = state
        model.load_state_dict(weights)
        optimizer.load_state_dict(slots)
        if loads:
            optimizer.falling.load_state_dict(schedule)

    return replace(program, optimizer=scheduled, state_dict=save, load=load)


def schedule_lost(model: nn.Module) -> TrainingProgram:
    """Wrong: the scheduler begins anew, which only the second step shows."""
    return with_schedule(model, loads=False)
