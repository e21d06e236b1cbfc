"""Loss curves as text, and as a picture where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


def write_png(path: Path, curves: Sequence[tuple[str, Curve]]) -> bool:
    """Draw the curves over each other into ``path``; returns False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for (title, curve), style in zip(curves, ("-", "--"), strict=False):
        axes.plot([x for x, _ in curve], [y for _, y in curve], style, label=title)
    axes.set(xlabel="step", ylabel="training loss (nats a byte)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
