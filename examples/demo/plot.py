"""Loss curves as text, and as a picture where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import new_figure
from shared_core.errors import MissingExtra

Curve = Sequence[tuple[int, float]]


def side_by_side(curves: Sequence[tuple[str, Curve]], width: int = 44, height: int = 12) -> str:
    """Text plots next to each other, all on one scale.

    Args:
        curves: title and points (step, loss) of each.
        width: columns of each plot.
        height: rows of each plot.
    """
    points = [point for _, curve in curves for point in curve]
    if not points:
        return "no losses were logged"
    low, high = min(y for _, y in points), max(y for _, y in points)
    last = max(x for x, _ in points)
    panels = [_panel(curve, width, height, low, high, last) for _, curve in curves]
    lines = ["        " + "   ".join(title.center(width) for title, _ in curves).rstrip()]
    for row in range(height):
        scale = high - (high - low) * row / (height - 1)
        lines.append(f"{scale:6.2f} |" + " |".join(panel[row] for panel in panels).rstrip())
    lines.append("        " + "   ".join("-" * width for _ in curves))
    lines.append("        " + "   ".join(f"1{f'step {last}':>{width - 1}}" for _ in curves))
    return "\n".join(lines)


def _panel(curve: Curve, width: int, height: int, low: float, high: float, last: int) -> list[str]:
    rows = [[" "] * width for _ in range(height)]
    for step, loss in curve:
        column = (step - 1) * (width - 1) // max(last - 1, 1)
        row = round((high - loss) / (high - low) * (height - 1)) if high > low else 0
        rows[row][column] = "*"
    return ["".join(row) for row in rows]


def write_picture(path: Path, curves: Sequence[tuple[str, Curve]], failed: Sequence[tuple[int, int]] = ()) -> bool:
    """Draw the curves over each other; returns False where matplotlib is not installed.

    Args:
        path: of the picture; its ending says in which format.
        curves: title and points (step, loss) of each; the second is drawn over the first, thin enough to see both.
        failed: step and rank of each failed worker.
    """
    try:
        figure = new_figure((8.0, 3.6))
    except MissingExtra:
        return False
    axes = figure.subplots()
    for (title, curve), style in zip(curves, ({"linewidth": 5, "alpha": 0.35}, {"linewidth": 1.2}), strict=False):
        axes.plot([x for x, _ in curve], [y for _, y in curve], label=title, **style)
    top = max((y for _, curve in curves for _, y in curve), default=1.0)
    for number, (step, rank) in enumerate(failed):
        axes.axvline(step, color="crimson", linewidth=0.8, linestyle=":", label="" if number else "a worker fails")
        below = sum(other == step for other, _ in failed[:number])
        axes.annotate(f"rank {rank}", (step, top), (3, -10 - 11 * below), textcoords="offset points", fontsize=8)
    axes.set(xlabel="step", ylabel="training loss, nats a byte")
    axes.legend(loc="center right", fontsize=8)
    figure.savefig(path)
    return True
