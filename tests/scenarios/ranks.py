"""Two processes, forked, over gloo."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import RandomSampler
from torchmetrics import MeanMetric

from .parts import BATCH_SIZE, Items, Scenario, Stream, ValidatedModule, join, loader, scenario
from .samplers import SortedBatches


class Synchronised(ValidatedModule):
    """Logs values and metrics that are reduced over the processes."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.mean = MeanMetric()

    def note_loss(self, loss: Tensor, batch_size: int) -> None:
        super().note_loss(loss, batch_size)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("synchronised", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=batch_size)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.log("val_size", float(len(join(batch)[0])), sync_dist=True, reduce_fx="sum")


def _two(data: Any = None, **rest: Any) -> Scenario:
    """Two processes, six batches each in an epoch."""
    data = data or (lambda _: loader(Items(48), shuffle=True))
    return scenario(data, ddp=2, **rest)


SCENARIOS: dict[str, Scenario] = {
    "ddp": _two(),
    "ddp_workers": _two(lambda _: loader(Items(48), shuffle=True, num_workers=2)),
    "ddp_persistent": _two(lambda _: loader(Items(48), shuffle=True, num_workers=1, persistent_workers=True)),
    "ddp_uneven_last_batch": _two(lambda _: loader(Items(45), shuffle=True)),
    "ddp_accumulate": _two(trainer={"accumulate_grad_batches": 4}),
    "ddp_validate": _two(module_class=ValidatedModule, trainer={"val_check_interval": 4}),
    "ddp_synchronised_logging": _two(module_class=Synchronised),
    "ddp_stream": _two(lambda _: loader(Stream())),
    "ddp_batch_sampler_extra_argument": _two(
        lambda _: loader(Items(48), batch_sampler=SortedBatches(RandomSampler(Items(48)), BATCH_SIZE, True))
    ),
}
