"""The phases of a worker, and what it does about each event. Pure.

Events are the entries of the ledger (:func:`heard`) and the steps of its own program. The actions of a phase run on
threads of their own; one that is overtaken by a further entry gives up by itself.
"""

from __future__ import annotations

from enum import Enum, auto

from shared_core.protocol.generation import Entry, EntryKind


class WorkerPhase(Enum):
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
    #: A survivor writes its state, because the number of workers changes.
    DRAINING = "draining"
    #: The attempt is over, or this worker's part in it; the launcher does what follows.
    ENDED = "ended"

    @property
    def answers(self) -> bool:
        return self in (WorkerPhase.BEHIND, WorkerPhase.ASKS_TO_JOIN)


class WorkerEvent(Enum):
    #: An entry: all ranks form the generation.
    FORM = "form"
    #: An entry: the others continue without the absent ranks.
    CARRY_ON = "continue"
    #: An entry: the number of workers changes, and this one stays.
    DRAIN = "drain"
    #: An entry: the number of workers changes without this one.
    LEFT_OUT = "left out"
    #: An entry: the attempt is over.
    OVER = "over"
    #: An entry: another worker holds this one's rank, because its machine was taken for failed.
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


class WorkerAction(Enum):
    #: Cut the connections and form the generation.
    RECOVER = auto()
    #: Cut the connections to the absent ranks, and continue.
    CARRY_ON = auto()
    #: Cut the connections, agree on a step boundary with those that stay, and write the state there.
    DRAIN = auto()
    #: No worker leaves: free what was held for that.
    WITHDRAW = auto()
    #: Publish in the new generation where this replacement starts: the others need to know before it joins.
    POST_FRONT = auto()
    #: No entry follows.
    STOP_WATCHING = auto()
    #: End this process.
    EXIT = auto()


class IllegalWorkerEvent(Exception):
    """An event that cannot happen in a phase: a mistake in the protocol."""


Outcome = tuple[WorkerPhase, tuple[WorkerAction, ...]]

_SURVIVORS = (WorkerPhase.LIVE, WorkerPhase.RECOVERING, WorkerPhase.WITHOUT, WorkerPhase.DRAINING)
_NOT_JOINED = (
    WorkerPhase.STARTING,
    WorkerPhase.FROM_START,
    WorkerPhase.BEHIND,
    WorkerPhase.ASKS_TO_JOIN,
    WorkerPhase.JOINING,
)

