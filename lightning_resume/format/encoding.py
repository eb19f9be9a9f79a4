"""From a state to the files of its checkpoint: skeletons, data and where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_resume.errors import UnsupportedStateError
from lightning_resume.format.blobs import Blob, BlobStore
from lightning_resume.format.codecs import is_plain_text
from lightning_resume.format.planned import PlannedFile, plan_group
from lightning_resume.format.plans import PlanCache
from lightning_resume.format.registry import find_encoder
from lightning_resume.format.runs import DifferentError
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
    groups = {layout.model_key: "model", layout.optimizer_key: "optimizer"}
    planned = {key: state[key] for key in groups if key in state}
    found = _encode_by_plan(state, planned, layout, plans) if plans is not None else None
    if found is not None:
        text, files = found
        texts = [PlannedFile.of("state.json", [text])]
    else:
        nodes, store = _encode_state(state, groups, "state", layout.model_key)
        data = {group: store.groups.pop(group) for group in groups.values() if group in store.groups}
        if layout.model_key in state:
            data.setdefault("model", [])  # also a model without tensors has a file
        of_planned = _plan(data, layout)
        files = of_planned + _plan(store.groups, layout)
        texts = [_text("state.json", state, nodes)]
        if plans is not None:
            blobs = [blob for group in data.values() for blob in group]
            plans.keep(layout, planned, {key: nodes[key] for key in planned}, blobs, of_planned)
    for rank, rank_state in enumerate(rank_states):
        group = f"rank-{rank:05d}"
        nodes, store = _encode_state(rank_state, {}, group, None)
        files += _plan(store.groups, layout)
        texts.append(_text(f"{group}.json", rank_state, nodes))
    return files + texts


def _encode_by_plan(
    state: Mapping[str, Any], planned: Mapping[str, Any], layout: Layout, plans: PlanCache
) -> tuple[bytes, list[PlannedFile]] | None:
    """The text of the skeleton and the files of a state, if there is a plan for what is planned of it."""
    _require_plain_keys(state)  # before the plan is given a state that it would keep
    found = plans.find(layout, planned, find_encoder)
    if found is None:
        return None
    plan, files = found
    rest = {key: value for key, value in state.items() if key not in planned}
    try:
        nodes, store = _encode_state(rest, {}, "state", None)
    except UnsupportedStateError:
        plan.empty()  # nothing will be copied
        raise
    nodes = {key: plan.nodes[key] if key in planned else nodes[key] for key in state}
    try:
        plan.note_beside(store)
        text = plan.text(nodes)
    except DifferentError:
        plans.reject()
        return None
    return text, files + _plan(store.groups, layout)


def _plan(groups: Mapping[str, Sequence[Blob]], layout: Layout) -> list[PlannedFile]:
    files: list[PlannedFile] = []
    for group, blobs in groups.items():
        files += plan_group(group, blobs, layout.max_shard_bytes, layout.frozen if group == "model" else ())
    return files


def _encode_state(
    state: Mapping[str, Any], groups: Mapping[str, str], default_group: str, model_key: str | None
) -> tuple[dict[str, Any], BlobStore]:
    """The skeleton of a state or of a rank's state, and the data that it refers to."""
    store = BlobStore(model_key)
    walk = EncodeWalk(find_encoder, store)
    nodes: dict[str, Any] = {}
    _require_plain_keys(state)
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


def _require_plain_keys(state: Mapping[str, Any]) -> None:
    for key in state:
        if type(key) is not str or not is_plain_text(key):
            raise UnsupportedStateError(str(key), "the top-level keys of a state are plain texts", "Rename it.")


def _text(file: str, state: Mapping[str, Any], nodes: Mapping[str, Any]) -> PlannedFile:
    try:
        return PlannedFile.of(file, [state_to_bytes(nodes)])
    except ValueError as error:
        raise UnsupportedStateError("", str(error), "Keep long lists as tensors or arrays.") from error
