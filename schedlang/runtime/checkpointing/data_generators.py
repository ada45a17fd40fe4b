"""Generators that draw samples: of this process, of a loader, and of its workers.

`data_position` saves their states beside a checkpoint, and restores them.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from schedlang.runtime import device as devices

PlainData = dict[str, Any]
# attributes where torch's loaders and samplers have generators
_GENERATOR_PATHS = (
    (),
    ("sampler",),
    ("batch_sampler",),
    ("batch_sampler", "sampler"),
    ("dataset",),
)


def generator_states(data: Any = None, *, device: bool = True) -> PlainData:
    """Return the states of the generators of torch, Python, numpy, and of a loader.

    device   also that of the accelerator, which a loader's worker may not touch
    """
    kind, (of_loader, own) = devices.accelerator() if device else None, _generators(data)
    states: PlainData = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": None,
        "device": None if kind is None else devices.default_generator(kind).get_state(),
        "loader": [generator.get_state() for generator in of_loader],
        "own": [_own_state(generator) for generator in own],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        saved = numpy.random.get_state(legacy=False)
        states["numpy"] = {**saved, "state": _as_lists(saved["state"])}
    return states


def restore_generators(data: Any, saved: Mapping[str, Any]) -> None:
    """Restore the states of `generator_states`; other generators are unchanged."""
    torch.set_rng_state(saved["torch"])
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    if saved["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(saved["numpy"])
    kind = devices.accelerator()
    if saved["device"] is not None and kind is not None:
        devices.default_generator(kind).set_state(saved["device"])
    of_loader, own = _generators(data)
    for generator, state in zip(of_loader, saved["loader"]):
        generator.set_state(state)
    for generator, state in zip(own, saved.get("own", ())):
        if isinstance(generator, random.Random):
            version, numbers, gauss = state
            generator.setstate((version, tuple(numbers), gauss))
        else:
            generator.bit_generator.state = state


def _as_lists(value: Any) -> Any:
    if value.__class__ is dict:
        return {key: _as_lists(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _generators(data: Any) -> tuple[list[torch.Generator], list[Any]]:
    """Return generators of torch, of a loader and its samplers; and those of Python and numpy that
    are attributes of these or of the data set; each once."""
    numpy = sys.modules.get("numpy")
    kinds = (random.Random,) if numpy is None else (random.Random, numpy.random.Generator)
    of_loader, own = dict[int, torch.Generator](), dict[int, Any]()
    for path in _GENERATOR_PATHS:
        owner = data
        for name in path:
            owner = getattr(owner, name, None)
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            of_loader[id(generator)] = generator
        for value in getattr(owner, "__dict__", {}).values():
            if value.__class__ in kinds:  # of many attributes, at each epoch
                own[id(value)] = value
    return list(of_loader.values()), list(own.values())


def _own_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _as_lists(generator.bit_generator.state)


# -- workers that outlive an epoch -----------------------------------------------------------------


class PersistentLoader:
    """A loader of torch with `persistent_workers`, and the states of its workers' generators.

    Workers draw on from epoch to epoch. So each batch comes with the states of its worker after it,
    and workers of a resumed run start from those that they had at the start of the epoch.

    loader   a shallow copy of the user's, whose batches are (worker, states, batch)
    states   by worker: after its last batch, pickled
    seeding  the state of the generator that drew the workers' seeds; None before the first epoch
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader: Any = copy.copy(loader)
        self.loader._iterator = None
        self.loader.collate_fn = _CollateWithStates(loader.collate_fn)
        self.states: dict[str, bytes] = {}
        self.seeding: torch.Tensor | None = None
        self._resumed: PlainData | None = None  # the state with which workers will start

    @staticmethod
    def of(data: Any) -> PersistentLoader | None:
        """Return the loader for data that are one with such workers; else None."""
        lasts = isinstance(data, DataLoader) and data.num_workers > 0 and data.persistent_workers
        return PersistentLoader(data) if lasts else None

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; all draws of this process are made here."""
        resumed, self._resumed = self._resumed, None
        generator, init = self.loader.generator, self.loader.worker_init_fn
        if self.seeding is None:
            self.seeding = (generator or torch.default_generator).get_state()
        if resumed is not None:  # the workers' seeds were drawn in the first epoch
            self.loader.generator = torch.Generator().set_state(resumed["seeding"])
            self.loader.worker_init_fn = _StartWithStates(init, resumed["states"])
        try:
            return self._batches(iter(self.loader))
        finally:
            self.loader.generator, self.loader.worker_init_fn = generator, init

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for worker, states, batch in batches:
            self.states[worker] = states
            yield batch

    def state(self) -> PlainData | None:
        """Return the states of all workers at the end of an epoch; None before the first."""
        if self.seeding is None:
            return None
        states = {worker: pickle.loads(states) for worker, states in self.states.items()}
        return {"seeding": self.seeding, "states": states}

    def restore(self, saved: PlainData | None) -> None:
        """Let the next epoch start new workers with the states of `state`."""
        self.loader._iterator, self._resumed = None, saved
        self.seeding, self.states = None, {}
        if saved is not None:
            self.seeding = saved["seeding"]
            self.states = {name: pickle.dumps(states) for name, states in saved["states"].items()}


class _CollateWithStates:
    """Collates samples in a worker, and adds its number and the states of its generators."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[str, bytes, Any]:
        batch, worker = self.collate(samples), get_worker_info()
        assert worker is not None
        states = generator_states(SimpleNamespace(dataset=worker.dataset), device=False)
        return str(worker.id), pickle.dumps(states), batch


class _StartWithStates:
    """Starts a worker as the user's function does, and then sets its generators' states."""

    def __init__(self, init: Callable[[int], None] | None, states: Mapping[str, PlainData]) -> None:
        self.init, self.states = init, states

    def __call__(self, number: int) -> None:
        if self.init is not None:
            self.init(number)
        worker, states = get_worker_info(), self.states.get(str(number))
        if states is not None and worker is not None:
            restore_generators(SimpleNamespace(dataset=worker.dataset), states)
