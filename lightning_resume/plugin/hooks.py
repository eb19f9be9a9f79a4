"""Where this package is called from inside Lightning's loops, and where Lightning need not call it.

Checked on lightning 2.6.6. Attributes of the loop objects of one trainer stand in for their methods while it fits; no
class is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher


def install_hooks(
    trainer: Trainer,
    before_epoch: Callable[[], None],
    is_quiet: Callable[[], bool],
    before_batch: Callable[[], None],
    before_epoch_end: Callable[[], None],
    before_run: Callable[[], None],
    after_run: Callable[[], None],
) -> None:
    """Calls `before_epoch` before an epoch, `before_batch` at each cut, `before_epoch_end` after the last batch.

    A cut at which `is_quiet` says so is passed: it is asked at every step, when little is in the processor's cache.
    `before_run` is called before data is set up, `after_run` when training has ended by itself, after everybody's
    `on_train_end`.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop

    def on_advance_start() -> None:
        before_epoch()
        type(fit_loop).on_advance_start(fit_loop)

    def advance(data_fetcher: _DataFetcher) -> None:
        if not is_quiet():
            before_batch()
        type(epoch_loop).advance(epoch_loop, data_fetcher)

    def on_advance_end() -> None:
        before_epoch_end()
        type(fit_loop).on_advance_end(fit_loop)

    def run() -> None:
        before_run()
        type(fit_loop).run(fit_loop)

    def on_run_end() -> None:
        type(fit_loop).on_run_end(fit_loop)
        after_run()

    fit_loop.run = run  # type: ignore[method-assign]
    fit_loop.on_run_end = on_run_end  # type: ignore[method-assign]
    fit_loop.on_advance_start = on_advance_start  # type: ignore[method-assign]
    fit_loop.on_advance_end = on_advance_end  # type: ignore[method-assign]
    epoch_loop.advance = advance  # type: ignore[method-assign]


def remove_hooks(trainer: Trainer) -> None:
    """Undoes `install_hooks` and `take_over_sigterm`."""
    for name in ("run", "on_advance_start", "on_advance_end", "on_run_end"):
        trainer.fit_loop.__dict__.pop(name, None)
    for name in ("advance", "_broadcast_sigterm_tensor"):
        trainer.fit_loop.epoch_loop.__dict__.pop(name, None)


def take_over_sigterm(trainer: Trainer) -> None:
    """Spares several ranks the broadcast with which Lightning asks rank 0 for SIGTERM before each batch.

    The caller has to ask all of them instead: a broadcast from rank 0 does not see what another rank was sent.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


def pass_over_hooks(callback: Callback, empty: Collection[object]) -> None:
    """Lets Lightning pass over those hooks of a step in which a callback does nothing; asking it takes 4 µs for each.

    Lightning looks each hook up by name and calls what can be called. What the user has put on the object stays.

    Args:
        callback: whose.
        empty: functions that do nothing for now, besides Lightning's own.
    """
    heed_hooks(callback)
    for name in _STEP_HOOKS:
        if name in callback.__dict__:
            continue
        hook = getattr(type(callback), name)
        if hook is getattr(Callback, name) or hook in empty:
            callback.__dict__[name] = None


def heed_hooks(callback: Callback) -> None:
    """Undoes `pass_over_hooks`."""
    for name in _STEP_HOOKS:
        if callback.__dict__.get(name, callback) is None:
            del callback.__dict__[name]
