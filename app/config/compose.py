"""From a command line to one checked `Config`, through Hydra's compose API."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.config.check import check
from app.config.error import ConfigError
from app.config.help import group_options, known_keys
from app.config.schema import Config, Fault

if TYPE_CHECKING:  # hydra and omegaconf are imported where they are used: actors need only the schema
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

NO_CHAOS = "none"

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


def load(overrides: Sequence[str]) -> Config:
    """Compose `conf/` with `key=value` overrides and check the result.

    Raises:
        ConfigError: for whatever is wrong: syntax, key, group option, type or value.
    """
    values = dict(_checked_override(text) for text in overrides)
    config = _compose(list(overrides), values)
    name = values.get("chaos", NO_CHAOS)
    if name != NO_CHAOS and "run.name" not in values:  # beside the undisturbed run, not in its folder
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, name=str(name)))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=config.run.path))
    check(config)
    return config


def as_yaml(config: Config) -> str:
    """The whole configuration as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def from_yaml(text: str) -> Config:
    """The configuration that `as_yaml` wrote.

    Raises:
        ConfigError: for keys or types that the schema doesn't have.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(_schema(), OmegaConf.create(text))
        return _to_config(merged)
    except OmegaConfBaseException as error:
        raise _from_omegaconf(error, {}) from error


def _compose(overrides: list[str], values: dict[str, str]) -> Config:
    from hydra import compose, initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema", node=_schema())
    try:
        with initialize_config_module("conf", version_base="1.3"):
            return _to_config(compose("config", overrides))
    except OmegaConfBaseException as error:
        raise _from_omegaconf(error, values) from error
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException):
            raise _from_omegaconf(cause, values) from error
        raise ConfigError("overrides", " ".join(overrides), str(error)) from error


def _schema() -> DictConfig:
    """The schema as a typed node, unlocked: OmegaConf makes frozen dataclasses read-only."""
    from omegaconf import DictConfig, OmegaConf

    def unlock(node: DictConfig) -> None:
        OmegaConf.set_readonly(node, False)
        for key in node:
            child = node._get_node(key)
            if isinstance(child, DictConfig):
                unlock(child)
                if child._metadata.object_type is dict:  # a dictionary takes new keys, a section doesn't
                    OmegaConf.set_struct(child, False)

    schema = OmegaConf.structured(Config)
    unlock(schema)
    return schema


def _to_config(node: object) -> Config:
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(node)
    assert isinstance(config, Config)
    return config


def _checked_override(text: str) -> tuple[str, str]:
    """Key and value of one override; refuses bad syntax, unknown keys and unknown options."""
    override = _parse(text)
    key, value = override.key_or_group, text.partition("=")[2]
    groups = group_options()
    if key in groups:
        if value not in groups[key]:
            raise ConfigError(key, value, f"allowed are {', '.join(groups[key])}")
    elif not _is_known(key):
        raise ConfigError(key, value, _no_such_key(key))
    return key, value


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


def _is_known(key: str) -> bool:
    """A key of the schema, or an entry of one of its dictionaries."""
    keys = known_keys()
    if key in keys:
        return True
    return any(k.type.startswith("dict") and key.startswith(f"{k.name}.") for k in keys.values())


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
        value = next((v for k, v in values.items() if key == k or key.startswith(f"{k}.")), "?")
    known = known_keys().get(key)
    allowed = f"{TYPE_WORDS[known.type]} is needed" if known else str(error).splitlines()[0]
    return ConfigError(key, value, allowed)
