"""A view of a job on a terminal, with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.errors import MissingExtra
from shared_core.events import visible
from shared_core.watch.ranks import RankPhase
from shared_core.watch.text import (
    FAILURE_COLUMNS,
    SHOWN,
    WORKER_COLUMNS,
    facts,
    failure_cells,
    headline,
    worker_cells,
)
from shared_core.watch.view import JobView

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_STATES = {"running": "green", "succeeded": "green", "recovering": "yellow", "starting": "cyan"}
_PHASES = {
    RankPhase.TRAINING: "green",
    RankPhase.STALLED: "yellow",
    RankPhase.JOINING: "yellow",
    RankPhase.WAITING: "yellow",
    RankPhase.FAILED: "red",
    RankPhase.GONE: "red",
    RankPhase.STOPPED: "red",
}


def need_rich() -> None:
    """See that rich is there.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "on a terminal this needs rich: pip install 'swift-recovery[all]'. Without it, pipe the output (| cat) "
            "or use swiftctl status --json"
        ) from error


def drawn(view: JobView) -> Group:
    """All of it. Words of the job are shown as they are, and never read as rich's markup."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    color = _STATES.get(view.state, "red")
    about = Text("\n").join(Text.assemble((f"{name:<14}", "dim"), value) for name, value in facts(view))
    head = Text(headline(view), style=f"bold {color}")
    parts: list[Panel | Table] = [Panel(about, title=head, title_align="left", border_style=color)]
    if view.workers:
        table = _table(WORKER_COLUMNS, right=(0, 2, 3, 4, 5, 6, 8, 9))
        for one in view.workers:
            first, phase, *rest = worker_cells(one)
            table.add_row(Text(first), Text(phase, style=_PHASES.get(RankPhase(phase), "")), *map(Text, rest))
        parts.append(table)
    if view.failures:
        table = _table(FAILURE_COLUMNS, right=(0, 1, 3, 4, 5, 6))
        for failure in view.failures[:SHOWN]:
            table.add_row(*map(Text, failure_cells(failure, view.begun)))
        parts.append(table)
    return Group(*parts, *(Text(visible(text), style="yellow") for _, text in view.warnings))


def _table(names: tuple[str, ...], right: tuple[int, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, name in enumerate(names):
        table.add_column(name, justify="right" if at in right else "left")
    return table
