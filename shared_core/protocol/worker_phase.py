"""In which phase a worker is, and what it does about what it hears, as a pure function.

What a worker hears are the entries of the ledger (:func:`heard`) and the steps of its own program. The actions of a
phase run on threads of their own; one that is overtaken by a further entry gives up by itself.
"""

from __future__ import annotations

from enum import Enum, auto

from shared_core.protocol.generation import Entry, Kind


class Phase(Enum):
    """Where a worker is in its life."""

    #: The script runs up to its default process group; a replacement does not know its place yet.
    STARTING = "starting"
    #: A replacement whose failed worker has passed no step boundary runs the script as the first workers did.
    FROM_START = "from the start"
    #: A replacement runs the script up to the failed worker's step boundary; collectives are answered from records.
    BEHIND = "behind"
    #: The same, but the others continue without it: at its first step boundary it asks to be admitted.
    ASKS_TO_JOIN = "asking to join"
    #: The program's thread forms the first generation of this worker.
    JOINING = "joining"
    #: Connected.
    LIVE = "live"
    #: A survivor forms the next generation.
    RECOVERING = "recovering"
    #: A survivor continues without absent ranks.
    WITHOUT = "without absent ranks"
    #: A survivor hands its state on, because the number of workers changes.
    DRAINING = "draining"
    #: The attempt is over, or this worker's part in it; the launcher does what follows.
    ENDED = "ended"

    @property
    def answers(self) -> bool:
        """Whether collectives are answered from records."""
        return self in (Phase.BEHIND, Phase.ASKS_TO_JOIN)


class Event(Enum):
    """What can happen to a worker."""

    #: An entry: all ranks form the generation.
    FORM = "form"
    #: An entry: the others continue without the absent ranks.
    CARRY_ON = "continue"
    #: An entry: the number of workers changes, and this one hands its state on.
    DRAIN = "drain"
    #: An entry: the number of workers changes without this one.
    LEFT_OUT = "left out"
    #: An entry: the attempt is over.
    OVER = "over"
    #: An entry: another worker holds this one's rank, so its machine was taken for failed.
    REPLACED = "replaced"
    #: A replacement finds that its place is a step boundary.
    BOUNDARY_FOUND = "boundary found"
    #: A replacement finds that its place is the beginning of the script.
    NO_BOUNDARY = "no boundary"
    #: The program has come to the place where it joins.
    ARRIVED = "arrived"
    #: The generation is formed, and no later entry is known.
    INSTALLED = "installed"
    #: All absent ranks are admitted, and no later entry is known.
    ADMITTED = "admitted"
    #: Some absent ranks are admitted, others are still absent, and no later entry is known.
    ADMITTED_SOME = "admitted some"
    #: Absent ranks are admitted, and another failure has ended the generation since.
    ADMITTED_LATE = "admitted late"


class Action(Enum):
    """What the worker is to do."""

    #: Cut the connections and form the generation.
    RECOVER = auto()
    #: Cut the connections to the absent ranks, and continue.
    CARRY_ON = auto()
    #: Cut the connections, agree on a step boundary with those that stay, and write the state there.
    DRAIN = auto()
    #: Nobody leaves: what was held for handing on is free again.
    WITHDRAW = auto()
    #: Say in the new generation where this replacement starts: the others need to know before it joins.
    POST_FRONT = auto()
    #: No entry follows.
    STOP_WATCHING = auto()
    #: End this process.
    EXIT = auto()


class IllegalEvent(Exception):
    """An event that cannot happen in a phase: a mistake in the protocol."""


Outcome = tuple[Phase, tuple[Action, ...]]

_SURVIVORS = (Phase.LIVE, Phase.RECOVERING, Phase.WITHOUT, Phase.DRAINING)
_NOT_JOINED = (Phase.STARTING, Phase.FROM_START, Phase.BEHIND, Phase.ASKS_TO_JOIN, Phase.JOINING)

