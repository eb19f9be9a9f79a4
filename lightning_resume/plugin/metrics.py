"""Logged values: the running means of `self.log`, the metric dictionaries, and torchmetrics objects.

Lightning keeps these in memory alone; a resumed epoch's means would cover its second half only. Read and checked on
lightning 2.5 and 2.6 (`trainer/connectors/logger_connector/result.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

from lightning_resume.errors import MissingStateError, UnsupportedStateError

_META_FIELDS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
# Restored above all, or settings that the constructor makes.
_BOOKKEEPING = frozenset({"_update_count", "_computed", "_forward_cache", "training", "_device", "_dtype_convert"})
# All that `self.log` takes, by whether they are python's own.
_REDUCTIONS: dict[tuple[bool, str], Any] = {
    **{(True, function.__name__): function for function in (max, min, sum)},
    **{(False, function.__name__): function for function in (torch.max, torch.mean, torch.min, torch.sum)},
}
_DICTIONARIES = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def capture_metrics(trainer: Trainer) -> dict[str, Any]:
    """All logged values as they stand now, in plain containers and tensors."""
    connector = trainer._logger_connector
    return {
        "dictionaries": {name: dict(getattr(connector, name)) for name in _DICTIONARIES},
        "first_loop_iter": connector._first_loop_iter,
        "current_fx": connector._current_fx,
        "results": [_capture_result(key, metric) for key, metric in trainer.fit_loop.epoch_loop._results.items()],
        "objects": {name: _capture_object(metric) for name, metric in _objects(trainer.lightning_module)},
    }


def restore_metrics(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Puts back what `capture_metrics` returned.

    Raises:
        MissingStateError: the module has no torchmetrics object of a saved name.
    """
    connector = trainer._logger_connector
    restore_dictionaries(trainer, state)
    connector._first_loop_iter, connector._current_fx = state["first_loop_iter"], state["current_fx"]
    device = trainer.strategy.root_device
    objects = dict(_objects(trainer.lightning_module))
    for name, saved in state["objects"].items():
        if name not in objects:
            raise MissingStateError(f"torchmetrics object {name!r} of the module")
        _restore_object(objects[name], saved, device)
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for saved in state["results"]:
        results[saved["key"]] = _restore_result(trainer, results, saved, objects)


def restore_dictionaries(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Puts back `callback_metrics`, `logged_metrics` and the progress bar's values: monitors look there."""
    device = trainer.strategy.root_device
    for name in _DICTIONARIES:
        values = {key: _to(value, device) for key, value in state["dictionaries"][name].items()}
        setattr(trainer._logger_connector, name, values)


def _capture_result(key: str, metric: _ResultMetric) -> dict[str, Any]:
    meta = metric.meta
    if meta.sync.group is not None:
        raise UnsupportedStateError(f"logged value {meta.name}", "it is reduced over a process group of its own")
    saved = {
        "key": key,
        "meta": {name: getattr(meta, name) for name in _META_FIELDS},
        "reduce_fx": meta.reduce_fx.__name__,
        "is_builtin": meta.reduce_fx.__module__ == "builtins",
        "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": metric.is_tensor,
        "has_reset": metric.has_reset,
        "forward_cache": _detached(metric._forward_cache),
        "computed": _detached(metric._computed),
        "update_count": metric._update_count,
    }
    if metric.is_tensor:
        names = [name for name in ("value", "cumulated_batch_size") if hasattr(metric, name)]
        saved["tensors"] = {name: _detached(getattr(metric, name)) for name in names}
        # Made in the default dtype of the moment, which a precision plugin may have set.
        saved["defaults"] = {name: metric._defaults[name] for name in names}
    return saved


def _restore_result(
    trainer: Trainer, results: _ResultCollection, saved: Mapping[str, Any], objects: Mapping[str, Metric]
) -> _ResultMetric:
    meta = _Metadata(**saved["meta"], reduce_fx=_REDUCTIONS[saved["is_builtin"], saved["reduce_fx"]])
    meta.sync = _Sync(
        _should=saved["sync"]["should"],
        fn=trainer.strategy.reduce,
        _group=None,
        rank_zero_only=saved["sync"]["rank_zero_only"],
    )
    metric = _ResultMetric(meta, saved["is_tensor"])
    metric.to(trainer.strategy.root_device)
    metric.has_reset = saved["has_reset"]
    metric._forward_cache = _to(saved["forward_cache"], trainer.strategy.root_device)
    metric._computed = _to(saved["computed"], trainer.strategy.root_device)
    metric._update_count = saved["update_count"]
    for name, value in saved.get("tensors", {}).items():
        setattr(metric, name, _to(value, trainer.strategy.root_device))
        metric._defaults[name] = saved["defaults"][name]
    if not metric.is_tensor and (name := saved["meta"]["metric_attribute"]) in objects:
        metric.value = objects[name]
    return metric


def _objects(module: LightningModule) -> list[tuple[str, Metric]]:
    return [(name, child) for name, child in module.named_modules() if isinstance(child, Metric)]


def _capture_object(metric: Metric) -> dict[str, Any]:
    return {
        "states": {name: _copied(getattr(metric, name)) for name in metric._defaults},
        "update_count": metric._update_count,
        "computed": _detached(metric._computed),
        "forward_cache": _detached(metric._forward_cache),
        "others": {
            name: _copied(value) for name, value in vars(metric).items() if _is_other_state(metric, name, value)
        },
    }


def _is_other_state(metric: Metric, name: str, value: Any) -> bool:
    """Whether an attribute is state that a wrapper metric keeps for itself, like the least value of a MinMaxMetric."""
    if name in metric._defaults or name in _BOOKKEEPING:
        return False
    values = value if isinstance(value, list) else [value]
    return all(isinstance(v, torch.Tensor | int | float | str | None) for v in values)


def _restore_object(metric: Metric, saved: Mapping[str, Any], device: torch.device) -> None:
    for name, value in saved["states"].items():
        setattr(metric, name, [_to(v, device) for v in value] if isinstance(value, list) else _to(value, device))
    metric._update_count = saved["update_count"]
    metric._computed = _to(saved["computed"], device)
    metric._forward_cache = _to(saved["forward_cache"], device)
    for name, value in saved["others"].items():
        setattr(metric, name, [_to(v, device) for v in value] if isinstance(value, list) else _to(value, device))


def _copied(value: Any) -> Any:
    return [_detached(v) for v in value] if isinstance(value, list) else _detached(value)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
