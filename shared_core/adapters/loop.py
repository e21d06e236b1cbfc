"""The loop of an adapter, whose framework iterates loaders itself."""

from __future__ import annotations

from shared_core.loop import TrainingLoop


class AdapterLoop(TrainingLoop):
    """A training loop with what it is made of: the adapter marks where loaders begin and end, and where batches do."""

    begin = TrainingLoop._begin
    expect = TrainingLoop._expect
    joining = TrainingLoop._joining
    nested = TrainingLoop._nested
    track = TrainingLoop._track
    forget = TrainingLoop._forget
    refuse_own_steps = TrainingLoop._refuse_own_steps
    begin_round = TrainingLoop._begin_round
    end_round = TrainingLoop._end_round
    activate = TrainingLoop._activate
    walk = TrainingLoop._walk
    gave = TrainingLoop._gave
    walked = TrainingLoop._walked
    variables_held = TrainingLoop._variables_held
    step_boundary = TrainingLoop._step_boundary
