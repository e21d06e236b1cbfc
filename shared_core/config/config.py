"""All options of a job, from code, files and the environment."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from shared_core.config.sections import (
    CheckpointOptions,
    DetectionOptions,
    DeviceOptions,
    LogOptions,
    ReplayOptions,
    RerouteOptions,
    ResizeOptions,
    Section,
    StandbyOptions,
    StateOptions,
    WatchOptions,
    option,
    options_of,
    prefix_of,
)
from shared_core.errors import ConfigError, MissingExtra
from shared_core.kinds import MOST, Choice, NamedPlace, Whole, open_regular

ENV_PREFIX = "SWIFT_RECOVERY_"
#: Variables with the prefix that the agent sets for its workers, or that are no options.
_RESERVED = frozenset(
    "JOB_DIR STORE GENERATION INCARNATION EVENTS CONFIG RESTART RESIZED RUN FILE ADDRESS MACHINES JOB COMMAND "
    "HANDED_OVER SECRET_FILE SPARE".split()
)


@dataclass(frozen=True)
class SwiftConfig(Section):
    """What a user may set: some options by themselves, the others in sections. ``docs/configuration.md`` lists them.

    A section is given as a mapping or as its own class: ``SwiftConfig(checkpoint={"dir": "checkpoints"})``.

    Example::

        options = shared_core.SwiftConfig(on_failure="restart", checkpoint={"dir": "checkpoints", "every_steps": 100})
        print(options.get("checkpoint.every_steps"))
    """

    on_failure: str = option(
        "replace",
        Choice(("replace", "reroute", "shrink", "restart")),
        "`replace`: a replacement takes the failed rank's place. `reroute`: the others compute its share of each step "
        "at once, and admit a replacement at a later step boundary; data-parallel loops need `shared_steps` "
        "([shared_steps](elasticity.md#shared_steps)) or Lightning's `swift_ddp` ([there](elasticity.md#lightning)), "
        "others are refused. `shrink`: the others continue without it ([elasticity.md](elasticity.md)). `restart`: all "
        "workers start again from the newest checkpoint",
    )
    data: str = option(
        "restore",
        Choice(("restore", "refetch", "seeded")),
        "how a replacement regains its place in the data ([loops.md](loops.md#what-is-read-again)). `restore`: what "
        "reading items had changed is put back; what cannot be put back is read again. `refetch`: all that was read of "
        "the pass is read again, cost in proportion. `seeded`: an item's randomness is a function of seed, rank, epoch "
        "and batch; random augmentations differ from those of a run without it",
        late=True,
    )
    seed: int = option(0, Whole(-MOST - 1), 'of `data: "seeded"` and `replay.randomness: "seeded"`', late=True)
    stragglers: str = option(
        "report",
        Choice(("report", "replace", "off")),
        "a rank that computes 1.5 times as long as the others in its last 10 steps, and 20 ms longer: `report` names "
        "it and the part of the step, `replace` has it [leave](launching.md#planned-leaves)",
    )
    notice: str | None = option(
        None,
        NamedPlace("a signal, a file or a command"),
        "what tells that this machine will be taken away, so that it [leaves](launching.md#planned-leaves): a signal "
        "to `swiftrun`, as `SIGUSR1`; a file that appears; or `run:COMMAND`, once that succeeds",
    )
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    resize: ResizeOptions = field(default_factory=ResizeOptions)
    reroute: RerouteOptions = field(default_factory=RerouteOptions)
    replay: ReplayOptions = field(default_factory=ReplayOptions)
    log: LogOptions = field(default_factory=LogOptions)
    detection: DetectionOptions = field(default_factory=DetectionOptions)
    state: StateOptions = field(default_factory=StateOptions)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    standby: StandbyOptions = field(default_factory=StandbyOptions)
    watch: WatchOptions = field(default_factory=WatchOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in SECTIONS.items():
            given = getattr(self, name)
            if isinstance(given, kind):  # asked first: the other question walks through all classes of mappings
                continue
            if isinstance(given, Mapping):
                _refuse_unknown([f"{name}.{key}" for key in given])
                object.__setattr__(self, name, kind(**given))
            else:
                raise ConfigError(f"{name} must be a section of options, got {given!r:.100}")
        if self.reroutes and self.resize.replace_timeout_s:
            raise ConfigError(
                "on_failure='reroute' never changes the number of workers: leave resize.replace_timeout_s out, or "
                "choose on_failure='replace'"
            )

    @property
    def resizes(self) -> bool:
        """Whether the number of workers may change."""
        return self.shrinks or (self.replaces and self.resize.replace_timeout_s > 0)

    @property
    def replaces(self) -> bool:
        """Whether the others wait for the replacement of a rank that fails."""
        return self.on_failure == "replace"

    @property
    def reroutes(self) -> bool:
        """Whether the others continue at once when a rank fails."""
        return self.on_failure == "reroute"

    @property
    def restarts(self) -> bool:
        """Whether all workers start again when a rank fails."""
        return self.on_failure == "restart"

    @property
    def shrinks(self) -> bool:
        """Whether the others continue with fewer workers when a rank fails."""
        return self.on_failure == "shrink"

    @property
    def uses_devices(self) -> bool:
        """Whether tensors may be on other devices than the CPU.

        They may where all workers start again, too: nothing that a device runs is cut off then.
        """
        return self.device.experimental or self.restarts

    @property
    def continues(self) -> bool:
        """Whether a job begins with what an earlier start of the same command has left, or with what it was told to."""
        chosen = self.checkpoint
        wanted = chosen.resume == "always" or (chosen.resume == "auto" and self.restarts)
        return chosen.dir is not None and (wanted or bool(chosen.resume_from))

    @property
    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults, by full name (``checkpoint.dir``)."""
        return {name: value for name, value in self.items() if value != _DEFAULTS[name]}

    def items(self) -> Iterator[tuple[str, Any]]:
        """All options, by full name."""
        for section in (self, *(getattr(self, name) for name in SECTIONS)):
            for each in options_of(section):
                yield prefix_of(section) + each.name, getattr(section, each.name)

    def get(self, name: str) -> Any:
        """The value of an option, by its full name."""
        section, _, last = name.rpartition(".")
        return getattr(getattr(self, section) if section else self, last)

    def merged(self, *values: Mapping[str, Any]) -> SwiftConfig:
        """These options with ``values`` over them, the later over the earlier; names as in :meth:`from_dict`."""
        together = dict(self.changed)
        for each in values:
            together |= full_names(each)
        return _build(together)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SwiftConfig:
        """Build from plain data, as read from YAML, JSON or a ``swift_recovery`` section.

        Args:
            values: options by name; those of a section in a mapping under its name, or by full name.

        Raises:
            ConfigError: for an unknown option (with the closest known name) or a bad value.
        """
        return _build(full_names(values))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> SwiftConfig:
        """Read a ``.json`` or YAML file.

        Raises:
            ConfigError: if it cannot be read or holds an unknown option.
            MissingExtra: for YAML when PyYAML is not installed.
        """
        values = read(Path(path))
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, base: SwiftConfig | None = None) -> SwiftConfig:
        """Options from ``SWIFT_RECOVERY_<OPTION>`` and ``SWIFT_RECOVERY_<SECTION>_<OPTION>``.

        They go over ``SWIFT_RECOVERY_FILE``, over ``SWIFT_RECOVERY_CONFIG`` (set by the launcher), over ``base``.

        Raises:
            ConfigError: as :meth:`from_file`.
        """
        env = os.environ if env is None else env
        sources: list[Mapping[str, Any]] = []
        if ENV_PREFIX + "CONFIG" in env:
            sources.append(parse(env[ENV_PREFIX + "CONFIG"], ENV_PREFIX + "CONFIG", is_json=True))
        if ENV_PREFIX + "FILE" in env:
            sources.append(read(Path(env[ENV_PREFIX + "FILE"])))
        given = {key.removeprefix(ENV_PREFIX): value for key, value in env.items() if key.startswith(ENV_PREFIX)}
        variables = {name.lower(): value for name, value in given.items() if name not in _RESERVED}
        sources.append({_OF_VARIABLES.get(name, name): value for name, value in variables.items()})
        return (base or cls()).merged(*sources)

    def to_json(self) -> str:
        """Inverse of ``from_dict(json.loads(...))``: the options that differ from their defaults.

        So a script can still set in code what the launcher was not told.
        """
        return json.dumps(self.changed)


