"""What a worker does when the program makes its default process group."""

from __future__ import annotations

from shared_core.faults import inject
from shared_core.worker.comm import Runtime
from shared_core.worker.recovery.place_reports import PlaceReports
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.recovery.start_point import Arrival
from shared_core.worker.recovery.wait_watchdog import WaitWatchdog
from shared_core.worker.state.updates import Updates


def on_first_group(
    runtime: Runtime,
    recovery: WorkerRecovery,
    arrival: Arrival,
    updates: Updates,
    replays: Replays,
    reporter: RecoveryReporter,
    wait_watchdog: WaitWatchdog,
    place_reports: PlaceReports,
) -> None:
    """Form the first generation. A replacement with a step boundary to reach does so there; another one joins here."""
    place_reports.begin()
    # A hot standby goes the way of a replacement, and says nothing to the others before it has a place.
    if arrival.spare.waits:
        runtime.answer_from(dict(recovery.publisher.records.read()))
        arrival.spare.then(wait_watchdog.begin)
        inject.point("spare.prepares")
        return
    wait_watchdog.begin()
    arrival.prepare()
    if runtime.starting:
        return
    if recovery.replacement:
        updates.begin_install()
        updates.load(0, None, ())
    inject.point("startup")
    received = recovery.join()
    if recovery.replacement:
        replays.begin(received.replaying)
        arrival.from_scratch()
        reporter.joined(None)
