"""Keys of the job's store, below the prefix of the attempt."""

from __future__ import annotations

import signal

#: Store queues that wake the agents, one for each machine's place.
WORDS = "words"
#: Store queues of workers' reports to the agent of their machine, one for each machine's place.
REPORTS = "reports"
#: Store queues in which workers say that their state is damaged, one for each machine's place.
DAMAGED = "damaged"
#: Store queues in which agents tell each other who is to leave, one for each machine's place.
LEAVES = "leaves"
#: Name of a file in the job's folder, and of a key in the attempt's store: they tell rank 0 that the job ends.
ENDING = "ending"
#: Key that rank 0 sets when the last checkpoint is committed, or cannot be.
SAVED = "saved"
#: Signals that ask for a last checkpoint some time before the end.
EARLY_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
#: Store queues in which hot standbys say that they wait for their rank's place, one for each machine's place.
PREPARED = "prepared"
