"""The launcher: an agent that replaces one worker without touching its siblings, standbys, detection, generations.

Modules, from the agent to the worker:

- ``agent``: the event loop, on torchelastic's agent; ``losses``: pure decisions about a loss; ``watch``: keys that workers set;
- ``logs``: log files and console prefixes; ``standby``: the agent's side of the zygotes; ``zygote``: the zygote process;
- ``entry``: how a started process becomes a worker; ``worker``: helpers inside workers; ``handover``: from ``python train.py`` to ``swiftrun``;
- ``request``: what is asked of a zygote; ``process``: Linux primitives; ``preload``: what a zygote imports.
"""