#: Their classes, by name.
SECTIONS: dict[str, Any] = {e.name: e.default_factory for e in fields(SwiftConfig) if e.default_factory is not MISSING}
_ALL: tuple[type[Section], ...] = (SwiftConfig, *SECTIONS.values())
_FIELDS = {prefix_of(section) + each.name: each for section in _ALL for each in options_of(section)}
_DEFAULTS = {name: each.default for name, each in _FIELDS.items()}
#: ``checkpoint_dir`` -> ``checkpoint.dir``: names in the environment, in lower case.
_OF_VARIABLES = {name.replace(".", "_"): name for name in _FIELDS}
#: Options that say how checkpoints are made; a script may give them to workers that run already.
CHECKPOINT_OPTIONS = frozenset(name for name in _FIELDS if name.startswith("checkpoint."))
#: Options that a script may say alone: a launcher and workers that run already need not know them before.
SCRIPT_OPTIONS = frozenset(name for name, each in _FIELDS.items() if each.metadata["late"])


def variable_of(name: str) -> str:
    """The variable of the environment that sets an option."""
    return ENV_PREFIX + name.replace(".", "_").upper()


def full_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options by full name, as given in sections or by full name. Raises ConfigError for an unknown option, with the
    closest known one, and for what is no mapping.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"options must be a mapping of names to values, not {type(values).__name__}: {values!r:.100}")
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in SECTIONS and isinstance(value, Mapping | Section):
            inside = (
                value if isinstance(value, Mapping) else {o.name: getattr(value, o.name) for o in options_of(value)}
            )
            found |= {f"{name}.{key}": each for key, each in inside.items()}
        else:
            found[name] = value
    _refuse_unknown(found)
    return found


