"""What copies from a GPU to the host need: memory that cannot be paged out, and a stream beside the training's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lightning_resume.format.blobs import Blob


def cuda_devices(parts: Iterable[object]) -> set[torch.device]:
    """The GPUs that tensors among the parts of files are on."""
    if not _cuda().is_initialized():  # cheap, and no tensor is on one
        return set()
    owners = (part.owner for part in parts if isinstance(part, Blob))
    return {owner.device for owner in owners if isinstance(owner, torch.Tensor) and owner.is_cuda}


@contextlib.contextmanager
def beside_training(devices: Iterable[torch.device]) -> Iterator[None]:
    """Copies that are queued in here see all that was queued before, and are done when this is left."""
    with contextlib.ExitStack() as stack:
        for device in devices:
            stream = _cuda().Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            stack.callback(stream.synchronize)
            stack.enter_context(torch.cuda.stream(stream))
        yield


def finish_training(devices: Iterable[torch.device]) -> None:
    """Waits for all that was queued: other threads, whose streams are others, read the tensors next."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def pin(memory: torch.Tensor) -> Callable[[], None] | None:
    """Keeps host memory where it is, so that a GPU copies to it at full speed and without waiting.

    Args:
        memory: uint8, 1-D.

    Returns:
        What undoes it, to be called before the memory goes; None: the driver refused, and copies are slower.
    """
    runtime = _cuda().cudart()
    place = memory.data_ptr()
    if int(runtime.cudaHostRegister(place, memory.numel(), 0)) != 0:
        return None
    return lambda: runtime.cudaHostUnregister(place)


def _cuda() -> Any:
    return torch.cuda  # whose functions have no types
