"""Every kind of data with every kind of workers in every kind of loop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from .parts import WORKERS, Buckets, Items, Module, Scenario, Stream, ValidatedModule, loader, scenario

DATA: dict[str, Callable[..., Any]] = {
    "shuffle": lambda **workers: loader(Items(), shuffle=True, **workers),
    "buckets": lambda **workers: loader(Items(), batch_sampler=Buckets(), **workers),
    "stream": lambda **workers: loader(Stream(), **workers),
    "pair": lambda **workers: {
        "long": loader(Items(), shuffle=True, **workers),
        "short": loader(Items(14), shuffle=True, **workers),
    },
}

LOOPS: dict[str, dict[str, Any]] = {
    "plain": {"module_class": Module},
    "accumulate": {"module_class": Module, "trainer": {"accumulate_grad_batches": 4}},
    "validate": {"module_class": ValidatedModule, "trainer": {"val_check_interval": 4}},
}


def _combination(data: str, workers: str, loop: str) -> Scenario:
    return scenario(lambda _: DATA[data](**WORKERS[workers]), **LOOPS[loop])


SCENARIOS: dict[str, Scenario] = {
    f"{data}_{workers}_{loop}": _combination(data, workers, loop)
    for data, workers, loop in product(DATA, WORKERS, LOOPS)
}
