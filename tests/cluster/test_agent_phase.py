"""The phases of an agent, as a table."""

from __future__ import annotations

import pytest

from shared_core.protocol.agent_phase import Action, Event, IllegalEvent, Phase, transition

#: What follows each event that can happen in a phase; all others are refused.
TABLE = """
meeting: came -> meeting
meeting: ended elsewhere -> over
meeting: failed -> over
meeting: fenced -> stood down, KILL FORGET
meeting: placed -> running, START
running: change -> resizing
running: failed -> over
running: fenced -> stood down, KILL FORGET
running: no change -> running
running: released -> ending, LET_GO
running: resized -> restarting, KILL CLEAR REGROUP
running: restart -> restarting, TELL KILL CLEAR DELAY
resizing: change -> resizing
resizing: failed -> over
resizing: fenced -> stood down, KILL FORGET
resizing: no change -> running, REPLACE
resizing: released -> ending, LET_GO
resizing: resized -> restarting, KILL CLEAR REGROUP
resizing: restart -> restarting, TELL KILL CLEAR DELAY
restarting: failed -> over
restarting: fenced -> stood down, KILL FORGET
restarting: placed -> running, START
stood down: came -> meeting
stood down: failed -> over
ending: failed -> over
ending: fenced -> stood down, KILL FORGET
ending: left -> over
"""


def test_the_table() -> None:
    found = []
    for phase in Phase:
        for event in sorted(Event, key=lambda each: each.value):
            try:
                after, actions = transition(phase, event)
            except IllegalEvent as error:
                assert phase.value in str(error) and event.value in str(error)
                continue
            does = f", {' '.join(action.name for action in actions)}" if actions else ""
            found.append(f"{phase.value}: {event.value} -> {after.value}{does}")
    assert found == TABLE.strip().splitlines()


@pytest.mark.parametrize("phase", list(Phase))
def test_workers_are_killed_before_others_are_started(phase: Phase) -> None:
    """Wherever an agent stops to train without having ended, no worker is left."""
    for event in Event:
        try:
            after, actions = transition(phase, event)
        except IllegalEvent:
            continue
        if after in (Phase.RESTARTING, Phase.STOOD_DOWN):
            assert Action.KILL in actions
        assert (Action.START in actions) == (event is Event.PLACED)