#: The phase that follows and the actions, for each event that can happen in a phase.
TRANSITIONS: dict[tuple[WorkerPhase, WorkerEvent], Outcome] = {
    # A replacement's place: first from its own entry, then from what all have agreed on.
    (WorkerPhase.STARTING, WorkerEvent.CARRY_ON): (WorkerPhase.ASKS_TO_JOIN, ()),
    (WorkerPhase.STARTING, WorkerEvent.BOUNDARY_FOUND): (WorkerPhase.BEHIND, ()),
    (WorkerPhase.STARTING, WorkerEvent.NO_BOUNDARY): (WorkerPhase.FROM_START, ()),
    # Its way into the job.
    (WorkerPhase.STARTING, WorkerEvent.ARRIVED): (WorkerPhase.JOINING, ()),
    (WorkerPhase.FROM_START, WorkerEvent.ARRIVED): (WorkerPhase.JOINING, ()),
    (WorkerPhase.BEHIND, WorkerEvent.ARRIVED): (WorkerPhase.JOINING, ()),
    (WorkerPhase.JOINING, WorkerEvent.INSTALLED): (WorkerPhase.LIVE, ()),
    (WorkerPhase.ASKS_TO_JOIN, WorkerEvent.ADMITTED): (WorkerPhase.LIVE, ()),
    (WorkerPhase.ASKS_TO_JOIN, WorkerEvent.ADMITTED_SOME): (WorkerPhase.WITHOUT, ()),
    (WorkerPhase.ASKS_TO_JOIN, WorkerEvent.ADMITTED_LATE): (WorkerPhase.WITHOUT, ()),
    # Another failure before it is in.
    (WorkerPhase.STARTING, WorkerEvent.FORM): (WorkerPhase.STARTING, (WorkerAction.WITHDRAW,)),
    (WorkerPhase.FROM_START, WorkerEvent.FORM): (
        WorkerPhase.FROM_START,
        (WorkerAction.WITHDRAW, WorkerAction.POST_FRONT),
    ),
    (WorkerPhase.BEHIND, WorkerEvent.FORM): (WorkerPhase.BEHIND, (WorkerAction.WITHDRAW, WorkerAction.POST_FRONT)),
    # It is being admitted: otherwise it would be absent.
    (WorkerPhase.ASKS_TO_JOIN, WorkerEvent.FORM): (WorkerPhase.RECOVERING, (WorkerAction.RECOVER,)),
    (WorkerPhase.JOINING, WorkerEvent.FORM): (WorkerPhase.JOINING, (WorkerAction.WITHDRAW,)),
    (WorkerPhase.ASKS_TO_JOIN, WorkerEvent.CARRY_ON): (WorkerPhase.ASKS_TO_JOIN, (WorkerAction.WITHDRAW,)),
    # A survivor's way back.
    (WorkerPhase.RECOVERING, WorkerEvent.INSTALLED): (WorkerPhase.LIVE, ()),
    (WorkerPhase.WITHOUT, WorkerEvent.ADMITTED): (WorkerPhase.LIVE, ()),
    (WorkerPhase.WITHOUT, WorkerEvent.ADMITTED_SOME): (WorkerPhase.WITHOUT, ()),
    # A failure while replacements were admitted: the answer to it has begun.
    (WorkerPhase.RECOVERING, WorkerEvent.ADMITTED_LATE): (WorkerPhase.RECOVERING, ()),
    (WorkerPhase.WITHOUT, WorkerEvent.ADMITTED_LATE): (WorkerPhase.WITHOUT, ()),
    (WorkerPhase.DRAINING, WorkerEvent.ADMITTED_LATE): (WorkerPhase.DRAINING, ()),
}
for _phase in _SURVIVORS:
    TRANSITIONS[_phase, WorkerEvent.FORM] = WorkerPhase.RECOVERING, (WorkerAction.RECOVER,)
    TRANSITIONS[_phase, WorkerEvent.CARRY_ON] = WorkerPhase.WITHOUT, (WorkerAction.CARRY_ON,)
    TRANSITIONS[_phase, WorkerEvent.DRAIN] = WorkerPhase.DRAINING, (WorkerAction.DRAIN,)
for _phase in _NOT_JOINED:
    # It answers that it has no state, and keeps running: the change may yet be withdrawn.
    TRANSITIONS[_phase, WorkerEvent.DRAIN] = _phase, (WorkerAction.DRAIN,)
for _phase in (*_NOT_JOINED, WorkerPhase.LIVE, WorkerPhase.RECOVERING):
    if _phase is not WorkerPhase.ASKS_TO_JOIN:
        TRANSITIONS[_phase, WorkerEvent.LEFT_OUT] = _phase, ()  # a replacement that came too late: the launcher ends it


def transition(phase: WorkerPhase, event: WorkerEvent) -> Outcome:
    """The next phase, and the actions in order. Raises IllegalWorkerEvent for an impossible event."""
    if event is WorkerEvent.REPLACED:
        return WorkerPhase.ENDED, (WorkerAction.EXIT,)
    if event is WorkerEvent.OVER:
        # Who asks to join waits until the launcher ends it: alone it must not continue.
        return WorkerPhase.ASKS_TO_JOIN if phase is WorkerPhase.ASKS_TO_JOIN else WorkerPhase.ENDED, (
            WorkerAction.STOP_WATCHING,
        )
    if phase is WorkerPhase.ENDED:
        return WorkerPhase.ENDED, ()  # the program may come a little further before it is ended
    try:
        return TRANSITIONS[phase, event]
    except KeyError:
        raise IllegalWorkerEvent(f"a worker that is {phase.value!r} cannot have the event {event.value!r}") from None


def heard(entry: Entry, rank: int, incarnation: int) -> WorkerEvent:
    """What an entry of the ledger is to the worker that is this incarnation of ``rank``."""
    if entry.kind.over:
        return WorkerEvent.OVER
    if entry.incarnations[rank] > incarnation:
        return WorkerEvent.REPLACED
    if entry.kind is EntryKind.DRAIN:
        return WorkerEvent.DRAIN if rank in entry.stay else WorkerEvent.LEFT_OUT
    return WorkerEvent.CARRY_ON if entry.kind is EntryKind.CARRY_ON else WorkerEvent.FORM
