"""Draws the two loss curves on top of each other, and their difference below."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_resume.demo.driver import Run
from lightning_resume.demo.records import of_kind

BLUE, ORANGE, RED = "#1f5fa8", "#f28e2b", "#c0392b"


def draw_curves(baseline: Run, interrupted: Run, path: Path) -> None:
    """Writes a PNG with the loss of every batch in both runs, the kills marked, and the difference of the two."""
    expected, found = _losses(baseline), _losses(interrupted)
    per_epoch = 1 + max(batch for _, batch in expected)

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for losses, label, style in (
        (expected, "uninterrupted baseline", {"color": ORANGE, "linewidth": 4.0, "alpha": 0.6}),
        (found, "killed and resumed", {"color": BLUE, "linewidth": 1.0}),
    ):
        top.plot([epoch * per_epoch + batch for epoch, batch in losses], list(losses.values()), label=label, **style)
    for number, kill in enumerate(interrupted.kills):
        position = kill.killed_at.epoch * per_epoch + kill.killed_at.batch
        for axes in (top, bottom):
            axes.axvline(position, color=RED, linestyle="--", linewidth=1.0, label="" if number else "SIGKILL")
        if kill.resumed_from is not None:
            resumed = kill.resumed_from.epoch * per_epoch + kill.resumed_from.batch
            label = "" if number else "trained again"
            top.axvspan(resumed, position, color=RED, alpha=0.12, linewidth=0, label=label)
    shared = sorted(expected.keys() & found.keys())
    differences = [abs(found[key] - expected[key]) for key in shared]
    bottom.plot([epoch * per_epoch + batch for epoch, batch in shared], differences, color=BLUE)
    verdict = "DIFFERENT" if any(differences) else f"all {len(shared)} losses are bit-equal"
    top.set(ylabel="training loss", title=f"{len(interrupted.kills)} x SIGKILL, resumed each time: {verdict}")
    top.legend(framealpha=0.7, edgecolor="none")
    bottom.set(xlabel="batch", ylabel="difference")
    if not any(differences):
        bottom.set_ylim(-1e-6, 1e-6)
    bottom.set_title(f"largest difference: {max(differences)}", fontsize="medium", loc="left")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _losses(run: Run) -> dict[tuple[int, int], float]:
    """Returns the loss of each batch by (epoch, batch); of what was trained twice, the later value."""
    losses = {
        (record["epoch"], record["batch"]): float.fromhex(record["loss"]) for record in of_kind(run.records, "batch")
    }
    return dict(sorted(losses.items()))
