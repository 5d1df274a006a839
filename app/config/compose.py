"""From a command line to one checked `Config`, through Hydra's compose API."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from app.config.chaos import Fault
from app.config.check import check
from app.config.error import ConfigError
from app.config.help import find_key, group_options, known_keys
from app.config.pools import PoolConfig, sizes_of
from app.config.schema import LEARNING_RATES, Config, TrainConfig
from app.diloco.outer_defaults import outer_defaults

if TYPE_CHECKING:  # hydra and omegaconf are imported where they are used: actors need only the schema
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

USUAL = {"algo": "decoupled", "chaos": "none"}
"""Groups whose other options make another run: its folder is named after them."""
POOL = re.compile(r"pools\.([^.=]+)(?=[.=]|$)")
MOST_DEPTH = 16
"""Levels of a configuration in YAML; ours have four."""
TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "str | None": "a text or null",
    "int | None": "a whole number or null",
    "list[str]": "a list of texts, as in [a,b]",
    "dict[str, str]": "texts by name, as in {name: text}",
    "list[Fault]": "a list of faults, as in [{kind: kill, target: learner-1, at: 0.4}]",
}


def load(overrides: Sequence[str], here: bool = True) -> Config:
    """Compose `conf/` with `key=value` overrides and check the result.

    Args:
        overrides: the command line.
        here: the run starts on this machine, so that files which it names must be there.

    Raises:
        ConfigError: for whatever is wrong: syntax, key, group option, type or value.
    """
    values = dict(_checked_override(text) for text in overrides)
    config = _compose(overrides, values)
    apart = [values[group] for group, usual in USUAL.items() if values.get(group, usual) != usual]
    if apart and "run.name" not in values:  # beside the usual run, not in its folder
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, name="-".join(apart)))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=config.run.path))
    check(config, here)
    return config


def as_yaml(config: Config) -> str:
    """The whole configuration as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def from_yaml(text: str) -> Config:
    """The configuration that `as_yaml` wrote.

    Raises:
        ConfigError: for what is no such text, and for keys or types that the schema doesn't have.
    """
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        _check_yaml(text)
        read = OmegaConf.create(text)
        missing = [f.name for f in dataclasses.fields(Config) if not isinstance(read, DictConfig) or f.name not in read]
        config = _to_config(OmegaConf.merge(_schema(), read))
        if missing:
            raise ConfigError(missing[0], None, "it is missing")
        return config
    except OmegaConfBaseException as error:
        raise _from_omegaconf(error, {}) from error
    except (yaml.YAMLError, RecursionError, AssertionError, AttributeError, TypeError) as error:
        raise ConfigError("config", "?", f"no YAML of a configuration ({error})") from error


def _check_yaml(text: str) -> None:
    """Refuse what takes gigabytes or minutes to read, however short it is: aliases, and nesting without end."""
    import yaml

    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise ConfigError("config", "*", "an alias can't be used")
        name = type(token).__name__
        depth += name.endswith(("SequenceStartToken", "MappingStartToken"))
        depth -= name.endswith(("SequenceEndToken", "MappingEndToken", "BlockEndToken"))
        if depth > MOST_DEPTH:
            raise ConfigError("config", "?", f"at most {MOST_DEPTH} levels are possible")


def _compose(overrides: Sequence[str], values: dict[str, str]) -> Config:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return _composed(overrides)
    except OmegaConfBaseException as error:
        raise _from_omegaconf(error, values) from error
    except HydraException as error:
        _check_pool_names(overrides, values)
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException):
            raise _from_omegaconf(cause, values) from error
        raise ConfigError("overrides", " ".join(overrides), str(error)) from error


