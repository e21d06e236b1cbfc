"""The phases of the agent of one machine, and what it does about each event. Pure."""

from __future__ import annotations

from enum import Enum, auto


class AgentPhase(Enum):
    #: It waits for a place among the machines of the job.
    RENDEZVOUS = "rendezvous"
    #: The attempt is under way: failed workers are replaced.
    RUNNING = "running"
    #: The number of workers changes: those that stay write their state for the next attempt.
    RESIZING = "resizing"
    #: All workers are ended, and those of the next attempt are started.
    RESTARTING = "restarting"
    #: This machine may not continue: its workers are ended, and it begins as if it had just come.
    STOOD_DOWN = "stood down"
    #: All workers have said goodbye: they leave.
    ENDING = "ending"
    #: The result is known.
    OVER = "over"

    @property
    def trains(self) -> bool:
        """Whether workers are running that have not all said goodbye."""
        return self in (AgentPhase.RUNNING, AgentPhase.RESIZING)


class AgentEvent(Enum):
    #: It comes to the rendezvous, for the first time or again.
    CAME = "came"
    #: It has a place, or the next attempt is begun.
    PLACED = "placed"
    #: A change of the number of workers begins, or continues with others that stay.
    CHANGE = "change"
    #: There is no change of the number of workers, or no longer one.
    NO_CHANGE = "no change"
    #: The ledger says that all workers start again.
    RESTART = "restart"
    #: The ledger says that another number of workers continues.
    RESIZED = "resized"
    #: The ledger says that all workers have said goodbye.
    RELEASED = "released"
    #: All workers have left.
    LEFT = "left"
    #: The job has failed.
    FAILED = "failed"
    #: The lease ran out, the place was given away, or the store is gone.
    FENCED = "fenced"
    #: The job ended without this machine.
    ENDED_ELSEWHERE = "ended elsewhere"


class AgentAction(Enum):
    #: Start the workers of this machine.
    START = auto()
    #: Start replacements for ranks that failed during a change that is given up.
    REPLACE = auto()
    #: Say that all workers start again, and why.
    TELL = auto()
    #: Kill every worker, and wait until all are gone.
    KILL = auto()
    #: Forget what the workers of the attempt have published, except what the next one continues from.
    CLEAR = auto()
    #: Wait as long as the policy for failures asks for.
    DELAY = auto()
    #: Take the place among the machines that continue, with their number of workers.
    REGROUP = auto()
    #: Forget the attempt.
    FORGET = auto()
    #: No rank is waited for any more.
    LET_GO = auto()


class IllegalAgentEvent(Exception):
    """An event that cannot happen in a phase: a mistake in the agent."""


Outcome = tuple[AgentPhase, tuple[AgentAction, ...]]

_TABLE: dict[tuple[AgentPhase, AgentEvent], Outcome] = {
    (AgentPhase.RENDEZVOUS, AgentEvent.CAME): (AgentPhase.RENDEZVOUS, ()),
    (AgentPhase.RENDEZVOUS, AgentEvent.PLACED): (AgentPhase.RUNNING, (AgentAction.START,)),
    (AgentPhase.RENDEZVOUS, AgentEvent.ENDED_ELSEWHERE): (AgentPhase.OVER, ()),
    (AgentPhase.STOOD_DOWN, AgentEvent.CAME): (AgentPhase.RENDEZVOUS, ()),
    (AgentPhase.STOOD_DOWN, AgentEvent.ENDED_ELSEWHERE): (AgentPhase.OVER, ()),
    (AgentPhase.RUNNING, AgentEvent.CHANGE): (AgentPhase.RESIZING, ()),
    (AgentPhase.RUNNING, AgentEvent.NO_CHANGE): (AgentPhase.RUNNING, ()),
    (AgentPhase.RESIZING, AgentEvent.CHANGE): (AgentPhase.RESIZING, ()),
    (AgentPhase.RESIZING, AgentEvent.NO_CHANGE): (AgentPhase.RUNNING, (AgentAction.REPLACE,)),
    (AgentPhase.RESTARTING, AgentEvent.PLACED): (AgentPhase.RUNNING, (AgentAction.START,)),
    (AgentPhase.ENDING, AgentEvent.LEFT): (AgentPhase.OVER, ()),
}
for _phase in (AgentPhase.RUNNING, AgentPhase.RESIZING):
    _TABLE[_phase, AgentEvent.RESTART] = (
        AgentPhase.RESTARTING,
        (AgentAction.TELL, AgentAction.KILL, AgentAction.CLEAR, AgentAction.DELAY),
    )
    _TABLE[_phase, AgentEvent.RESIZED] = (
        AgentPhase.RESTARTING,
        (AgentAction.KILL, AgentAction.CLEAR, AgentAction.REGROUP),
    )
    _TABLE[_phase, AgentEvent.RELEASED] = AgentPhase.ENDING, (AgentAction.LET_GO,)
for _phase in AgentPhase:
    if _phase is not AgentPhase.OVER:
        _TABLE[_phase, AgentEvent.FAILED] = AgentPhase.OVER, ()
    if _phase not in (AgentPhase.STOOD_DOWN, AgentPhase.OVER):
        # The store may fail at any moment, also while the workers are being started.
        _TABLE[_phase, AgentEvent.FENCED] = AgentPhase.STOOD_DOWN, (AgentAction.KILL, AgentAction.FORGET)


def transition(phase: AgentPhase, event: AgentEvent) -> Outcome:
    """The next phase, and the actions in order. Raises IllegalAgentEvent for an impossible event."""
    try:
        return _TABLE[phase, event]
    except KeyError:
        raise IllegalAgentEvent(f"an agent that is {phase.value!r} cannot have the event {event.value!r}") from None
