"""What a survivor does after a failure: it forms the next generation, or continues without the failed ranks."""

from __future__ import annotations

import os
import time
import traceback

from shared_core.errors import DamagedRecord, GenerationAbandoned, RecoveryFailed, Unsupported, WaitTimeout
from shared_core.faults import inject
from shared_core.protocol.generation import Entry
from shared_core.worker.recovery.agreement import Agreement
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.donor import Donor
from shared_core.worker.recovery.forming import Forming
from shared_core.worker.recovery.listener import RecoveryListener


class Survivor:
    """Recovers this worker after failures of others. Each method runs on a thread of its own, and raises nothing."""

    def __init__(
        self,
        context: Context,
        donor: Donor,
        agreement: Agreement,
        forming: Forming,
        listener: RecoveryListener,
    ) -> None:
        self._env, self._runtime = context.env, context.runtime
        self._lifecycle, self._store = context.lifecycle, context.store
        self._events, self._fatal_actions = context.events, context.fatal_actions
        self._donor, self._agreement, self._forming, self._listener = donor, agreement, forming, listener

    def recover(self, entry: Entry) -> None:
        """Form the generation of an entry. What cannot be done ends the worker or the job."""
        with self._lifecycle.acting:
            try:
                self._recover(entry)
            except GenerationAbandoned:
                return  # the thread of the next generation takes over
            except (RecoveryFailed, Unsupported) as error:  # such as an optimizer's state that cannot be moved
                self._fatal_actions.fall_back(str(error))
            except (WaitTimeout, DamagedRecord) as error:
                self._fatal_actions.give_up(error)
            except Exception:
                # This worker cannot continue, but another may take its place; the agent bounds how often.
                traceback.print_exc()
                os._exit(1)

    def _recover(self, entry: Entry) -> None:
        if not self._lifecycle.break_off(entry):
            return
        self._donor.withdraw()
        if why := self._listener.irreplaceable():
            raise RecoveryFailed(why)
        inject.point("recovery.severed")
        self._agreement.post(self._store.below(), entry.generation)
        self._say_ready(entry)
        inject.point("recovery.frontier")
        received = self._forming.form(entry.generation)
        fields = {
            "failed": list(entry.failed),
            "detected": entry.detected,
            "bytes_moved": received.nbytes,
            "exchange_s": received.seconds,
            "resolution": "replay" if received.replaying else "replica",
        }
        self._listener.recovered({"generation": entry.generation, **fields})
        if received.replaying is not None:
            self._listener.replaying(received.replaying)

    def carry_on(self, entry: Entry) -> None:
        """Continue without the absent ranks: nothing is formed until they are admitted."""
        self._listener.rerouted(entry.detected)
        runtime, waits, what = self._runtime, None, ""
        with self._lifecycle.acting:
            newest = self._lifecycle.break_off(entry)
            if not self._lifecycle.ended(entry.generation):
                self._donor.withdraw()
            inject.point("recovery.severed")
            if newest and (what := runtime.operations.under_way()):
                waits = runtime.operations.withdraw()
                if waits is None:
                    self._fatal_actions.cannot_complete(what)
        self._say_ready(entry)
        if waits is not None:  # the program's thread does not run: what it would do in here is done for it
            try:
                if not self._listener.await_absent():
                    self._fatal_actions.cannot_complete(what)
                runtime.operations.call_again(*waits)
            except Exception as error:  # noqa: BLE001 (it would wait for ever)
                self._fatal_actions.break_down(error)

    def _say_ready(self, entry: Entry) -> None:
        self._events.emit(
            "survivor_ready",
            rank=self._env.rank,
            generation=entry.generation,
            detected=entry.detected,
            ready_s=time.time() - entry.detected,
        )
