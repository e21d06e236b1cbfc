"""The phases of an agent, as a table."""

from __future__ import annotations

import pytest

from shared_core.protocol.agent_phase import AgentAction, AgentEvent, AgentPhase, IllegalAgentEvent, transition

#: What follows each event that can happen in a phase; all others are refused.
TABLE = """
rendezvous: came -> rendezvous
rendezvous: ended elsewhere -> over
rendezvous: failed -> over
rendezvous: fenced -> stood down, KILL FORGET
rendezvous: placed -> running, START
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
stood down: came -> rendezvous
stood down: ended elsewhere -> over
stood down: failed -> over
ending: failed -> over
ending: fenced -> stood down, KILL FORGET
ending: left -> over
"""


def test_the_table() -> None:
    found = []
    for phase in AgentPhase:
        for event in sorted(AgentEvent, key=lambda each: each.value):
            try:
                after, actions = transition(phase, event)
            except IllegalAgentEvent as error:
                assert phase.value in str(error) and event.value in str(error)
                continue
            does = f", {' '.join(action.name for action in actions)}" if actions else ""
            found.append(f"{phase.value}: {event.value} -> {after.value}{does}")
    assert found == TABLE.strip().splitlines()


@pytest.mark.parametrize("phase", list(AgentPhase))
def test_workers_are_killed_before_others_are_started(phase: AgentPhase) -> None:
    """Wherever an agent stops to train without having ended, no worker is left."""
    for event in AgentEvent:
        try:
            after, actions = transition(phase, event)
        except IllegalAgentEvent:
            continue
        if after in (AgentPhase.RESTARTING, AgentPhase.STOOD_DOWN):
            assert AgentAction.KILL in actions
        assert (AgentAction.START in actions) == (event is AgentEvent.PLACED)
