"""Plain attributes that change while a run goes on: an epoch counter in a sampler, a difficulty in a data set.

A new process builds its samplers and data sets anew, as they were when the first one started. What has changed in
them since is part of the run. Numbers, texts and flags that stand in an object's attributes are looked at; everything
else is the business of `state_dict`, or of generators, which are found on their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLAIN = (bool, int, float, str, type(None))


class EvolvingAttributes:
    """Watches the plain attributes of a few objects.

    Args:
        owners: name -> object, as it is in a process that has just built it.
    """

    def __init__(self, owners: Mapping[str, object]) -> None:
        self._owners = dict(owners)
        self._before = self._values()

    def _values(self) -> dict[str, dict[str, Any]]:
        return {name: _plain_attributes(owner) for name, owner in self._owners.items()}

    def changed(self) -> dict[str, dict[str, Any]]:
        """Those that differ from what they were: owner -> attribute -> value."""
        changed: dict[str, dict[str, Any]] = {}
        for name, attributes in self._values().items():
            before = self._before[name]
            new = {key: value for key, value in attributes.items() if key not in before or not _same(value, before[key])}
            if new:
                changed[name] = new
        return changed

    def restore(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets what `changed` returned in another process."""
        for name, attributes in changed.items():
            if name in self._owners:
                vars(self._owners[name]).update(attributes)


def _plain_attributes(owner: object) -> dict[str, Any]:
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict):
        return {}
    return {key: value for key, value in attributes.items() if type(value) in _PLAIN}


def _same(left: object, right: object) -> bool:
    return type(left) is type(right) and (left == right or left != left)
