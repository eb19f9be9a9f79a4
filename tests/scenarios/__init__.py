"""Scenarios of exact resume: jobs that are killed and have to come back as if nothing had happened."""

from __future__ import annotations

from . import averaging_and_metrics, evolving, grid, loaders, loop, optimizers, ranks, samplers
from .parts import Scenario

TOPICS = (grid, loaders, samplers, evolving, loop, optimizers, averaging_and_metrics, ranks)

SCENARIOS: dict[str, Scenario] = {name: entry for topic in TOPICS for name, entry in topic.SCENARIOS.items()}

if len(SCENARIOS) != sum(len(topic.SCENARIOS) for topic in TOPICS):
    raise ValueError("two scenarios have the same name")
