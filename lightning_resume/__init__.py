"""Exact, crash-safe resume for PyTorch Lightning.

Names are loaded on first use, so importing the package imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_resume.catalog import CheckpointInfo, scan_checkpoints
    from lightning_resume.data.loader import ResumableLoader
    from lightning_resume.data.sampler import FastForwardSampler
    from lightning_resume.errors import (
        BackgroundSaveError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        CheckpointReadError,
        CheckpointWriteError,
        CorruptCheckpointError,
        DataChangedError,
        FolderLockedError,
        IncompleteCheckpointError,
        MissingStateError,
        ModelMismatchError,
        NoGoodCheckpointError,
        ResumeError,
        SchemaError,
        StateMismatchError,
        UnsafePathError,
        UnsupportedSetupError,
        UnsupportedStateError,
        WeightsOnlyError,
        WorldSizeError,
    )
    from lightning_resume.format.checkpoint import read_checkpoint, write_checkpoint
    from lightning_resume.format.index import CheckpointIndex
    from lightning_resume.format.migrate import migrate_checkpoint
    from lightning_resume.format.registry import register_type
    from lightning_resume.format.verify import verify_checkpoint
    from lightning_resume.plugin.callback import AtomicResumeCallback
    from lightning_resume.plugin.checkpoint_io import AtomicCheckpointIO
    from lightning_resume.plugin.module_loading import load_module
    from lightning_resume.rng import RNGState

__all__ = [
    "AtomicCheckpointIO",
    "AtomicResumeCallback",
    "BackgroundSaveError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointIndex",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CheckpointReadError",
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "DataChangedError",
    "FastForwardSampler",
    "FolderLockedError",
    "IncompleteCheckpointError",
    "MissingStateError",
    "ModelMismatchError",
    "NoGoodCheckpointError",
    "RNGState",
    "ResumableLoader",
    "ResumeError",
    "SchemaError",
    "StateMismatchError",
    "UnsafePathError",
    "UnsupportedSetupError",
    "UnsupportedStateError",
    "WeightsOnlyError",
    "WorldSizeError",
    "load_module",
    "migrate_checkpoint",
    "read_checkpoint",
    "register_type",
    "scan_checkpoints",
    "verify_checkpoint",
    "write_checkpoint",
]

_MODULES = {
    "AtomicCheckpointIO": "plugin.checkpoint_io",
    "AtomicResumeCallback": "plugin.callback",
    "CheckpointIndex": "format.index",
    "CheckpointInfo": "catalog",
    "FastForwardSampler": "data.sampler",
    "RNGState": "rng",
    "ResumableLoader": "data.loader",
    "load_module": "plugin.module_loading",
    "migrate_checkpoint": "format.migrate",
    "read_checkpoint": "format.checkpoint",
    "register_type": "format.registry",
    "scan_checkpoints": "catalog",
    "verify_checkpoint": "format.verify",
    "write_checkpoint": "format.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
