"""The order that all ranks together follow: what it is for one process, and whether another number can go on in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler


def order_of(loader: DataLoader[Any]) -> Any:
    """The loader's sampler or batch sampler; for a default shuffle one with the order that several ranks would have."""
    sampler: Any = loader.batch_sampler if loader._auto_collation else loader.sampler
    shuffle = innermost(sampler)
    if not _is_default_shuffle(shuffle):
        return sampler
    order: DistributedSampler[Any] = DistributedSampler(shuffle.data_source, num_replicas=1, rank=0)
    return order if shuffle is sampler else BatchSampler(order, sampler.batch_size, sampler.drop_last)


def order_seed_of(loader: DataLoader[Any], seed: int) -> int:
    """The seed of the loader's own DistributedSampler; the run's where there is none."""
    sampler = innermost(loader.batch_sampler if loader._auto_collation else loader.sampler)
    return sampler.seed if isinstance(sampler, DistributedSampler) else seed


def global_order(loader: DataLoader[Any], rank: int, world_size: int) -> dict[str, Any] | None:
    """What has to be equal for another number of ranks to go on in the same global order; None if none can.

    Ranks of a `DistributedSampler` take turns in the order that one process has for itself.
    """
    sampler: Any = loader.batch_sampler
    if type(sampler) is not BatchSampler:
        return None
    inner: Any = sampler.sampler
    if type(inner) is DistributedSampler:
        is_shuffled = inner.shuffle
        is_dealt = (inner.num_replicas, inner.rank) == (world_size, rank)
    else:
        is_shuffled = _is_default_shuffle(inner)
        is_dealt = world_size == 1 and (is_shuffled or type(inner) is SequentialSampler)
    if not is_dealt:
        return None
    order = {
        "global batch size": sampler.batch_size * world_size,
        "batches in an epoch": len(sampler),
        "shuffle": is_shuffled,
        "drop_last": sampler.drop_last,
    }
    if sampler.drop_last:
        return order
    # The last batch of an epoch has more items, some of them twice, where the ranks had to be made equally long.
    return order | {"items in an epoch": inner.total_size if type(inner) is DistributedSampler else len(inner)}


def _is_default_shuffle(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.generator is None
        and sampler.num_samples == len(sampler.data_source)
    )


def innermost(sampler: Any) -> Any:
    """The sampler that says the order: a plain batch sampler only cuts it."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def global_identity(identity: Mapping[str, Any], loader: Any, world_size: int) -> dict[str, Any]:
    """A loader's identity as all ranks together have it, so that it is the same for any number of them.

    Args:
        identity: what `loader_identity` said.
        loader: the loader.
        world_size: number of processes.
    """
    same = dict(identity)
    if isinstance(same["batch_size"], int):
        same["batch_size"] *= world_size
    sampler = innermost(getattr(loader, "batch_sampler", None))
    if type(sampler) is DistributedSampler or _is_default_shuffle(sampler):
        # The seed is part of the loader's state.
        is_shuffled = getattr(sampler, "shuffle", True)
        same["sampler"] = (RandomSampler if is_shuffled else SequentialSampler).__qualname__
        same["sampler settings"] = None
    return same
