"""Checkpoints that somebody has edited, digests redone: refused by key path before Lightning restores a thing."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import NotedToy, loader, make_trainer, plugin, refused, val_loader
from toy import step_dir

from lightning_resume import (
    CorruptCheckpointError,
    MissingStateError,
    ResumeError,
    StateMismatchError,
    WeightsOnlyError,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from lightning_resume.plugin.shape import LIGHTNING, RANK, Each, check_shape


class Scheduled(NotedToy):
    """Two optimizer settings, a scheduler, logged values: a checkpoint in which no list is empty."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss.detach(), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", batch.sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint in mid-epoch."""
    folder = tmp_path_factory.mktemp("saved")
    make_trainer(folder, plugin(folder), max_epochs=1).fit(Scheduled(), loader(), val_loader())
    return step_dir(folder, 4)


@pytest.fixture
def forge(saved: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """Writes the checkpoint anew after a change."""

    def run(change: Callable[[dict[str, Any]], object]) -> Path:
        state = read_checkpoint(saved, rank=0)
        change(state)
        ranks = [state.pop("rank_state")]
        write_checkpoint(tmp_path / "forged", state, rank_states=ranks, counters=verify_checkpoint(saved).counters)
        return tmp_path / "forged"

    return run


def put(state: Any, key_path: tuple[Any, ...], value: Any) -> None:
    """Changes one place; `...` takes it away."""
    for key in key_path[:-1]:
        state = state[key]
    if value is ...:
        del state[key_path[-1]]
    else:
        state[key_path[-1]] = value


def test_the_checkpoint_that_is_forged_is_sound(saved: Path) -> None:
    """As it was saved nothing is refused, and none of the lists that are looked into is empty."""
    state = read_checkpoint(saved, rank=0)

    check_shape(str(saved), state, 0)

    assert len(state["lr_schedulers"]) == len(state["rank_state"]["optimizers"]["schedulers"]) == 1
    assert state["rank_state"]["metrics"]["results"]


TOP = ["epoch", "global_step", "state_dict", "loops", "callbacks", "lr_schedulers", "pytorch-lightning_version"]


@pytest.mark.parametrize("key", [*TOP, "world_size"])
def test_a_missing_part_of_lightnings_is_refused(key: str, forge: Any, tmp_path: Path) -> None:
    """Lightning would stop with a KeyError half-way, or go on without it."""
    path = forge(lambda state: put(state, (key,), ...))

    error = refused(Scheduled(), path, tmp_path, MissingStateError)

    assert error.field == repr(key)


def test_a_checkpoint_without_optimizers_is_called_model_only(forge: Any, tmp_path: Path) -> None:
    """It cannot be told from one."""
    error = refused(
        Scheduled(), forge(lambda state: put(state, ("optimizer_states",), ...)), tmp_path, WeightsOnlyError
    )

    assert error.path == str(tmp_path / "forged")


@pytest.mark.parametrize("value", [None, "x", 5, -1, True, [1], {"a": 1}, 1.5], ids=repr)
@pytest.mark.parametrize("key", [*TOP, "optimizer_states", "world_size"])
def test_a_part_of_lightnings_of_another_type_is_refused(key: str, value: Any, forge: Any, tmp_path: Path) -> None:
    """One error names the key path and what is there, whatever is there."""
    if type(value) is int and value > 0 and key in ("epoch", "global_step", "world_size"):
        value = 2**70
    path = forge(lambda state: put(state, (key,), value))

    error = refused(Scheduled(), path, tmp_path, ResumeError)

    assert isinstance(error, CorruptCheckpointError | MissingStateError | StateMismatchError)
    assert key in str(error) or error.field == key  # state_dict: a dict of another model


@pytest.mark.parametrize("value", [..., None, "x", ["x"], 1.5], ids=repr)
@pytest.mark.parametrize("key", [key.removesuffix("?") for key in RANK])
def test_a_part_of_the_ranks_state_is_refused(key: str, value: Any, forge: Any, tmp_path: Path) -> None:
    """Missing or of another type: told before the module has the checkpoint's weights."""
    path = forge(lambda state: put(state, ("rank_state", key), value))

    error = refused(Scheduled(), path, tmp_path, ResumeError)

    assert type(error) is (MissingStateError if value is ... else CorruptCheckpointError)
    assert key in str(error)
    assert value is ... or error.file == "rank-00000.json"


