"""The launcher: an agent that replaces one worker without touching its siblings, standbys, detection, generations.

From the agent to the worker:

- ``agent``: the event loop, on torchelastic's agent. ``losses``: pure decisions about a loss. ``wakeup``: signals.
- ``attempt``: the store and the agent's keys. ``watch``: keys that workers set. ``jobdir``: the private folder.
- ``fleet``: worker processes. ``standby``: the agent's side of the zygotes. ``process``: Linux primitives.
- ``environment`` and ``logs``: what a worker finds and where it writes. ``request``: what is asked of a zygote.
- ``zygote``: the zygote process. ``preload``: what it imports. ``entry``: how a process becomes a worker.
- ``story``: what the user reads. ``title``: what ``ps`` shows.
- ``worker``: helpers inside workers. ``handover``: from ``python train.py`` to ``swiftrun``.
"""
