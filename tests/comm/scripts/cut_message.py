"""Two ends of a gloo group in one process: while one sends the other a long message, both are cut off, again and again.

Gloo does not wake every such sender.
"""

from __future__ import annotations

import os
import random
import threading

import torch
from silent import pair

from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.recovery.transfer import receive, send

ROUNDS = 20


def main() -> None:
    chance = random.Random(5)
    for number in range(ROUNDS):
        ends = pair()
        outcome: list[str] = []
        under_way = threading.Event()

        def sender(ends: dict[int, InnerGroup] = ends, outcome: list[str] = outcome) -> None:
            try:
                send(ends[0], 1, {}, [torch.zeros(4 << 20)])
                outcome.append("sent")
            except RuntimeError:
                outcome.append("cut")

        def receiver(ends: dict[int, InnerGroup] = ends, begun: threading.Event = under_way) -> None:
            try:
                begun.set()
                receive(ends[1], 0)
            except RuntimeError:
                pass

        both = [threading.Thread(target=each, daemon=True) for each in (sender, receiver)]
        for thread in both:
            thread.start()
        under_way.wait(10.0)
        threading.Event().wait(chance.random() * 0.005)  # somewhere in the message
        for end in ends.values():
            end.sever()
        for thread in both:
            thread.join(20.0)
        print(f"round {number} {outcome[0] if outcome else 'stuck'}")
    print("done", flush=True)
    os._exit(0)  # what gloo keeps would be waited for


if __name__ == "__main__":
    main()
