"""What a checkpoint has to look like before Lightning may restore from it: a table of keys and types.

Lightning restores part by part and stops with a bare KeyError in the middle where one is missing; other gaps it passes
over without a word. A sound checkpoint has no gaps: this is for those that somebody has edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from lightning_resume.errors import CorruptCheckpointError, MissingStateError


class Each(NamedTuple):
    """A list (or a dict) of any length, each of whose items (or values) fits."""

    spec: Any
    kind: type = list


class Fault(NamedTuple):
    """The first place that does not fit; `found` is None where it is not there."""

    key_path: str
    expected: str
    found: str | None


COUNT = range(2**63)
ANY = object
NONE = type(None)

# A type or several, a range of ints, a set of texts, `Each`, or a dict of keys; one that ends in "?" may be absent.
_READY = {"ready": COUNT, "completed": COUNT}
_STARTED = {**_READY, "started": COUNT}
_PROCESSED = {**_STARTED, "processed": COUNT}
_BATCHES = {"total": _PROCESSED, "current": _PROCESSED, "is_last_batch": bool}
_STEPS = {"total": _READY, "current": _READY}
_FIT_LOOP = {
    "state_dict": dict,
    "epoch_progress": {"total": _PROCESSED, "current": _PROCESSED},
    "epoch_loop.state_dict": {"_batches_that_stepped": COUNT},
    "epoch_loop.batch_progress": _BATCHES,
    "epoch_loop.scheduler_progress": _STEPS,
    "epoch_loop.automatic_optimization.optim_progress": {
        "optimizer": {"step": _STEPS, "zero_grad": {"total": _STARTED, "current": _STARTED}}
    },
    "epoch_loop.manual_optimization.optim_step_progress": _STEPS,
    "epoch_loop.val_loop.batch_progress": _BATCHES,
}
_HISTORY = {"steps": Tensor, "losses": Tensor, "last_step": int}
WEIGHTS = {"state_dict": Each(ANY, dict), "frozen_parameters?": Each(str, dict)}
LIGHTNING = {
    "pytorch-lightning_version": str,
    "epoch": COUNT,
    "global_step": COUNT,
    **WEIGHTS,
    "current_model_state?": Each(ANY, dict),
    "loops": {"fit_loop": _FIT_LOOP},
    "callbacks": {"AtomicResumeCallback?": {"history": _HISTORY}},
    "optimizer_states": list,
    "lr_schedulers": list,
    "world_size?": range(1, 2**31),
}
_RESULT = {
    "key": str,
    "meta": {"name": str, "metric_attribute": (str, NONE)},
    "reduce_fx": {"max", "mean", "min", "sum"},
    "is_builtin": bool,
    "sync": {"should": bool, "rank_zero_only": bool},
    "is_tensor": bool,
    "has_reset": bool,
    "forward_cache": ANY,
    "computed": ANY,
    "update_count": COUNT,
    "tensors?": Each(Tensor, dict),
    "defaults?": Each(ANY, dict),
}
_METRIC = {"states": Each(ANY, dict), "update_count": COUNT, "computed": ANY, "forward_cache": ANY}
_METRIC["others"] = Each(ANY, dict)
# Whole parts that are missing are `check_rank_state`'s affair, as are missing random streams.
RANK = {
    "moment?": {"cut", "end", "hook"},
    "batch_in_epoch?": COUNT,
    "identity?": {"data_version": (str, NONE), "loaders": Each(dict)},
    "seeds?": {"PL_GLOBAL_SEED?": str, "PL_SEED_WORKERS?": str},
    "item_rng?": {"kind": str, "seed": (int, NONE)},
    "rng?": {
        "python?": {"version": int, "words": Tensor, "gauss_next": (float, NONE)},
        "numpy?": Each(ANY, dict),
        "torch?": Tensor,
        "cuda?": Each(Tensor),
    },
    "generators?": Each(ANY, dict),
    "loaders?": Each({"kind": str, "is_iterating": bool}),
    "val_loaders?": Each({"kind": str, "is_iterating": bool}),
    "averaging?": Each(COUNT),
    "combined?": {"index": int, "consumed": (list, NONE)},
    "optimizers?": {
        "optimizers": Each({"class": str, "groups": Each(Each((str, NONE)))}),
        "schedulers": Each(str),
    },
    "extras?": {
        "accumulate_grad_batches": COUNT,
        "batches_that_stepped": COUNT,
        "ddp_syncs_buffers": (bool, NONE),
        "should_stop": bool,
        "last_train_dl_reload_epoch": (int, float),
        "last_val_dl_reload_epoch": (int, float),
        "seen_val_batches": dict,
        "has_val_loaders": bool,
    },
    "module?": {
        "eval": Each(str),
        "frozen": Each(str),
        "buffers": Each(Tensor, dict),
        "gradients": Each(Tensor, dict),
    },
    "metrics?": {
        "dictionaries": {"_callback_metrics": dict, "_logged_metrics": dict, "_progress_bar_metrics": dict},
        "first_loop_iter": (bool, NONE),
        "current_fx": (str, NONE),
        "results": Each(_RESULT),
        "objects": Each(_METRIC, dict),
    },
}


def check_weights(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Refuses a checkpoint from which not even weights can be loaded.

    Args:
        path: of the checkpoint, for messages.
        checkpoint: as it was read.

    Raises:
        MissingStateError: there are no weights.
        CorruptCheckpointError: they are of another type.
    """
    _refuse(path, 0, _first_fault(checkpoint, WEIGHTS, ""))