def _refuse_unknown(names: Mapping[str, Any] | list[str]) -> None:
    for name in names:
        if name in _FIELDS:
            continue
        if name in SECTIONS:
            raise ConfigError(f"{name} must be a section of options, for example {name}: {{...}}")
        meant = _meant(str(name))
        hint = f"; did you mean {meant!r}?" if meant else f"; known options: {', '.join(_FIELDS)}"
        raise ConfigError(f"unknown option {name!r}{hint}")


def _meant(name: str) -> str:
    """The known option that is most like an unknown one; empty if none is. First come those that begin with the unknown
    name, or with which it begins: ``checkpoint.directory`` is ``checkpoint.dir``.
    """
    known = [*_FIELDS, *_OF_VARIABLES]
    alike = [each for each in known if name.startswith(each) or (len(name) > 2 and each.startswith(name))]
    # of several that begin with it none is meant
    begins = max(alike, key=len) if len(alike) == 1 or any(map(name.startswith, alike)) else ""
    close = [begins] if begins else difflib.get_close_matches(name, known, n=1)
    return _OF_VARIABLES.get(close[0], close[0]) if close else ""


def _build(values: Mapping[str, Any]) -> SwiftConfig:
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    plain = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        if section:
            sections[section][last] = value
        else:
            plain[name] = value
    return SwiftConfig(**plain, **{name: SECTIONS[name](**inside) for name, inside in sections.items()})


def read(path: Path) -> dict[str, Any]:
    """The mapping that a ``.json`` or YAML file holds. ConfigError if it cannot be read, and as :func:`parse`."""
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be a YAML or JSON file of options: it is not text") from error
    return parse(text, str(path), is_json=path.suffix == ".json")


def parse(text: str, source: str, *, is_json: bool) -> dict[str, Any]:
    """The mapping that a text holds; errors name ``source``. Raises ConfigError if it holds something else,
    MissingExtra for YAML without PyYAML.
    """
    try:
        loaded = json.loads(text) if is_json else _parse_yaml(text, source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} must hold options as YAML or JSON: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{source} must hold a mapping of options, not {type(loaded).__name__}")
    return loaded


def _parse_yaml(text: str, source: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra(
            f"reading {source} needs PyYAML: pip install 'swift-recovery[lightning]', or use a .json file"
        ) from error
    try:
        return yaml.safe_load(text)
    # What its constructors raise for "!!bool x", "!!int ''" and "!!timestamp x" is no YAMLError.
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{error}") from error
