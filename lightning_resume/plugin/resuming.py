"""From a checkpoint that was read to the first batch that is trained: what is checked, kept and put back, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_resume.errors import MissingStateError
from lightning_resume.plugin import checks, loops, module_state, positional
from lightning_resume.plugin.arguments import Settings
from lightning_resume.plugin.averaging import check_places
from lightning_resume.plugin.circumstances import compare_circumstances, listed, weights_in_callbacks
from lightning_resume.plugin.identity import has_other_accumulation
from lightning_resume.plugin.optimizers import match_optimizers
from lightning_resume.plugin.rank_state import check_rank_state, check_run, enter_first_batch
from lightning_resume.plugin.shape import check_shape
from lightning_resume.plugin.top_k import restore_top_k


def check_checkpoint(
    trainer: Trainer, path: str, checkpoint: Mapping[str, Any], settings: Settings, allow: tuple[str, ...]
) -> None:
    """Refuses, before Lightning restores anything, what cannot be gone on from.

    Raises:
        ResumeError: the subclass says why.
    """
    checks.check_full(path, checkpoint)
    check_shape(path, checkpoint, trainer.global_rank)
    checks.check_model(trainer, checkpoint)
    if "rank_state" not in checkpoint:
        raise MissingStateError(
            f"state of AtomicResumeCallback in {path!r}", "Resume from a checkpoint that was saved with it."
        )
    check_rank_state(checkpoint["rank_state"], allow)
    check_places(trainer, checkpoint["rank_state"]["averaging"])
    positional.check_item_rng(checkpoint, settings.item_rng, trainer.world_size)


def keep_state(trainer: Trainer, checkpoint: dict[str, Any], configured: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be put back later than Lightning does, when the loop stands where the save was."""
    return {
        **positional.for_rank(checkpoint, trainer.global_rank),
        "checkpoint": checkpoint,
        "callbacks": checkpoint["callbacks"],
        "optimizer_states": checkpoint["optimizer_states"],
        "world_size": checkpoint["world_size"],
        "has_other_accumulation": has_other_accumulation(checkpoint["rank_state"], configured),
        "between_epochs": loops.is_between_epochs(checkpoint["loops"]),
        "copies": weights_in_callbacks(checkpoint),
        "state_dict": checkpoint.get("current_model_state", checkpoint["state_dict"]),
    }


def restore_early(trainer: Trainer, state: dict[str, Any], optimizers: Mapping[str, Any]) -> None:
    """When fit starts: the module has its precision, and there are optimizers, whose state is not restored yet."""
    state["matched"] = match_optimizers(state["optimizers"], optimizers, state["optimizer_states"])
    loops.reinstate(trainer, state.pop("checkpoint"))
    module_state.restore_double(trainer, state.pop("state_dict"))
    trainer.should_stop = state["extras"]["should_stop"]


def enter(
    trainer: Trainer,
    state: dict[str, Any],
    path: str,
    settings: Settings,
    allow: tuple[str, ...],
    configured: dict[str, Any],
    beginning: dict[str, Any],
) -> None:
    """At the first cut: puts back the rest, and says in one line what was resumed, and how exactly.

    Args:
        trainer: at the first cut.
        state: from `keep_state`.
        path: of the checkpoint.
        settings: of the callback.
        allow: accepted differences.
        configured: settings of this Trainer.
        beginning: circumstances of this process.

    Raises:
        ResumeError: the run is another one; nothing was trained.
    """
    differences = state["matched"] + check_run(trainer, state, configured, settings.data_version, allow)
    if state["moment"] == "hook":
        differences.append("the checkpoint was saved inside a step, not by AtomicResumeCallback")
    else:
        loops.stop_restarting(trainer)
    differences += enter_first_batch(trainer, state, between_epochs=state["between_epochs"], allow=allow)
    others, notes = compare_circumstances(trainer, state.get("circumstances"), beginning)
    lost, restored = restore_top_k(trainer, state["callbacks"])
    others, notes = [*others, *lost], [*notes, *restored]
    if state["copies"]:
        notes.append(f"copies now, which were the model's own tensors at the save: {listed(state['copies'])}")
    verdict = positional.verdict(differences + others, state["world_size"], trainer.world_size, notes)
    rank_zero_info(
        f"Resumed from {path!r}: epoch {trainer.current_epoch}, batch {loops.batch_in_epoch(trainer)}, "
        f"global_step {trainer.global_step}: {verdict}"
    )
