"""In which phase the agent of one machine is, and what it does about what happens, as a pure function."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Where an agent is."""

    #: It waits for a place among the machines of the job.
    RENDEZVOUS = "rendezvous"
    #: The attempt is under way: failed workers are replaced.
    RUNNING = "running"
    #: The number of workers changes: those that stay hand their state on.
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
        """Whether workers are at work that have not all said goodbye."""
        return self in (Phase.RUNNING, Phase.RESIZING)


class Event(Enum):
    """What can happen to an agent."""

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


class Action(Enum):
    """What the agent is to do."""

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
    #: Wait as long as the policy for failures wants.
    DELAY = auto()
    #: Take the place among the machines that continue, with their number of workers.
    REGROUP = auto()
    #: Forget the attempt.
    FORGET = auto()
    #: Nobody is waited for any more.
    LET_GO = auto()


class IllegalEvent(Exception):
    """An event that cannot happen in a phase: a mistake in the agent."""


Outcome = tuple[Phase, tuple[Action, ...]]

_TABLE: dict[tuple[Phase, Event], Outcome] = {
    (Phase.RENDEZVOUS, Event.CAME): (Phase.RENDEZVOUS, ()),
    (Phase.RENDEZVOUS, Event.PLACED): (Phase.RUNNING, (Action.START,)),
    (Phase.RENDEZVOUS, Event.ENDED_ELSEWHERE): (Phase.OVER, ()),
    (Phase.STOOD_DOWN, Event.CAME): (Phase.RENDEZVOUS, ()),
    (Phase.RUNNING, Event.CHANGE): (Phase.RESIZING, ()),
    (Phase.RUNNING, Event.NO_CHANGE): (Phase.RUNNING, ()),
    (Phase.RESIZING, Event.CHANGE): (Phase.RESIZING, ()),
    (Phase.RESIZING, Event.NO_CHANGE): (Phase.RUNNING, (Action.REPLACE,)),
    (Phase.RESTARTING, Event.PLACED): (Phase.RUNNING, (Action.START,)),
    (Phase.ENDING, Event.LEFT): (Phase.OVER, ()),
}
for _phase in (Phase.RUNNING, Phase.RESIZING):
    _TABLE[_phase, Event.RESTART] = (
        Phase.RESTARTING,
        (Action.TELL, Action.KILL, Action.CLEAR, Action.DELAY),
    )
    _TABLE[_phase, Event.RESIZED] = Phase.RESTARTING, (Action.KILL, Action.CLEAR, Action.REGROUP)
    _TABLE[_phase, Event.RELEASED] = Phase.ENDING, (Action.LET_GO,)
for _phase in Phase:
    if _phase is not Phase.OVER:
        _TABLE[_phase, Event.FAILED] = Phase.OVER, ()
    if _phase not in (Phase.STOOD_DOWN, Phase.OVER):
        # The store may fail at any moment, while the workers are being started, too.
        _TABLE[_phase, Event.FENCED] = Phase.STOOD_DOWN, (Action.KILL, Action.FORGET)


def transition(phase: Phase, event: Event) -> Outcome:
    """The phase that follows, and what is to be done.

    Raises:
        IllegalEvent: if the event cannot happen in the phase.
    """
    try:
        return _TABLE[phase, event]
    except KeyError:
        raise IllegalEvent(f"an agent that is {phase.value!r} cannot have the event {event.value!r}") from None