def _composed(overrides: Sequence[str]) -> Config:
    from hydra import compose, initialize_config_module
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    added = _added_pools(overrides)
    ConfigStore.instance().store(name="schema", node=_schema(added))
    OmegaConf.register_new_resolver("half", lambda number: number // 2, replace=True)
    OmegaConf.register_new_resolver("inner_lr", lambda _root_: _inner_lr(_root_), replace=True)
    OmegaConf.register_new_resolver("outer_lr", lambda _root_: _outer_defaults(_root_)[0], replace=True)
    OmegaConf.register_new_resolver("outer_momentum", lambda _root_: _outer_defaults(_root_)[1], replace=True)
    with initialize_config_module("conf", version_base="1.3"):
        return _to_config(compose("config", [_forced(text) for text in overrides]), added)


def _inner_lr(config: Any) -> float:
    """The learning rate that suits the inner optimizer. One that is not known is refused by `check`."""
    return LEARNING_RATES.get(config.train.optimizer, TrainConfig.lr)


def _outer_defaults(config: Any) -> tuple[float, float]:
    """η and μ for the inner optimizer and the outer rounds in the budget. What is wrong with these, `check` says."""
    train = config.train
    tokens = _samples_a_step(config) * config.data.seq_len * config.diloco.sync_interval
    return outer_defaults(train.tokens / tokens if tokens > 0 else 0, train.optimizer, config.diloco)


def _samples_a_step(config: Any) -> float:
    """What all learners take while the global clock makes a step: the K-th fastest one's, unless all wait for all."""
    train = config.train
    sizes = sizes_of(config.learners, config.pools)
    pools = [
        (
            sizes[name],
            (pool.batch_size or train.batch_size)
            * (pool.accumulation or train.accumulation)
            * pool.workers_per_learner,
            pool.slowdown,
        )
        for name, pool in config.pools.items()
    ]
    if config.diloco.blocking or any(slowdown <= 0 for _, _, slowdown in pools):
        return float(sum(count * samples for count, samples, _ in pools))
    faster, pace = 0, 1.0
    for count, _, slowdown in sorted(pools, key=lambda pool: pool[2]):
        if faster < config.diloco.min_quorum:
            pace = slowdown
        faster += count
    return sum(count * samples * pace / slowdown for count, samples, slowdown in pools)


def _check_pool_names(overrides: Sequence[str], values: dict[str, str]) -> None:
    """Something is wrong with these overrides: refuse those that name a pool which is not there."""
    wanted = {key: match[1] for key in values if (match := POOL.match(key))}
    if wanted:
        rest = [text for text in overrides if not POOL.match(text.lstrip("+"))]
        pools = [*_composed(rest).pools, *_added_pools(overrides)]
        for key, name in wanted.items():
            if name not in pools:
                allowed = f"the pools are {', '.join(pools)}; +pools.{name}.min_learners=... adds one"
                raise ConfigError(key, values[key], allowed)


def _schema(added_pools: Sequence[str] = ()) -> DictConfig:
    """The schema as a typed node that can be written to: OmegaConf locks what is made of frozen dataclasses.

    Without the default pools: what is composed or read brings its own.
    """
    from omegaconf import DictConfig, OmegaConf

    def unlock(node: DictConfig) -> None:
        OmegaConf.set_readonly(node, False)
        for key in node:
            child = node._get_node(key)
            if isinstance(child, DictConfig):
                unlock(child)

    pool = _unfrozen(PoolConfig)  # every new pool is made of this class, and must not be locked
    kind = types.GenericAlias(dict, (str, pool))
    pools = ("pools", kind, field(default_factory=lambda: {name: pool() for name in added_pools}))
    schema = OmegaConf.structured(_unfrozen(Config, pools))
    unlock(schema)
    return schema


def _unfrozen(cls: type, *others: tuple[str, Any, Any]) -> Any:
    """The same dataclass, not frozen, with `others` (name, type, field) in place of its fields of these names."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: (f.name, hints[f.name], copy.copy(f)) for f in dataclasses.fields(cls)}
    return dataclasses.make_dataclass(cls.__name__, (fields | {other[0]: other for other in others}).values())


def _to_config(node: object, added_pools: Sequence[str] = ()) -> Config:
    """The configuration in a node of the schema; pools that were added come last."""
    from omegaconf import OmegaConf

    fields = vars(OmegaConf.to_object(node))
    pools = fields["pools"]
    names = [*(name for name in pools if name not in added_pools), *added_pools]
    return Config(**fields | {"pools": {name: PoolConfig(**vars(pools[name])) for name in names}})


def _checked_override(text: str) -> tuple[str, str]:
    """Key and value of one override; refuses bad syntax, unknown keys and unknown options."""
    override = _parse(text)
    key, value = override.key_or_group, text.partition("=")[2]
    groups = group_options()
    if key in groups:
        if value not in groups[key]:
            raise ConfigError(key, value, f"allowed are {', '.join(groups[key])}")
    elif find_key(key) is None and not (override.is_add() and POOL.fullmatch(key)):
        raise ConfigError(key, value, _no_such_key(key))
    return key, value


def _added_pools(overrides: Sequence[str]) -> list[str]:
    """Names of the pools that overrides such as `+pools.extra.learners=2` add, in their order."""
    found = [POOL.match(text[1:]) for text in overrides if text.startswith("+")]
    return list(dict.fromkeys(match[1] for match in found if match))


def _forced(text: str) -> str:
    """An override as Hydra wants it where it makes a pool, or an entry of a dictionary of texts."""
    key = text.partition("=")[0].lstrip("+")
    known = find_key(key)
    if text.startswith("+"):
        return f"++{text.lstrip('+')}" if POOL.match(key) else text
    return f"++{text}" if known is not None and known.type == "dict[str, str]" else text


def _parse(text: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = text.partition("=")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        allowed = "key=value is needed, with quotes round special characters"
        raise ConfigError(key if equals else "override", value if equals else text, allowed) from error
    if override.is_delete():
        raise ConfigError(key, value, "a key can't be removed, only set: key=value")
    if "@" in key:
        raise ConfigError(key, value, "a group has one place: group=option, without @")
    known = override.key_or_group in known_keys() or override.key_or_group in group_options()
    if known and key.startswith("+") and not (key.startswith("++") and override.key_or_group in known_keys()):
        raise ConfigError(key, value, f"it is there already: {override.key_or_group}={value}, without +")
    if override.is_sweep_override():
        raise ConfigError(key, value, "one value is needed, not several")
    return override


def _no_such_key(key: str) -> str:
    names = [*known_keys(), *group_options()]
    close = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    last = key.rsplit(".", 1)[-1]
    close += [name for name in names if name.rsplit(".", 1)[-1] == last and name not in close]
    if close:
        return f"no such key; close to it: {', '.join(close)}"
    return "no such key; --help lists all"


def _from_omegaconf(error: Exception, values: dict[str, str]) -> ConfigError:
    """The key that an OmegaConf error names, the value given for it, the type the schema wants."""
    key = str(getattr(error, "full_key", None) or getattr(error, "key", None) or "config")
    if getattr(error, "object_type", None) is Fault:
        key, value = f"chaos.faults.{key}", values.get("chaos.faults", "?")
    else:
        given = next((k for k in values if f"{key}.".startswith(f"{k}.") or k.startswith(f"{key}.")), None)
        key, value = (key, "?") if given is None else (max(key, given, key=len), values[given])
    known = find_key(key)
    allowed = f"{TYPE_WORDS[known.type]} is needed" if known else str(error).splitlines()[0]
    return ConfigError(key, value, allowed)
