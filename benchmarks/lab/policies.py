"""Checkpoint policies as a table and as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import new_figure
from shared_core.report.text import columns

if TYPE_CHECKING:
    from benchmarks.simulate.policies import PolicyResult, Share

#: Parts of the useful time at which intervals are shown.
PARTS = (0.01, 0.1, 0.5, 0.9)


def format_policies(results: Sequence[PolicyResult]) -> str:
    """A row for each policy; shares are per cent of the whole job, with standard errors. Then which rule holds."""
    header = ["policy", "checkpoints", *(f"interval at {100 * part:g} %" for part in PARTS)]
    simulated = any(one.lost is not None for one in results)
    rows = [[*header, "stall %", "rework %", "both %", "utility lost %"] if simulated else header]
    for one in results:
        row = [one.policy, str(len(one.places_s)), *(_seconds(one.interval_s(part)) for part in PARTS)]
        if one.stall is not None and one.rework is not None:
            both = 100 * (one.stall.mean + one.rework.mean)
            row += [_percent(one.stall), _percent(one.rework), f"{both:.3f}", _percent(one.lost)]
        rows.append(row)
    return "\n".join([columns(rows), *(f"{one.policy} follows {one.rule}" for one in results if one.rule)])


def policy_to_dict(one: PolicyResult) -> dict[str, Any]:
    """A result as plain data."""
    return asdict(one) | {"places_s": list(one.places_s)}


def draw_policies(results: Sequence[PolicyResult], path: Path) -> None:
    """Draw stall and rework of each policy, and how its interval changes; the suffix of ``path`` tells the format.

    Raises:
        MissingExtra: if matplotlib is not installed.
        OSError: if the file cannot be written.
        ValueError: if the format is unknown.
    """
    figure = new_figure((10, 7))
    above, below = figure.subplots(2, 1)
    names = [one.policy for one in results]
    shares = [(one.stall, one.rework, one.lost) for one in results]
    stalls, reworks, lost = ([100 * each.mean if each else 0.0 for each in row] for row in zip(*shares, strict=True))
    above.bar(names, stalls, label="stall", width=0.4, align="edge")
    above.bar(names, reworks, bottom=stalls, label="rework", width=0.4, align="edge")
    above.bar(names, lost, label="utility lost", width=-0.4, align="edge", color="lightgrey")
    above.set_ylabel("per cent of the job")
    above.legend(fontsize="small")
    for one in results:
        gaps = [(after / 3600, after - before) for before, after in itertools.pairwise((0.0, *one.places_s))]
        below.plot([at for at, _ in gaps], [gap for _, gap in gaps], label=one.policy, linewidth=1)
    below.set_yscale("log")
    below.set_xlabel("useful hours")
    below.set_ylabel("seconds between checkpoints")
    below.legend(fontsize="small")
    figure.savefig(path)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def _percent(share: Share | None) -> str:
    return "-" if share is None else f"{100 * share.mean:.3f} ± {100 * share.error:.3f}"
