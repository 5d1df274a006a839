"""The one error of a wrong setting."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that can't be used. `str()` is one line: the key, the value, what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        super().__init__(" ".join(f"{key}={_shown(value)} is refused: {allowed}".split()))


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
