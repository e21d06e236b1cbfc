"""A run's history as one HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from shared_core.report import drawings
from shared_core.report.history import Doing, History, PartKind, goodput, outages, stall_s
from shared_core.report.markup import Element, add, new, table, to_html
from shared_core.report.metrics import thinned
from shared_core.report.saved import savings
from shared_core.report.text import in_bytes, in_seconds, in_time

_STYLE = Path(__file__).with_name("page.css")
#: Most warnings and causes that are shown, and how long each may be.
_MOST_WARNINGS, _LONGEST = 50, 300


def to_page(
    found: History, metric: tuple[str, Sequence[tuple[float, float]]] | None = None, every: int | None = None
) -> str:
    """The page.

    Args:
        metric: name of a metric and its points (step, value), for the curve; at least one.
        every: steps between checkpoints, of the restarts that the run is compared with; its own by default.
    """
    root = new("html", lang="en")
    head = add(root, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "title", f"{_name(found)}: report")
    add(head, "style").text = _STYLE.read_text()  # as it is: nothing of the data is in it
    main = add(add(root, "body"), "main")
    _head(main, found, every)
    _timeline(main, found)
    _recoveries(main, found)
    if metric is not None:
        _curve(main, found, *metric)
    _saved(main, found, every)
    _environment(main, found)
    _warnings(main, found)
    return "<!DOCTYPE html>\n" + to_html(root) + "\n"


def _name(found: History) -> str:
    return Path(dict(found.facts).get("script", "")).name or "job"


def _head(main: Element, found: History, every: int | None) -> None:
    head = add(main, "header")
    title = add(head, "h1", _name(found))
    result = found.result or "not ended"
    good = {"succeeded": "good", "not ended": "open"}.get(result, "bad")
    add(title, "span", result, class_=f"result {good}")
    begun = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(found.began))
    add(head, "p", f"run {found.run or 'without an id'}, began {begun}", class_="quiet")
    if not found.result:
        note = "The events hold no end of this run: it is under way, or it was killed. What follows ends with the last."
        add(head, "p", note, class_="note")
    stalls = [stall_s(outage) for outage in outages(found.answers)]
    workers = " → ".join(str(count) for _, count in found.workers) or str(len(found.ranks))
    cards = add(head, "dl", class_="cards")
    if (share := goodput(found)) is not None:
        _card(cards, f"{share:.1%}", "goodput")
    _card(cards, workers, "workers")
    if len(found.machines) > 1:
        _card(cards, str(len(found.machines)), "machines")
    _card(cards, in_time(found.duration_s), "duration without start-up")
    _card(cards, str(len(found.failures)), "failed workers" if len(found.failures) != 1 else "failed worker")
    if stalls:
        _card(cards, in_time(max(stalls)), "longest stall")
    if (saved := savings(found, every).saved_s) is not None:
        _card(cards, _signed(saved), "saved, estimated")


def _card(cards: Element, value: str, name: str) -> None:
    card = add(cards, "div")
    add(card, "dt", name)
    add(card, "dd", value)


def _timeline(main: Element, found: History) -> None:
    section = _section(main, "Timeline")
    _legend(section, [one for one in Doing if any(span.doing is one for span in found.spans)])
    section.append(drawings.timeline(found))
    words = ["A cross marks the failure of a worker."] if found.failures else ["No worker failed."]
    if found.turns:
        words.append("A dashed line marks where all workers start again, or their number changes.")
    if found.checkpoints:
        words.append("A tick below the rows marks a complete checkpoint.")
    shown = len(drawings.drawn_ranks(found))
    if shown < len(found.ranks):
        words.append(f"{shown} of {len(found.ranks)} ranks are shown, first of all those that failed.")
    add(section, "p", " ".join(words), class_="quiet")


def _recoveries(main: Element, found: History) -> None:
    if not found.answers:
        return
    section = _section(main, "Recoveries")
    timed = [one for one in found.answers if one.parts]
    kinds = [kind for kind in PartKind if any(part.kind is kind for one in timed for part in one.parts)]
    if timed:
        _legend(section, kinds)
        section.append(drawings.bars(found.answers))
        if len(timed) > drawings.MOST_BARS:
            add(section, "p", f"The first {drawings.MOST_BARS} of {len(timed)} are drawn.", class_="quiet")
    header = ["at", "who", "cause", "answer", *(kind.value for kind in kinds), "stall", "moved", "steps redone"]
    rows = []
    for one in found.answers:
        what = one.recovery
        times = {kind: sum(part.seconds for part in one.parts if part.kind is kind) for kind in kinds}
        causes = "; ".join(dict.fromkeys(failure.cause for failure in what.failures if failure.cause))
        answer = what.answer if what.superseded_by is None else f"{what.answer}, abandoned"
        rows.append(
            [
                _at(one.at),
                drawings.title_of(one) if what.failed else "all",
                _short(causes) or "-",
                answer,
                *(in_seconds(seconds or None) for seconds in times.values()),
                in_time(what.longest_stall_s),
                in_bytes(what.bytes_moved),
                str(what.recomputed_steps),
            ]
        )
    table(section, header, rows, numbers=len(kinds) + 3)
    words = (
        "Parts are in seconds from the detection of a failure, and each begins where the one before ends: survivors "
        "leave their calls while the replacement starts. The stall is that of the worker that waited longest."
    )
    if any(one.recovery.superseded_by is not None for one in found.answers):
        words += " A recovery is abandoned when another worker fails meanwhile; the next one answers both failures."
    if PartKind.DETECTION in kinds:
        words += " Detection is known of injected faults only, which say when they strike."
    add(section, "p", words, class_="quiet")


def _curve(main: Element, found: History, name: str, points: Sequence[tuple[float, float]]) -> None:
    section = _section(main, "Curve")
    add(section, "p", name, class_="axis-name")
    section.append(drawings.curve(name, thinned(points), found.failures))
    if found.failures:
        words = "A cross marks the step boundary that a failed worker had reached."
        add(section, "p", f"{words} Steps and step boundaries differ where gradients are accumulated.", class_="quiet")


def _saved(main: Element, found: History, every: int | None) -> None:
    result = savings(found, every)
    if not result.each:
        return
    section = _section(main, "Against a restart")
    words = "The events do not tell enough to estimate what was saved."
    if result.saved_s is not None:
        words = f"{_signed(result.saved_s)} saved in all, by the assumptions below."
    add(section, "p", words)
    header = ["at", "who", "took here", "steps repeated", "a restart, estimated", "saved"]
    rows = [
        [
            _at(one.at),
            f"rank{'s' if len(one.failed) > 1 else ''} {', '.join(map(str, one.failed))}",
            in_time(one.took_s),
            "-" if one.steps is None else str(one.steps),
            in_time(one.restart_s),
            "-" if one.saved_s is None else _signed(one.saved_s),
        ]
        for one in result.each
    ]
    table(section, header, rows, numbers=4)
    _list(section, result.assumptions)


def _environment(main: Element, found: History) -> None:
    section = _section(main, "Environment")
    facts = [(name.replace("_", " "), value) for name, value in found.facts]
    if len(found.machines) > 1:
        facts.append(("machines", ", ".join(found.machines)))
    if found.startup_s is not None:
        facts.append(("start to first batch", in_seconds(found.startup_s)))
    if found.step_s is not None:
        facts.append(("step", f"{in_seconds(found.step_s)}, mean of {found.measured_steps} steps between failures"))
    if not facts:
        add(section, "p", "The events say nothing about it.", class_="quiet")
        return
    terms = add(section, "dl", class_="facts")
    for name, value in facts:
        add(terms, "dt", name)
        add(terms, "dd", value)


def _warnings(main: Element, found: History) -> None:
    if not found.warnings:
        return
    section = _section(main, "Warnings")
    _list(section, (f"{_at(mark.at)}: {_short(mark.what)}" for mark in found.warnings[:_MOST_WARNINGS]))
    if len(found.warnings) > _MOST_WARNINGS:
        add(section, "p", f"{len(found.warnings) - _MOST_WARNINGS} more are in the events.", class_="quiet")


def _section(main: Element, title: str) -> Element:
    section = add(main, "section")
    add(section, "h2", title)
    return section


def _legend(section: Element, kinds: Iterable[Doing | PartKind]) -> None:
    legend = add(section, "ul", class_="legend")
    for kind in kinds:
        entry = add(legend, "li")
        sample = add(entry, "svg", viewBox="0 0 12 12", class_="sample", aria_hidden="true")
        add(sample, "rect", x=0, y=0, width=12, height=12, class_=drawings.class_of(kind))
        add(entry, "span", kind.value)


def _list(section: Element, entries: Iterable[str]) -> None:
    shown = add(section, "ul", class_="quiet")
    for entry in entries:
        add(shown, "li", entry)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _signed(seconds: float) -> str:
    return in_time(seconds) if seconds >= 0 else f"-{in_time(-seconds)}"


def _at(seconds: float) -> str:
    """A time since the run began."""
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes // 60)}:{int(minutes % 60):02}:{rest:05.2f}"
