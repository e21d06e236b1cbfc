"""The pictures of a report, as SVG: timeline of ranks, parts of recoveries, a curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shared_core.report.history import Answer, Doing, EventMark, History, PartKind
from shared_core.report.markup import Element, add, new
from shared_core.report.text import in_seconds

#: Units of the drawing; it is scaled to the width of the page.
WIDTH, LEFT, RIGHT = 1000, 74, 12
#: Most ranks that are drawn, and most bars.
MOST_RANKS, MOST_BARS = 64, 60
#: What is short is drawn at least so wide: a stall of a second in a job of a day must be seen.
_LEAST_WIDTH = 1.6


def class_of(what: Doing | PartKind) -> str:
    """The class that gives it its color."""
    return f"{'doing' if isinstance(what, Doing) else 'part'}-{what.name.lower().replace('_', '-')}"


def drawn_ranks(found: History) -> list[int]:
    """The ranks of the timeline: all or, of very many, those that failed and the first of the others."""
    if len(found.ranks) <= MOST_RANKS:
        return found.ranks
    failed = list(dict.fromkeys(mark.rank for mark in found.failures if mark.rank in set(found.ranks)))[:MOST_RANKS]
    others = [rank for rank in found.ranks if rank not in set(failed)]
    return sorted([*failed, *others[: MOST_RANKS - len(failed)]])


def timeline(found: History) -> Element:
    """What each rank did, one row each; failures as crosses, restarts and changes of the number as vertical lines."""
    ranks = drawn_ranks(found)
    row = 24 if len(ranks) <= 16 else 14
    top, height = 24 if found.turns else 4, row * len(ranks)
    svg = _drawing(top + height + 34, f"What each of {len(ranks)} ranks did in {in_seconds(found.duration_s)}")
    scale = (WIDTH - LEFT - RIGHT) / max(found.duration_s, 1e-9)
    rows = {rank: top + place * row for place, rank in enumerate(ranks)}
    for rank, y in rows.items():
        add(svg, "text", f"rank {rank}", x=LEFT - 8, y=y + row / 2 + 4, text_anchor="end", class_="label")
    # What is trained lies below the rest, so that short spans stay in sight.
    for span in sorted(found.spans, key=lambda span: span.doing is not Doing.TRAINING):
        if span.rank not in rows:
            continue
        seconds = span.end - span.begin
        width = max(seconds * scale, 0.0 if span.doing is Doing.TRAINING else _LEAST_WIDTH)
        place = {"x": LEFT + span.begin * scale, "y": rows[span.rank] + 2, "width": width, "height": row - 4}
        box = add(svg, "rect", class_=class_of(span.doing), **place)
        note = f" ({span.note})" if span.note else ""
        add(box, "title", f"rank {span.rank}: {span.doing.value}{note}, {in_seconds(seconds)} from {span.begin:.2f} s")
    for mark in found.checkpoints:
        x = LEFT + mark.at * scale
        tick = add(svg, "path", d=f"M{x:.2f} {top + height} v7", class_="checkpoint")
        add(tick, "title", f"checkpoint of step boundary {mark.boundary}, complete after {mark.at:.2f} s")
    for mark in found.turns:
        x = LEFT + mark.at * scale
        line = add(svg, "path", d=f"M{x:.2f} {top - 8} V{top + height}", class_="turn")
        add(line, "title", f"{mark.what}, after {mark.at:.2f} s")
        anchor = "end" if mark.at > found.duration_s * 0.8 else "start"
        word = mark.what.split(":")[0] if "again" not in mark.what else "restart"
        add(svg, "text", word, x=x, y=top - 11, text_anchor=anchor, class_="label")
    size = min(5.0, row / 2 - 3)
    for mark in (mark for mark in found.failures if mark.rank in rows):
        _cross(svg, LEFT + mark.at * scale, rows[mark.rank] + row / 2, size, f"rank {mark.rank}: {mark.what}")
    _time_axis(svg, found.duration_s, scale, top + height)
    return svg


def bars(answers: Sequence[Answer]) -> Element:
    """The parts of each recovery, beside each other from the detection of the failure on."""
    drawn = [one for one in answers if one.parts][:MOST_BARS]
    first = min((one.parts[0].begin for one in drawn), default=0.0)
    last = max((one.parts[-1].end for one in drawn), default=1.0)
    row, top = 26, 6
    svg = _drawing(
        top + row * len(drawn) + 34, f"Parts of {len(drawn)} {'recovery' if len(drawn) == 1 else 'recoveries'}"
    )
    left = LEFT + 66
    scale = (WIDTH - left - 70) / max(last - first, 1e-9)
    bottom = top + row * len(drawn)
    for tick in _ticks(first, last):
        x = left + (tick - first) * scale
        add(svg, "path", d=f"M{x:.2f} {top} V{bottom}", class_="zero" if tick == 0 else "grid")
        add(svg, "text", f"{tick:.4g} s", x=x, y=bottom + 16, text_anchor="middle", class_="label")
    for place, one in enumerate(drawn):
        y = top + place * row
        add(svg, "text", title_of(one), x=left - 8, y=y + row / 2 + 4, text_anchor="end", class_="label")
        for part in one.parts:
            x = left + (part.begin - first) * scale
            width = max(part.seconds * scale, 0.8)
            box = add(svg, "rect", x=x, y=y + 3, width=width, height=row - 6, class_=class_of(part.kind))
            add(box, "title", f"{part.kind.value}: {in_seconds(part.seconds)}")
            shown = in_seconds(part.seconds)
            if part.seconds * scale > 7 * len(shown):
                add(svg, "text", shown, x=x + width / 2, y=y + row / 2 + 4, text_anchor="middle", class_="inside")
        end = left + (one.parts[-1].end - first) * scale
        add(svg, "text", in_seconds(one.parts[-1].end), x=end + 6, y=y + row / 2 + 4, class_="label total")
    add(
        svg,
        "text",
        "after the detection of the failure",
        x=WIDTH - 70,
        y=bottom + 32,
        text_anchor="end",
        class_="label",
    )
    return svg


def title_of(one: Answer) -> str:
    """Who failed, or what changed, in a few words."""
    failed = one.recovery.failed
    if not failed:
        return one.recovery.answer
    shown = ", ".join(map(str, failed[:4])) + (", …" if len(failed) > 4 else "")
    return f"rank{'s' if len(failed) > 1 else ''} {shown}"


def curve(name: str, points: Sequence[tuple[float, float]], failures: Iterable[EventMark]) -> Element:
    """A metric over steps, with the steps at which workers failed.

    Args:
        points: (step, value), at least one, in order.
        failures: those whose step boundary is unknown are left out.
    """
    top, height = 26, 220
    svg = _drawing(top + height + 38, f"{name} over steps")
    first, last = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    across, up = (WIDTH - LEFT - RIGHT) / max(last - first, 1e-9), height / max(high - low, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - first) * across, top + height - (y - low) * up

    for tick in _ticks(low, high, 5):
        y = place(first, tick)[1]
        add(svg, "path", d=f"M{LEFT} {y:.2f} H{WIDTH - RIGHT}", class_="grid")
        add(svg, "text", f"{tick:.4g}", x=LEFT - 8, y=y + 4, text_anchor="end", class_="label")
    for tick in _ticks(first, last):
        x = place(tick, low)[0]
        add(svg, "text", f"{tick:.6g}", x=x, y=top + height + 18, text_anchor="middle", class_="label")
    add(svg, "text", "step", x=WIDTH - RIGHT, y=top + height + 34, text_anchor="end", class_="label")
    for mark in failures:
        if mark.boundary is None or not first <= mark.boundary <= last:
            continue
        x = place(mark.boundary, low)[0]
        title = f"rank {mark.rank} at step boundary {mark.boundary}: {mark.what}"
        line = add(svg, "path", d=f"M{x:.2f} {top} V{top + height}", class_="failure-line")
        add(line, "title", title)
        _cross(svg, x, top - 8.0, 5.0, title)
    at = [place(x, y) for x, y in points]
    if len(at) == 1:
        add(svg, "circle", cx=at[0][0], cy=at[0][1], r=3, class_="dot")
    else:
        add(svg, "polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in at), class_="curve")
    return svg


def _drawing(height: float, title: str) -> Element:
    svg = new("svg", viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=title)
    add(svg, "title", title)
    return svg


def _cross(svg: Element, x: float, y: float, size: float, title: str) -> None:
    left, right, above, below = (f"{each:.2f}" for each in (x - size, x + size, y - size, y + size))
    d = f"M{left} {above} L{right} {below} M{right} {above} L{left} {below}"
    add(svg, "path", d=d, class_="halo")
    add(add(svg, "path", d=d, class_="cross"), "title", title)


def _time_axis(svg: Element, duration_s: float, scale: float, y: float) -> None:
    size, unit = next((each for each in ((3600.0, "h"), (60.0, "min")) if duration_s >= 3 * each[0]), (1.0, "s"))
    for tick in _ticks(0.0, duration_s / size):
        x = LEFT + tick * size * scale
        add(svg, "path", d=f"M{x:.2f} {y} v4", class_="axis")
        add(svg, "text", f"{tick:.4g} {unit}", x=x, y=y + 20, text_anchor="middle", class_="label")


def _ticks(low: float, high: float, about: int = 8) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
