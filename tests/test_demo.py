"""The demo: what it shows is measured, and it can show the opposite, too."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from lightning_resume.demo.comparison import Bucket, compare_records, compare_runs, compare_tensors
from lightning_resume.demo.driver import Kill, Run, draw_moments, run_demo
from lightning_resume.demo.plot import draw_curves
from lightning_resume.demo.records import Place, Tail
from lightning_resume.demo.report import make_report
from lightning_resume.demo.settings import FINAL_FILE, RECORD_FILE, DemoError, DemoSettings
from lightning_resume.demo.show import show_demo

# 10 batches an epoch, 20 in all
SMALL = {"num_epochs": 2, "num_items": 320, "every_n_train_steps": 2}


class Silence:
    """A display that shows nothing."""

    def advance(self, run: str, num_done: int, num_batches: int, note: str) -> None: ...

    def say(self, text: str) -> None: ...


def batch(epoch: int, number: int, loss: float, rate: float = 0.1) -> dict[str, Any]:
    """Returns the record of a batch."""
    values = {"items": f"{epoch}-{number}", "loss": loss.hex(), "learning_rate": rate.hex()}
    return {"kind": "batch", "epoch": epoch, "batch": number, "global_step": number, **values}


def finished_run(path: Path, name: str, losses: list[float], weight: float = 1.0) -> Run:
    """Returns a run that has trained one epoch, with its final state on disk."""
    path.mkdir()
    tensors = {f"{part}.x": np.array([weight]) for part in ("weights", "optimizer", "schedule", "streams")}
    save_file(tensors, path / FINAL_FILE)
    records = [batch(0, number, loss) for number, loss in enumerate(losses)]
    metrics = {"val_loss": (0.5).hex()}
    records += [
        {"kind": "validation", "global_step": 1, "metrics": metrics},
        {"kind": "epoch", "epoch": 0, "metrics": metrics},
    ]
    return Run(name, path, records, seconds=1.0)


def test_a_job_killed_three_times_ends_as_the_uninterrupted_one(tmp_path: Path) -> None:
    """The demo kills a real job three times, finds every part of it bit-equal, and says so in its report."""
    settings = DemoSettings(seed=3, **SMALL)

    show_demo(settings, tmp_path, console=Console(file=io.StringIO(), width=80))

    report = json.loads((tmp_path / "resume-demo.json").read_text())
    assert [bucket["name"] for bucket in report["buckets"] if not bucket["exact"]] == []
    assert report["exact"] is True
    assert report["seed"] == 3
    assert len(report["kills"]) == 3
    assert all(kill["resumed_from"]["global_step"] <= kill["killed_at"]["global_step"] for kill in report["kills"])
    assert {bucket["largest_difference"] for bucket in report["buckets"]} == {0.0, None}
    assert (tmp_path / "resume-demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_job_with_lightnings_own_checkpoints_is_found_different(tmp_path: Path) -> None:
    """The control: the comparison does find the differences that a stock resume makes."""
    settings = DemoSettings(seed=3, num_kills=1, stock=True, **SMALL)

    report = show_demo(settings, tmp_path, plot=False, console=Console(file=io.StringIO(), width=80))

    different = {bucket["name"] for bucket in report["buckets"] if not bucket["exact"]}
    assert report["exact"] is False
    assert {"weights", "random streams", "loss of each batch"} <= different
    assert not (tmp_path / "resume-demo.png").exists()


def test_a_job_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    """No verdict without two finished runs: the user sees which job failed, and its error."""
    settings = DemoSettings(seed=3, num_epochs=1, num_items=0)

    with pytest.raises(DemoError, match=r"(?s)job failed with status 1:.*num_samples=0"):
        run_demo(settings, tmp_path, Silence())


def test_the_seed_repeats_the_moments_of_the_kills() -> None:
    """The same seed draws the same moments, one in each third of the run; another one draws others."""
    moments = draw_moments(DemoSettings(seed=7))

    assert moments == draw_moments(DemoSettings(seed=7))
    assert moments != draw_moments(DemoSettings(seed=8))
    assert [3 * moment.batch // 450 for moment in moments] == [0, 1, 2]


def test_a_kill_is_never_drawn_so_late_that_training_could_be_over() -> None:
    """A process that is to be killed waits two batches later: there have to be two more."""
    settings = DemoSettings(seed=0, num_kills=1, **SMALL)

    batches = {draw_moments(replace(settings, seed=seed))[0].batch for seed in range(500)}

    assert (min(batches), max(batches)) == (0, settings.num_batches - 3)


def test_a_folder_that_an_earlier_demo_left_is_not_overwritten(tmp_path: Path) -> None:
    """`--keep` never mixes the records of two demos."""
    (tmp_path / "resume-demo-work").mkdir()

    with pytest.raises(DemoError, match=r"resume-demo-work' of an earlier demo"):
        show_demo(DemoSettings(seed=1), tmp_path, keep=True, console=Console(file=io.StringIO()))


def test_equal_runs_are_exact(tmp_path: Path) -> None:
    """Two equal runs are exact in each part, and each part has been looked at."""
    baseline, interrupted = (finished_run(tmp_path / name, name, [2.0, 1.5]) for name in ("a", "b"))

    buckets = compare_runs(baseline, interrupted)

    assert all(bucket.is_exact for bucket in buckets)
    assert {bucket.name: bucket.num_compared for bucket in buckets} == {
        **{"weights": 1, "optimizer": 1, "schedule": 1, "random streams": 1},
        **{"items of each batch": 2, "loss of each batch": 2, "learning rates": 2},
        **{"validation metrics": 1, "epoch means": 1},
    }


@pytest.mark.parametrize(
    ("left", "right", "largest"),
    [
        pytest.param(1.0, np.nextafter(1.0, 2.0), 2.0**-52, id="last bit"),
        pytest.param(0.0, -0.0, 0.0, id="sign of zero"),
        pytest.param(1.0, math.nan, math.inf, id="NaN on one side"),
    ],
)
def test_a_single_different_bit_is_found(left: float, right: float, largest: float) -> None:
    """Tensors are compared by their bytes, not by what `==` thinks of their values."""
    expected, found = {"weights.x": np.array([2.0, left])}, {"weights.x": np.array([2.0, right])}

    bucket = compare_tensors("weights", expected, found)

    assert bucket == Bucket("weights", 2, 1, largest)


@pytest.mark.parametrize(
    "found",
    [{}, {"weights.x": np.zeros(3, np.float32)}, {"weights.x": np.zeros((1, 3))}],
    ids=["missing", "dtype", "shape"],
)
def test_a_tensor_of_another_kind_is_different(found: dict[str, Any]) -> None:
    """A tensor that is missing, or has another dtype or shape, counts as different in each element."""
    bucket = compare_tensors("weights", {"weights.x": np.zeros(3)}, found)

    assert bucket == Bucket("weights", 3, 3, math.inf)


def test_what_was_trained_twice_is_compared_twice() -> None:
    """A wrong loss before the kill is not hidden by the right one after it."""
    expected = [batch(0, 0, 2.0), batch(0, 1, 1.5)]
    found = [batch(0, 0, 2.0), batch(0, 1, 1.25), batch(0, 1, 1.5)]

    bucket = compare_records("loss", expected, found, key_fields=("epoch", "batch"), field="loss")

    assert bucket == Bucket("loss", 3, 1, 0.25)


def test_a_batch_that_was_never_trained_is_different() -> None:
    """A skipped batch is no equality."""
    bucket = compare_records(
        "loss", [batch(0, 0, 2.0), batch(0, 1, 1.5)], [batch(0, 0, 2.0)], key_fields=("epoch", "batch"), field="loss"
    )

    assert bucket == Bucket("loss", 1, 1, math.inf)


def test_a_batch_that_the_baseline_has_not_is_different() -> None:
    """A batch too many is no equality."""
    bucket = compare_records(
        "loss", [batch(0, 0, 2.0)], [batch(0, 0, 2.0), batch(0, 1, 1.5)], key_fields=("epoch", "batch"), field="loss"
    )

    assert bucket == Bucket("loss", 2, 1, math.inf)


def test_nothing_compared_is_not_exact() -> None:
    """An empty comparison proves nothing, and does not pass for a proof."""
    bucket = compare_tensors("weights", {}, {})

    assert not bucket.is_exact


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    """The driver reads the record while it grows, and never half a line."""
    tail = Tail(tmp_path)
    path = tmp_path / RECORD_FILE
    assert tail.read() == []

    path.write_text('{"kind": "begin"}\n{"kind": ')
    first = tail.read()
    path.write_text(path.read_text() + '"batch"}\n')
    second = tail.read()

    assert [first, second] == [[{"kind": "begin"}], [{"kind": "batch"}]]


def test_a_report_of_infinite_differences_is_valid_json(tmp_path: Path) -> None:
    """JSON knows no infinity: the report says it in words."""
    baseline, interrupted = (finished_run(tmp_path / name, name, [1.0]) for name in ("a", "b"))

    report = make_report(DemoSettings(seed=1), baseline, interrupted, [Bucket("weights", 1, 1, math.inf)], 1.0)

    assert json.loads(json.dumps(report, allow_nan=False))["buckets"][0]["largest_difference"] == "inf"
    assert report["exact"] is False


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """Both curves and the kills go into a PNG."""
    baseline, interrupted = (finished_run(tmp_path / name, name, [2.0, 1.5, 1.0]) for name in ("a", "b"))
    interrupted.kills.append(Kill(1, Place(0, 1, 1), resumed_from=Place(0, 0, 0), num_batches_again=1))

    draw_curves(baseline, interrupted, tmp_path / "curves.png")

    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