def check_shape(path: str, checkpoint: Mapping[str, Any], rank: int) -> None:
    """Refuses a checkpoint in which a part is missing, or of another type, or contradicts another.

    Args:
        path: of the checkpoint, for messages.
        checkpoint: all of it, with the state of a rank if there is one.
        rank: of this process.

    Raises:
        MissingStateError: a part is missing; names its key path.
        CorruptCheckpointError: a part is of another type, or contradicts another one; names its key path.
    """
    _refuse(path, rank, _first_fault(checkpoint, LIGHTNING, ""))
    rank = min(rank, checkpoint.get("world_size", 1) - 1)  # further ranks start from the state of the last one
    if "rank_state" in checkpoint:
        _refuse(path, rank, _first_fault(checkpoint["rank_state"], RANK, "rank_state"))
        parts = {**LIGHTNING, "world_size": COUNT, "callbacks": {"AtomicResumeCallback": dict}}
        _refuse(path, rank, _first_fault(checkpoint, parts, ""))
    for fault in (_version_fault(checkpoint), _history_fault(checkpoint), *_contradictions(checkpoint)):
        _refuse(path, rank, fault)


def _refuse(path: str, rank: int, fault: Fault | None) -> None:
    if fault is None:
        return
    if fault.found is None:
        raise MissingStateError(repr(fault.key_path), "Resume from another checkpoint: this one has been edited.")
    file = f"rank-{rank:05d}.json" if fault.key_path.startswith("rank_state") else "state.json"
    raise CorruptCheckpointError(path, file, f"{fault.expected} for {fault.key_path!r}", fault.found)


def _first_fault(value: Any, spec: Any, key_path: str) -> Fault | None:
    if isinstance(spec, dict):
        return _first_fault_of_dict(value, spec, key_path)
    if isinstance(spec, Each):
        if not issubclass(type(value), spec.kind):
            return Fault(key_path, f"a {spec.kind.__name__}", _type_of(value))
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        faults = (_first_fault(item, spec.spec, f"{key_path}.{key}") for key, item in items)
        return next((fault for fault in faults if fault is not None), None)
    if isinstance(spec, range):
        if type(value) is int and value in spec:
            return None
        return Fault(key_path, f"an int from {spec.start}", repr(value) if type(value) is int else _type_of(value))
    if isinstance(spec, set):
        is_known = type(value) is str and value in spec
        found = repr(value) if type(value) is str else _type_of(value)
        return None if is_known else Fault(key_path, f"one of {', '.join(sorted(spec))}", found)
    kinds = spec if isinstance(spec, tuple) else (spec,)
    if isinstance(value, kinds) and not (type(value) is bool and int in kinds and bool not in kinds):
        return None
    return Fault(key_path, " or ".join("None" if kind is NONE else kind.__name__ for kind in kinds), _type_of(value))


