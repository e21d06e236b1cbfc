"""What a worker does when the program makes its default process group."""

from __future__ import annotations

from shared_core.faults import inject
from shared_core.worker.comm import Runtime
from shared_core.worker.recovery.patience import Patience
from shared_core.worker.recovery.place_reports import PlaceReports
from shared_core.worker.recovery.recovery import Recovery
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.reporting import News
from shared_core.worker.recovery.starting_place import Beginning
from shared_core.worker.state.updates import Updates


def on_first_group(
    runtime: Runtime,
    recovery: Recovery,
    beginning: Beginning,
    updates: Updates,
    replays: Replays,
    news: News,
    patience: Patience,
    place_reports: PlaceReports,
) -> None:
    """Form the first generation. A replacement with a step boundary to reach does so there; another one joins here."""
    place_reports.begin()
    if beginning.spare.waits:  # it goes the way of a replacement, and says nothing to the others before it has a place
        runtime.answer_from(dict(recovery.board.records.read()))
        beginning.spare.then(patience.begin)
        inject.point("spare.prepares")
        return
    patience.begin()
    beginning.prepare()
    if runtime.starting:
        return
    if recovery.replacement:
        updates.begin_install()
        updates.load(0, None, ())
    inject.point("startup")
    received = recovery.join()
    if recovery.replacement:
        replays.begin(received.replaying)
        beginning.from_scratch()
        news.joined(None)
