"""Programs that save and load: DDP, FSDP2 with torch's state dicts, a folder; right and wrong."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from schedlang import TrainingProgram
from tests.judging import wrapped


def _offering(made: TrainingProgram, save: Any, load: Any) -> TrainingProgram:
    return TrainingProgram(
        made.module,
        made.step,
        clip=made.clip,
        world_loss=made.world_loss,
        **{"state_dict": save, "load": load},
    )


def ddp(model: nn.Module) -> TrainingProgram:
    """The module of DDP, and the optimizer's state."""

    def save(optimizer: Any) -> Any:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: Any, optimizer: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return _offering(wrapped.ddp(model), save, load)


def first_saves(model: nn.Module) -> TrainingProgram:
    """Rank 0 saves, all ranks load."""
    whole = ddp(model)

    def save(optimizer: Any) -> Any:
        return whole.state_dict(optimizer) if dist.get_rank() == 0 else None  # type: ignore[misc]

    return _offering(whole, save, whole.load)


def weights_alone(model: nn.Module) -> TrainingProgram:
    """Weights are saved, and said to be all."""
    return _offering(wrapped.ddp(model), model.state_dict, model.load_state_dict)


def fsdp2(model: nn.Module, full: bool = False) -> TrainingProgram:
    """DTensors, by torch.distributed.checkpoint.state_dict."""
    whole = wrapped.fsdp2(model)
    options = StateDictOptions(full_state_dict=full)

    def save(optimizer: Any) -> Any:
        return get_state_dict(model, optimizer, options=options)

    def load(state: Any, optimizer: Any) -> None:
        set_state_dict(
            model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options
        )

    return _offering(whole, save, load)


def fsdp2_whole(model: nn.Module) -> TrainingProgram:
    """The same, whole tensors on every rank."""
    return fsdp2(model, full=True)


def folder(model: nn.Module) -> TrainingProgram:
    """A folder that rank 0 writes, whose path is what is saved."""
    whole = ddp(model)

    def save(optimizer: Any) -> Any:
        if dist.get_rank():
            return None
        path = Path(tempfile.mkdtemp()) / "state.pt"
        torch.save(whole.state_dict(optimizer), path)  # type: ignore[misc]
        return path

    def load(state: Any, optimizer: Any) -> None:
        assert whole.load is not None
        whole.load(torch.load(state), optimizer)

    return _offering(whole, save, load)


def no_momentum(model: nn.Module) -> TrainingProgram:
    """Wrong: the optimizer's state is saved, and not loaded."""
    whole = ddp(model)

    def load(state: Any, optimizer: Any) -> None:
        model.load_state_dict(state["model"])

    return _offering(whole, whole.state_dict, load)


def steps_anew(model: nn.Module) -> TrainingProgram:
    """Wrong: the optimizer counts its steps from the start."""
    whole = ddp(model)

    def load(state: Any, optimizer: Any) -> None:
        assert whole.load is not None
        whole.load(state, optimizer)
        for slots in optimizer.state.values():
            slots["step"].zero_()

    return _offering(whole, whole.state_dict, load)


def fewer_bits(model: nn.Module) -> TrainingProgram:
    """Wrong: what is saved has lost bits."""
    whole = ddp(model)

    def save(optimizer: Any) -> Any:
        state = {name: (v * 1024).round() / 1024 for name, v in model.state_dict().items()}
        return {"model": state, "optimizer": optimizer.state_dict()}

    return _offering(whole, save, whole.load)


def no_buffer(model: nn.Module) -> TrainingProgram:
    """Wrong: a buffer is neither saved nor loaded."""

    def save() -> Any:
        return {k: v for k, v in model.state_dict().items() if "running" not in k}

    def load(state: Any) -> None:
        model.load_state_dict(state, strict=False)

    return _offering(averaged(model), save, load)


def averaged(model: nn.Module) -> TrainingProgram:
    """Each rank sees all rows, so that batch norms agree."""

    def step(batch: Any) -> Any:
        value = wrapped.of_images(model(batch["x"]), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


def statistics(model: nn.Module) -> TrainingProgram:
    """The same, with its buffers."""
    return _offering(averaged(model), model.state_dict, model.load_state_dict)


def tied_once(model: nn.Module) -> TrainingProgram:
    """A tied weight is saved under one of its names, as `named_parameters` has it."""

    def save(optimizer: Any) -> Any:
        held = {name: p.detach() for name, p in model.named_parameters()}
        return {"model": held | dict(model.named_buffers()), "optimizer": optimizer.state_dict()}

    def load(state: Any, optimizer: Any) -> None:
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])

    return _offering(wrapped.ddp(model), save, load)


def tied_apart(model: nn.Module) -> TrainingProgram:
    """Wrong: a tied weight is saved twice, once as it was before training."""
    before = copy.deepcopy(model.head.weight.detach())  # type: ignore[union-attr, operator]

    def save() -> Any:
        return {**model.state_dict(), "emb.weight": before}

    return _offering(wrapped.ddp(model), save, model.load_state_dict)


def hyper(model: nn.Module) -> TrainingProgram:
    """Wrong: the learning rate is another after loading, which only the next step shows."""
    whole = ddp(model)

    def load(state: Any, optimizer: Any) -> None:
        assert whole.load is not None
        whole.load(state, optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= 2

    return _offering(whole, whole.state_dict, load)


def prefixed(model: nn.Module) -> TrainingProgram:
    """Wrong: names have what a wrapper puts into them, by which the original does not load."""
    whole = wrapped.ddp(model)
    module = whole.module
    assert isinstance(module, nn.Module)

    def save() -> Any:
        return {**module.state_dict(), "scale": model.state_dict()["scale"]}

    return _offering(whole, save, lambda state: module.load_state_dict(state, strict=False))