#: The phase that follows and what is to be done, for each event that can happen in a phase.
TRANSITIONS: dict[tuple[Phase, Event], Outcome] = {
    # A replacement's place: what its own entry says, then what all have agreed on.
    (Phase.STARTING, Event.CARRY_ON): (Phase.ASKS_TO_JOIN, ()),
    (Phase.STARTING, Event.BOUNDARY_FOUND): (Phase.BEHIND, ()),
    (Phase.STARTING, Event.NO_BOUNDARY): (Phase.FROM_START, ()),
    # Its way into the job.
    (Phase.STARTING, Event.ARRIVED): (Phase.JOINING, ()),
    (Phase.FROM_START, Event.ARRIVED): (Phase.JOINING, ()),
    (Phase.BEHIND, Event.ARRIVED): (Phase.JOINING, ()),
    (Phase.JOINING, Event.INSTALLED): (Phase.LIVE, ()),
    (Phase.ASKS_TO_JOIN, Event.ADMITTED): (Phase.LIVE, ()),
    (Phase.ASKS_TO_JOIN, Event.ADMITTED_SOME): (Phase.WITHOUT, ()),
    (Phase.ASKS_TO_JOIN, Event.ADMITTED_LATE): (Phase.WITHOUT, ()),
    # Another failure before it is in.
    (Phase.STARTING, Event.FORM): (Phase.STARTING, (Action.WITHDRAW,)),
    (Phase.FROM_START, Event.FORM): (Phase.FROM_START, (Action.WITHDRAW, Action.POST_FRONT)),
    (Phase.BEHIND, Event.FORM): (Phase.BEHIND, (Action.WITHDRAW, Action.POST_FRONT)),
    # It is being admitted: only then nobody is absent.
    (Phase.ASKS_TO_JOIN, Event.FORM): (Phase.RECOVERING, (Action.RECOVER,)),
    (Phase.JOINING, Event.FORM): (Phase.JOINING, (Action.WITHDRAW,)),
    (Phase.ASKS_TO_JOIN, Event.CARRY_ON): (Phase.ASKS_TO_JOIN, (Action.WITHDRAW,)),
    # A survivor's way back.
    (Phase.RECOVERING, Event.INSTALLED): (Phase.LIVE, ()),
    (Phase.WITHOUT, Event.ADMITTED): (Phase.LIVE, ()),
    (Phase.WITHOUT, Event.ADMITTED_SOME): (Phase.WITHOUT, ()),
    # A failure while replacements were admitted: what is to be done about it has begun.
    (Phase.RECOVERING, Event.ADMITTED_LATE): (Phase.RECOVERING, ()),
    (Phase.WITHOUT, Event.ADMITTED_LATE): (Phase.WITHOUT, ()),
    (Phase.DRAINING, Event.ADMITTED_LATE): (Phase.DRAINING, ()),
}
for _phase in _SURVIVORS:
    TRANSITIONS[_phase, Event.FORM] = Phase.RECOVERING, (Action.RECOVER,)
    TRANSITIONS[_phase, Event.CARRY_ON] = Phase.WITHOUT, (Action.CARRY_ON,)
    TRANSITIONS[_phase, Event.DRAIN] = Phase.DRAINING, (Action.DRAIN,)
for _phase in _NOT_JOINED:
    # It says that it has no state, and runs on: that may yet be withdrawn.
    TRANSITIONS[_phase, Event.DRAIN] = _phase, (Action.DRAIN,)
for _phase in (*_NOT_JOINED, Phase.LIVE, Phase.RECOVERING):
    if _phase is not Phase.ASKS_TO_JOIN:
        TRANSITIONS[_phase, Event.LEFT_OUT] = _phase, ()  # a replacement that came too late: the launcher ends it


def transition(phase: Phase, event: Event) -> Outcome:
    """The phase that follows, and what is to be done.

    Raises:
        IllegalEvent: if the event cannot happen in the phase.
    """
    if event is Event.REPLACED:
        return Phase.ENDED, (Action.EXIT,)
    if event is Event.OVER:
        # Who asks to join waits until the launcher ends it: alone it must not continue.
        return Phase.ASKS_TO_JOIN if phase is Phase.ASKS_TO_JOIN else Phase.ENDED, (Action.STOP_WATCHING,)
    if phase is Phase.ENDED:
        return Phase.ENDED, ()  # the program may come a little further before it is ended
    try:
        return TRANSITIONS[phase, event]
    except KeyError:
        raise IllegalEvent(f"a worker that is {phase.value!r} cannot have the event {event.value!r}") from None


def heard(entry: Entry, rank: int, incarnation: int) -> Event:
    """What an entry of the ledger is to a worker.

    Args:
        entry: the newest one.
        rank: of the worker.
        incarnation: of the worker.
    """
    if entry.kind.over:
        return Event.OVER
    if entry.incarnations[rank] > incarnation:
        return Event.REPLACED
    if entry.kind is Kind.DRAIN:
        return Event.DRAIN if rank in entry.stay else Event.LEFT_OUT
    return Event.CARRY_ON if entry.kind is Kind.CARRY_ON else Event.FORM
