"""From a state to the files of its checkpoint: skeletons, data and where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_resume.errors import UnsupportedStateError
from lightning_resume.format.blobs import BlobStore
from lightning_resume.format.codecs import is_plain_text
from lightning_resume.format.planned import PlannedFile, plan_group
from lightning_resume.format.plans import PlanCache
from lightning_resume.format.registry import find_encoder
from lightning_resume.format.skeleton import state_to_bytes
from lightning_resume.format.tree import EncodeWalk

RANK_STATE_KEY = "rank_state"


class Layout(NamedTuple):
    """Which data goes to which files.

    Attributes:
        model_key: top-level key of what goes to the model's files.
        optimizer_key: top-level key of what goes to the optimizer's files.
        max_shard_bytes: data bytes of a file with more than one tensor.
        frozen: names of the model's tensors that get files of their own.
    """

    model_key: str
    optimizer_key: str
    max_shard_bytes: int
    frozen: frozenset[str]


def encode_files(
    state: Mapping[str, Any], rank_states: Sequence[Mapping[str, Any]], layout: Layout, plans: PlanCache | None = None
) -> list[PlannedFile]:
    """Encodes a state and plans its files.

    Args:
        state: str keys → nested values.
        rank_states: what belongs to each rank, in order of rank.
        layout: which data goes to which files.
        plans: where the plan of the last state is, and this one's goes.

    Raises:
        UnsupportedStateError: a value has no exact encoding.
    """
    if rank_states and RANK_STATE_KEY in state:
        raise UnsupportedStateError(RANK_STATE_KEY, "the key is where a rank's own state will be", "Rename it.")
    found = plans.find(layout, state, find_encoder) if plans is not None else None
    if found is not None:
        text, files = found
        texts = [PlannedFile.of("state.json", [text])]
    else:
        groups = {layout.model_key: "model", layout.optimizer_key: "optimizer"}
        nodes, store = _encode_state(state, groups, "state", layout.model_key)
        files = _plan(store, layout)
        if layout.model_key in state and "model" not in store.groups:
            files += plan_group("model", [], layout.max_shard_bytes)
        texts = [_text("state.json", state, nodes)]
        if plans is not None:
            plans.keep(layout, state, nodes, store, files)
    for rank, rank_state in enumerate(rank_states):
        group = f"rank-{rank:05d}"
        nodes, store = _encode_state(rank_state, {}, group, None)
        files += _plan(store, layout)
        texts.append(_text(f"{group}.json", rank_state, nodes))
    return files + texts


def _plan(store: BlobStore, layout: Layout) -> list[PlannedFile]:
    files: list[PlannedFile] = []
    for group, blobs in store.groups.items():
        files += plan_group(group, blobs, layout.max_shard_bytes, layout.frozen if group == "model" else ())
    return files


def _encode_state(
    state: Mapping[str, Any], groups: Mapping[str, str], default_group: str, model_key: str | None
) -> tuple[dict[str, Any], BlobStore]:
    """The skeleton of a state or of a rank's state, and the data that it refers to."""
    store = BlobStore(model_key)
    walk = EncodeWalk(find_encoder, store)
    nodes: dict[str, Any] = {}
    for key in state:
        if type(key) is not str or not is_plain_text(key):
            raise UnsupportedStateError(str(key), "the top-level keys of a state are plain texts", "Rename it.")
    # Model and optimizer first: data that they share with the rest is to stand in their files.
    order = [key for key in groups if key in state] + [key for key in state if key not in groups]
    for key in order:
        walk.group = groups.get(key, default_group)
        try:
            nodes[key] = walk.child(key, state[key])
        except RecursionError as error:
            raise UnsupportedStateError(key, "it is nested too deeply") from error
    store.assign_names()
    return {key: nodes[key] for key in state}, store


def _text(file: str, state: Mapping[str, Any], nodes: Mapping[str, Any]) -> PlannedFile:
    try:
        return PlannedFile.of(file, [state_to_bytes(nodes)])
    except ValueError as error:
        raise UnsupportedStateError("", str(error), "Keep long lists as tensors or arrays.") from error
