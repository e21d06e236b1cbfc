"""Wrong options, as a file or the environment gives them: what is said names the option and what is allowed."""

from __future__ import annotations

from typing import Any

NAN, INF = float("nan"), float("inf")

#: The options of a file, and what the line must hold besides the first option's name.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"on_failure": "retry"}, "'replace', 'reroute', 'shrink', 'restart'"),
    ({"on_failure": None}, "'replace'"),
    ({"resize.replace_timeout_s": 3, "on_failure": "reroute"}, "leave resize.replace_timeout_s out"),
    ({"resize.replace_timeout_s": -1}, "at least 0"),
    ({"resize.grow_after_s": 1e300}, "at most"),
    ({"resize.data": "guess"}, "'exact', 'drop'"),
    ({"data": "skip"}, "'restore', 'refetch', 'seeded'"),
    ({"state.preimages": True}, "'auto', 'always', 'never'"),
    ({"checkpoint.dir": ""}, "a folder or a URL"),
    ({"checkpoint.dir": "nonsense://x"}, "nonsense"),
    ({"checkpoint.every_steps": 2.5}, "whole number"),
    ({"checkpoint.policy": "often"}, "'fixed'"),
    ({"checkpoint.policy": "fixed"}, "needs checkpoint.every_steps"),
    ({"checkpoint.policy": "young", "checkpoint.every_steps": 5}, "leave checkpoint.every_steps out"),
    ({"checkpoint.price": -0.1}, "at least 0"),
    ({"checkpoint.history": ""}, "a file"),
    ({"checkpoint.background": 2}, "true or false"),
    ({"checkpoint.keep": 1}, "at least 2"),
    ({"checkpoint.quota_bytes": "1 GB"}, "whole number"),
    ({"checkpoint.resume": "yes"}, "'auto', 'always', 'never'"),
    ({"checkpoint.resume_from": "x", "checkpoint.resume": "never"}, "leave one out"),
    ({"checkpoint.resume_from": "/nowhere/at/all", "checkpoint.dir": "own"}, "no such folder"),
    ({"detection.wait_timeout_s": 0}, "above 0"),
    ({"detection.wait_timeout_s": "5 min"}, "number above 0"),
    ({"state.verify_checksums": "perhaps"}, "true or false"),
    ({"seed": 2.7}, "whole number"),
    ({"seed": 2**70}, "at most"),
    ({"replay.randomness": "some"}, "'stock', 'seeded'"),
    ({"replay.parallel": 1}, "'auto', 'always', 'never'"),
    ({"replay.sums": "any"}, "'ordered', 'slices'"),
    ({"reroute.plan": "best"}, "'staggered', 'decoupled', 'coupled'"),
    ({"reroute.reduction": "mean"}, "'sum', 'ordered'"),
    ({"log.messages": "yes"}, "'auto', 'always', 'never'"),
    ({"log.groups": "both"}, "0-3,4-7"),
    ({"log.groups": "0-1,1-2"}, "another group"),
    ({"log.segment_bytes": INF}, "whole number"),
    ({"on_failre": "replace"}, "did you mean 'on_failure'"),
    ({"zzzz": 1}, "known options: on_failure"),
]

#: The same from the environment: variable, value, what the line must hold besides the option's name.
VARIABLES: list[tuple[str, str, str]] = [
    ("SEED", "2.7", "whole number"),
    ("DETECTION_WAIT_TIMEOUT_S", "nan", "above 0"),
    ("DETECTION_WAIT_TIMEOUT_S", "", "number above 0"),
    ("CHECKPOINT_KEEP", "0x10", "whole number"),
    ("CHECKPOINT_BACKGROUND", "2", "true or false"),
    ("CHECKPOINT_DIR", "", "a folder or a URL"),
    ("ON_FAILURE", "", "'replace'"),
    ("WAIT_TIMEOT_S", "3", "did you mean 'detection.wait_timeout_s'"),
]
