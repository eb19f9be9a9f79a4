"""The typed JSON in ``state.json`` and ``rank-*.json``: its conventions, and what can be done with it without torch.

Plain JSON values stand for None, bool, int (64 bits), float (finite), str, list, and dict with str keys.
Everything else is an object with the key ``$``, whose value is a tag: ``{"$": "tuple", "v": [...]}``.
Such a node refers to the data of a tensor by ``f`` (the group of files) and ``n`` (the name in one of them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lightning_resume.format.strict_json import dump_json, parse_json

TAG = "$"
GROUP = "f"
NAME = "n"
TENSOR = "tensor"  # the tag of one; with nothing but group and name beside it, it is taken as it is read
NUM_PLAIN_FIELDS = 3
MAX_STATE_BYTES = 64 * 2**20
MAX_DEPTH = 100  # of the user's state; each level is up to three levels of JSON


class Reference(NamedTuple):
    """Where the data of a tensor is.

    Attributes:
        group: the group of files.
        name: the tensor's name in one of them.
    """

    group: str
    name: str


def state_to_bytes(state: Mapping[str, Any]) -> bytes:
    """Text of a state file.

    Args:
        state: top-level key → skeleton.

    Raises:
        ValueError: it would be larger than what may be read back.
    """
    data = dump_json({"state": [[key, value] for key, value in state.items()]})
    if len(data) > MAX_STATE_BYTES:
        raise ValueError(f"without its tensors it takes {len(data)} bytes of JSON, more than {MAX_STATE_BYTES}")
    return data


def state_from_bytes(data: bytes) -> dict[Any, Any]:
    """Top-level key → skeleton, from the text of a state file.

    Raises:
        ValueError: it is no such text.
    """
    document = parse_json(data)
    if type(document) is not dict or document.keys() != {"state"} or type(document["state"]) is not list:
        raise ValueError("no state in it")
    state: dict[Any, Any] = {}
    for pair in document["state"]:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or pair[0] in state:
            raise ValueError("a malformed or doubled top-level key")
        state[pair[0]] = pair[1]
    return state


def references(skeleton: Any) -> Iterator[Reference]:
    """All data that a skeleton refers to."""
    pending = [skeleton]
    while pending:
        node = pending.pop()
        if type(node) is list:
            pending.extend(node)
        elif type(node) is dict:
            if TAG in node and NAME in node:
                yield Reference(str(node.get(GROUP)), str(node[NAME]))
            pending.extend(node.values())