def required(spec: Any, value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Key paths of all places that a table asks for and a state has."""
    if isinstance(spec, dict):
        for name, inner in spec.items():
            key = name.removesuffix("?")
            if key in value:
                yield (*above, key)
                yield from required(inner, value[key], (*above, key))
    elif isinstance(spec, Each):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from required(spec.spec, value[key], (*above, key))


def test_each_place_in_the_tables_is_looked_at(saved: Path) -> None:
    """Anything of another type, everywhere, is refused with its key path."""
    state = read_checkpoint(saved, rank=0)
    places = [*required(LIGHTNING, state), *required(RANK, state["rank_state"], ("rank_state",))]
    anything_goes = {"computed", "forward_cache"}

    for place in places:
        if place[-1] in anything_goes:
            continue
        forged = copy.deepcopy(state)
        put(forged, place, type("Other", (), {})())

        with pytest.raises(CorruptCheckpointError) as caught:
            check_shape("c", forged, 0)

        assert repr(".".join(map(str, place))) in caught.value.expected
        assert caught.value.found == "a value of type Other"
    assert len(places) > 150


def test_each_place_without_a_question_mark_has_to_be_there(saved: Path) -> None:
    """Key by key, all the way down."""
    state = read_checkpoint(saved, rank=0)
    places = [*required(LIGHTNING, state), *required(RANK, state["rank_state"], ("rank_state",))]
    num_refused = 0

    for place in places:
        forged = copy.deepcopy(state)
        put(forged, place, ...)
        try:
            check_shape("c", forged, 0)
        except MissingStateError as error:
            num_refused += 1
            assert error.field == repr(".".join(map(str, place)))
        else:
            assert len(place) == 2 or place[-1] in (
                "world_size",
                "tensors",
                "defaults",
                *["python", "numpy", "torch", "cuda"],
            )
    assert num_refused > 120


CONTRADICTIONS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "fewer optimizers": (("optimizer_states",), [], "optimizer_states"),
    "fewer schedulers": (("lr_schedulers",), [], "lr_schedulers"),
    "a scheduler's state is a text": (("lr_schedulers", 0), "x", "lr_schedulers.0"),
    "no optimizer state": (("optimizer_states", 0, "state"), ..., "optimizer_states.0.state"),
    "no groups": (("optimizer_states", 0, "param_groups"), ..., "optimizer_states.0.param_groups"),
    "one parameter less": (("optimizer_states", 0, "param_groups", 0, "params"), [0], "optimizer_states.0.param_g"),
    "an old version": (("pytorch-lightning_version",), "1.5.0", "pytorch-lightning_version"),
    "no version": (("pytorch-lightning_version",), "rolling", "pytorch-lightning_version"),
    "a loss less": (("callbacks", "AtomicResumeCallback", "history", "losses"), torch.zeros(1), "history"),
    "a negative counter": (
        ("loops", "fit_loop", "epoch_loop.batch_progress", "current", "ready"), -1, "batch_progress.current.ready",
    ),
    "positions without a seed": (("rank_state", "item_rng", "kind"), "positional", "rank_state.item_rng.seed"),
    "a function's name": (("rank_state", "metrics", "results", 0, "reduce_fx"), "exec", "reduce_fx"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_parts_that_contradict_each_other_are_refused(case: str, forge: Any, tmp_path: Path) -> None:
    """Else an optimizer or a scheduler would silently begin afresh, or stop with an error of torch's."""
    place, value, key_path = CONTRADICTIONS[case]
    path = forge(lambda state: put(state, place, value))

    error = refused(Scheduled(), path, tmp_path, MissingStateError if value is ... else CorruptCheckpointError)

    assert key_path in str(error)


STREAMS: dict[str, tuple[tuple[str, ...], Any]] = {
    "python: too few words": (("python", "words"), torch.zeros(5, dtype=torch.int64)),
    "python: another version": (("python", "version"), 77),
    "python: words out of range": (("python", "words"), torch.full((625,), -1)),
    "numpy: another generator": (("numpy", "bit_generator"), "os.system"),
    "numpy: no state": (("numpy", "state"), ...),
    "numpy: words of no dtype": (("numpy", "state", "key", "dtype"), "x"),
    "numpy: words of another type": (("numpy", "state", "key", "words"), 5),
    "torch: too short": (("torch",), torch.zeros(5, dtype=torch.uint8)),
    "torch: another dtype": (("torch",), torch.zeros(5056)),
}


@pytest.mark.parametrize("case", STREAMS)
def test_the_state_of_a_stream_that_is_none_is_refused(case: str, forge: Any, tmp_path: Path) -> None:
    """It is tried on a stream of its own, before the module has the checkpoint's weights."""
    place, value = STREAMS[case]
    path = forge(lambda state: put(state, ("rank_state", "rng", *place), value))

    error = refused(Scheduled(), path, tmp_path, StateMismatchError)

    assert "random stream" in error.field


def test_averaging_that_is_not_there_any_more_is_refused(forge: Any, tmp_path: Path) -> None:
    """The callback had set itself up at the save; nobody could go on with it."""
    path = forge(lambda state: put(state, ("rank_state", "averaging"), [0]))

    error = refused(Scheduled(), path, tmp_path, StateMismatchError)

    assert (error.field, error.saved, error.current) == ("number of StochasticWeightAveraging callbacks", 1, 0)


def test_a_checkpoint_sets_no_environment_variable_but_the_seeds(
    forge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What worker processes import or load is not a checkpoint's to say."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    path = forge(lambda state: state["rank_state"]["seeds"].update(LD_PRELOAD="evil.so", PL_GLOBAL_SEED="5"))
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")

    make_trainer(tmp_path, plugin(tmp_path / "new"), max_epochs=1).fit(
        Scheduled(), loader(), val_loader(), ckpt_path=path
    )

    assert "LD_PRELOAD" not in os.environ
    assert os.environ["PL_GLOBAL_SEED"] == "5"