def _first_fault_of_dict(value: Any, spec: Mapping[str, Any], key_path: str) -> Fault | None:
    if not isinstance(value, dict):
        return Fault(key_path, "a dict", _type_of(value))
    for name, inner in spec.items():
        key = name.removesuffix("?")
        below = f"{key_path}.{key}" if key_path else key
        if key in value:
            fault = _first_fault(value[key], inner, below)
        else:
            fault = Fault(below, "", None) if key == name else None
        if fault is not None:
            return fault
    return None


def _type_of(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _version_fault(checkpoint: Mapping[str, Any]) -> Fault | None:
    """Lightning rewrites what an older version has saved: no such version can have written this checkpoint."""
    text = checkpoint["pytorch-lightning_version"]
    try:
        is_known = Version(text) >= Version("2.0")
    except InvalidVersion:
        is_known = False
    return None if is_known else Fault("pytorch-lightning_version", "2.0 or newer", repr(text))


def _history_fault(checkpoint: Mapping[str, Any]) -> Fault | None:
    history = checkpoint["callbacks"].get("AtomicResumeCallback", {}).get("history")
    if history is None:
        return None
    found = [(tensor.dtype, tensor.dim()) for tensor in (history["steps"], history["losses"])]
    is_sound = found == [(torch.int64, 1), (torch.float64, 1)] and len(history["steps"]) == len(history["losses"])
    expected = "as many int64 steps as float64 losses"
    return None if is_sound else Fault("callbacks.AtomicResumeCallback.history", expected, str(found))


def _contradictions(checkpoint: Mapping[str, Any]) -> list[Fault | None]:
    """What the state of the rank says about the rest, compared with it."""
    rank_state = checkpoint.get("rank_state", {})
    described = rank_state.get("optimizers", {"optimizers": [], "schedulers": []})
    states, schedulers = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    faults: list[Fault | None] = []
    if "optimizers" in rank_state and len(states) != len(described["optimizers"]):
        faults.append(Fault("optimizer_states", f"{len(described['optimizers'])} states", f"{len(states)}"))
    if len(schedulers) < len(described["schedulers"]):  # a callback may have added some
        faults.append(Fault("lr_schedulers", f"{len(described['schedulers'])} states", f"{len(schedulers)}"))
    for number, (saved, state) in enumerate(zip(described["optimizers"], states, strict=False)):
        if saved["class"] in vars(torch.optim):  # others may have a state dict of their own kind
            faults += _optimizer_faults(state, saved["groups"], f"optimizer_states.{number}")
    for number, (name, state) in enumerate(zip(described["schedulers"], schedulers, strict=False)):
        if name in vars(torch.optim.lr_scheduler):
            faults.append(_first_fault(state, dict, f"lr_schedulers.{number}"))
    seed = rank_state.get("item_rng", {"kind": "stock"})
    if seed["kind"] == "positional" and seed["seed"] is None:
        faults.append(Fault("rank_state.item_rng.seed", "int", "None"))
    return faults


def _optimizer_faults(state: Any, groups: list[list[str]], key_path: str) -> list[Fault | None]:
    spec = {"state": Each(ANY, dict), "param_groups": Each({"params": Each(int)})}
    if (fault := _first_fault(state, spec, key_path)) is not None:
        return [fault]
    sizes = [[len(group["params"]) for group in state["param_groups"]], [len(names) for names in groups]]
    if sizes[0] != sizes[1]:
        return [Fault(f"{key_path}.param_groups", f"groups of {sizes[1]} parameters", f"of {sizes[0]}")]
    return []
