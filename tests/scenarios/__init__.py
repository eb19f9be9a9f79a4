"""Scenarios of exact resume: jobs that are killed and have to come back as if nothing had happened."""

from __future__ import annotations

from . import grid
from .parts import Scenario

TOPICS = (grid,)

SCENARIOS: dict[str, Scenario] = {name: entry for topic in TOPICS for name, entry in topic.SCENARIOS.items()}
