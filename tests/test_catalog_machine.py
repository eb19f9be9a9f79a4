"""A folder of checkpoints against a plain dict: any order of saves, kills, damage, moves and deletions."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Faults
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lightning_resume.catalog import (
    CheckpointInfo,
    clean_incomplete,
    newest_good,
    prune_checkpoints,
    scan_checkpoints,
    step_dirname,
)
from lightning_resume.errors import CheckpointExistsError, CorruptCheckpointError
from lightning_resume.format.checkpoint import read_checkpoint, verify_checkpoint, write_checkpoint
from lightning_resume.format.durable import find_checkpoint
from lightning_resume.format.hidden import parse_hidden
from lightning_resume.policy import to_prune


@dataclass(frozen=True)
class Saved:
    """What the model knows of one checkpoint.

    Attributes:
        value: in every tensor of it.
        timeline, step, epoch: its place in the run.
        run_id: of the run.
        damage: "": sound; "cut": told by the sizes; "flipped": told by the digests alone.
    """

    value: int
    timeline: int
    step: int
    epoch: int
    run_id: str
    damage: str = ""


def place(saved: Saved, name: str) -> tuple[int, int, int, int, str]:
    """What orders checkpoints; the one place in which this test says so."""
    return saved.timeline, saved.step, saved.epoch, 0, name


FOREIGN = {
    "notes.txt": "mine",
    ".hidden": "mine",
    "data/precious.bin": "mine",
    ".step-00000001.notes.tmp": "mine",
    "step.ckpt": "mine",
    "other/index.json": '{"of": "another tool"}',
}
STEPS = st.integers(0, 4)
NAMES = st.one_of(STEPS.map(step_dirname), st.sampled_from(["best.ckpt", "last.ckpt"]))
RUNS = st.sampled_from(["a", "b"])
TIMELINES = st.integers(0, 1)
HOW = st.sampled_from(["kill", "power"])
KILLS = st.tuples(HOW, st.integers(1, 23))  # as many operations as a save has that replaces another one
SHORT_KILLS = st.tuples(HOW, st.integers(1, 7))


class Catalog(RuleBasedStateMachine):
    """The folder, and the model beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.root = self.home / "checkpoints"
        self.model: dict[str, Saved] = {}
        self.num_saves = 0

    def teardown(self) -> None:
        """Takes the folder away."""
        shutil.rmtree(self.home)

    @initialize()
    def put_foreign_things(self) -> None:
        """What is not ours lies there from the start."""
        for name, text in FOREIGN.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        (self.root / "link").symlink_to("notes.txt")

    # -- what happens -------------------------------------------------------------------------------------------------

    def _next(self, name: str, run_id: str, timeline: int) -> Saved:
        self.num_saves += 1
        step = int(name.removeprefix("step-")) if name.startswith("step-") else self.num_saves
        return Saved(self.num_saves, timeline, step, self.num_saves % 3, run_id)

    def _write(self, name: str, saved: Saved, *, overwrite: bool) -> None:
        counters = {"global_step": saved.step, "current_epoch": saved.epoch, "batch_in_epoch": 0}
        write_checkpoint(
            self.root / name,
            {"state_dict": {"w": torch.full((3,), saved.value)}, "optimizer_states": [], "value": saved.value},
            counters=counters,
            run_id=saved.run_id,
            timeline=saved.timeline,
            overwrite=overwrite,
        )

    @rule(name=NAMES, run_id=RUNS, timeline=TIMELINES)
    def save(self, name: str, run_id: str, timeline: int) -> None:
        """A save at a path of its own; where something stands it is refused."""
        saved = self._next(name, run_id, timeline)
        if (self.root / name).exists():
            with pytest.raises(CheckpointExistsError) as caught:
                self._write(name, saved, overwrite=False)
            assert caught.value.path == str(self.root / name)
            return
        self._write(name, saved, overwrite=False)
        self.model[name] = saved

    @rule(name=NAMES, run_id=RUNS, timeline=TIMELINES)
    def overwrite(self, name: str, run_id: str, timeline: int) -> None:
        """A save in the place of another one, or of none."""
        self.model[name] = saved = self._next(name, run_id, timeline)
        self._write(name, saved, overwrite=True)

    def _killed(self, kill: tuple[str, int], action: Callable[[], Any]) -> None:
        how, at = kill
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)  # the whole group is killed
                Faults(self.root, how, at).install()
                action()
                os._exit(0)  # it has fewer operations
            finally:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (0, -signal.SIGKILL)

    @rule(name=NAMES, run_id=RUNS, timeline=TIMELINES, kill=KILLS)
    def crash(self, name: str, run_id: str, timeline: int, kill: tuple[str, int]) -> None:
        """A save, replacing what is there, that dies at some file operation: the old one is there, or the new one."""
        before, saved = self.model.get(name), self._next(name, run_id, timeline)

        self._killed(kill, lambda: self._write(name, saved, overwrite=True))

        after = self._seen(name)
        assert after in (before.value if before is not None else None, saved.value)
        if after == saved.value:
            self.model[name] = saved

    def _seen(self, name: str) -> int | None:
        """Which save stands at a path, by what no damage of this test reaches; None: no checkpoint."""
        path = find_checkpoint(self.root / name)
        if not (path / "index.json").exists():
            return None
        if name in self.model and self.model[name].damage:
            try:
                verify_checkpoint(path)
            except CorruptCheckpointError:
                return self.model[name].value
        return int(read_checkpoint(path)["value"])

    def _good_steps(self) -> dict[tuple[int, int], tuple[str, Path]]:
        """Timeline and step of the checkpoints of steps, as a trainer that prunes finds them."""
        return {
            (info.timeline or 0, info.global_step or 0): (_name_of(info), info.path)
            for info in scan_checkpoints(self.root)
            if info.status == "good" and _name_of(info).startswith("step-")
        }

    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        """The newest stay; nothing else goes."""
        steps = self._good_steps()
        doomed = [steps[step] for step in to_prune(steps, keep)]

        pruned = prune_checkpoints([path for _, path in doomed])

        assert pruned == [path for _, path in doomed]
        assert len(steps) - len(doomed) == min(keep, len(steps))
        for name, _ in doomed:
            del self.model[name]

    @rule(keep=st.integers(1, 2), kill=SHORT_KILLS)
    def crash_while_pruning(self, keep: int, kill: tuple[str, int]) -> None:
        """Each of those that were to go is gone, or as it was."""
        steps = self._good_steps()
        doomed = [steps[step] for step in to_prune(steps, keep)]

        self._killed(kill, lambda: prune_checkpoints([path for _, path in doomed]))

        for name, _ in doomed:
            seen = self._seen(name)
            assert seen in (None, self.model[name].value)
            if seen is None:
                del self.model[name]

    @rule(kill=SHORT_KILLS)
    def crash_while_cleaning(self, kill: tuple[str, int]) -> None:
        """No checkpoint is lost by tidying up."""
        self._killed(kill, lambda: clean_incomplete(self.root))

    @rule()
    def clean(self) -> None:
        """Nothing of ours is left but checkpoints: all the processes that died are known to be dead."""
        clean_incomplete(self.root)

        hidden = {name for name in os.listdir(self.root) if parse_hidden(name)}
        assert hidden == set()

    @precondition(lambda self: any(not saved.damage for saved in self.model.values()))
    @rule(data=st.data(), file=st.sampled_from(["model.safetensors", "state.json", "index.json"]), is_cut=st.booleans())
    def damage(self, data: st.DataObject, file: str, is_cut: bool) -> None:
        """A file loses its end, or one bit of its last byte changes."""
        name = data.draw(st.sampled_from(sorted(name for name, saved in self.model.items() if not saved.damage)))
        path = find_checkpoint(self.root / name) / file
        content = bytearray(path.read_bytes())
        is_cut = is_cut or file == "index.json"
        if not is_cut:
            content[-1] ^= 1
        path.write_bytes(content[:-5] if is_cut else content)
        self.model[name] = replace(self.model[name], damage="cut" if is_cut else "flipped")

    @rule()
    def move(self) -> None:
        """The whole folder goes elsewhere."""
        target = self.home / f"moved-{len(os.listdir(self.home))}-{self.root.name}"
        self.root.rename(target)
        self.root = target

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """A user keeps a copy under another name."""
        name = data.draw(st.sampled_from(sorted(self.model)))
        if not (self.root / "copy").exists():
            shutil.copytree(find_checkpoint(self.root / name), self.root / "copy")
            self.model["copy"] = self.model[name]

    # -- what holds at all times --------------------------------------------------------------------------------------

    @invariant()
    def a_scan_tells_exactly_the_good_ones(self) -> None:
        """By size, and with every byte read; in order, with what each is."""
        for verify, sound in ((False, {"", "flipped"}), (True, {""})):
            infos = scan_checkpoints(self.root, verify=verify) if self.root.exists() else []
            good = [info for info in infos if info.status == "good"]
            expected = {name: saved for name, saved in self.model.items() if saved.damage in sound}

            assert sorted(map(_name_of, good)) == sorted(expected)
            ordered = sorted(good, key=lambda info: place(expected[_name_of(info)], info.path.name))
            assert good == ordered
            for info in good:
                saved = expected[_name_of(info)]
                assert (info.timeline, info.global_step, info.run_id) == (saved.timeline, saved.step, saved.run_id)

    @invariant()
    def the_newest_good_one_is_what_was_saved(self) -> None:
        """What a resume would load is the model's newest, whole."""
        newest = newest_good(self.root, verify=True)
        sound = {name: saved for name, saved in self.model.items() if not saved.damage}
        assert (newest is None) == (not sound)
        if newest is None:
            return
        saved = sound[_name_of(newest)]
        state = read_checkpoint(newest.path)
        assert place(saved, "")[:-1] == max(place(each, "")[:-1] for each in sound.values())
        assert (state["value"], state["state_dict"]["w"].tolist()) == (saved.value, [saved.value] * 3)

    @invariant()
    def what_is_foreign_is_untouched(self) -> None:
        """Neither saves nor pruning nor cleaning has to do with it."""
        if not (self.root / "link").is_symlink():
            return  # not begun
        assert {name: (self.root / name).read_text() for name in FOREIGN} == FOREIGN
        others = {name for name in os.listdir(self.root) if not parse_hidden(name)}
        assert others <= {*self.model, *(name.partition("/")[0] for name in FOREIGN), "link"}


def _name_of(info: CheckpointInfo) -> str:
    """The name under which a checkpoint was saved, also while it stands aside."""
    hidden = parse_hidden(info.path.name)
    return hidden.name if hidden is not None else info.path.name


def test_a_folder_behaves_like_a_dict_whatever_happens_to_it() -> None:
    """No order of saves, kills, damage and tidying loses a checkpoint, or makes another one the newest."""
    limits = settings(
        max_examples=40,
        stateful_step_count=15,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    run_state_machine_as_test(Catalog, settings=limits)
