"""``python tests/profiled_groups.py [RUNS]``: loops that make 80 groups each under the profiler, in four workers.

A profiler once read what a work had let go of: workers died by SIGSEGV, with no failure. Prints how many runs there
were when the first worker died, and ends with status 1 if one did.
"""

from __future__ import annotations

import sys

from harness import Jobs, session_jobs

#: Runs of one job, whose groups all stay, each with threads of gloo; and workers.
EACH, WORKERS = 1, 4


def runs(jobs: Jobs, number: int) -> tuple[int, str]:
    """Make ``number`` runs. Returns how many have ended well, and what was said where one did not."""
    done = 0
    while done < number:
        now = min(EACH, number - done)
        result = jobs.run("profiled_groups.py", nproc=WORKERS, args=[str(now)], timeout_s=600.0)
        if result.status or result.kinds("failed"):
            return done, result.tail()
        done += now
    return done, ""


def main(number: int) -> int:
    """The exit status."""
    with session_jobs() as jobs:
        done, why = runs(jobs, number)
    print(f"{done} of {number} runs{why and ', then a worker died:'}\n{why}".rstrip())
    return int(done < number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
