"""What the fuzz tests share: how long they look, and what may stand where something else should."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
SHORT = settings(max_examples=60, derandomize=True, **_COMMON)
"""Every time: the same examples, in seconds."""
LONG = settings(max_examples=5000, **_COMMON)
"""When asked for by `-m slow`: others each time."""
efforts = pytest.mark.parametrize(
    "effort",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(LONG, id="long", marks=(pytest.mark.slow, pytest.mark.timeout(1800))),
    ],
)


class Foreign:
    """Of a class that nobody knows, and that does not like to be looked at."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"asked for {name}")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


class Sneaky(np.ndarray):
    """An array of a class of its own."""


_ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "empty": lambda: np.zeros(0, np.uint8),
    "long": lambda: np.zeros(100_000, np.uint8),
    "fp32": lambda: np.zeros(64, np.float32),
    "nan": lambda: np.full(64, np.nan, np.float32).view(np.uint8),
    "square": lambda: np.zeros((4, 16), np.uint8),
    "strided": lambda: np.zeros(128, np.uint8)[::2],
    "subclass": lambda: np.zeros(64, np.uint8).view(Sneaky),
    "objects": lambda: np.zeros(64, object),
    "one byte repeated": lambda: np.broadcast_to(np.zeros(1, np.uint8), 64),
    "one byte repeated without end": lambda: np.broadcast_to(np.zeros(1, np.uint8), 2**40),
}
_TEXTS = {
    "path": "../../a",
    "long": "x" * 100_000,
    "surrogate": "\ud800",
    "nul": "\0",
    "another learner": "learner-0",
    "codec": "fp32",
    "empty": "",
}
_NUMBERS: dict[str, object] = {
    **{str(n): n for n in (-1, 0, 1, 3, 2**31, 2**53, 2**62, 2**63, -(2**63))},
    "huge": 10**400,
    **{str(x): x for x in (0.0, -0.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324)},
    "numpy": np.int64(3),
    "numpy flag": np.bool_(True),
    "complex": 1 + 2j,
    "true": True,
}
# drawn by name: a failure then shows the names, not the values
arrays = st.sampled_from(sorted(_ARRAYS)).map(lambda name: _ARRAYS[name]())
texts = st.sampled_from(sorted(_TEXTS)).map(_TEXTS.__getitem__)
numbers = st.sampled_from(sorted(_NUMBERS)).map(_NUMBERS.__getitem__)
values = st.one_of(st.none(), numbers, texts, arrays, st.binary(max_size=8), st.builds(Foreign), st.just(Foreign))
tables = st.dictionaries(st.sampled_from(["missed", "overwritten", "stolen"]), numbers, max_size=2)
anything = st.one_of(
    values,
    st.lists(values, max_size=3),
    st.lists(st.one_of(numbers, values), max_size=3).map(tuple),
    st.lists(numbers, min_size=2, max_size=2).map(tuple),
    st.lists(tables, min_size=2, max_size=2).map(tuple),
    st.dictionaries(st.one_of(texts, st.integers()), values, max_size=3),
)


def flipped(data: bytes, place: int) -> bytes:
    """The data with one bit changed; places count round."""
    changed = bytearray(data)
    changed[place // 8 % len(changed)] ^= 1 << place % 8
    return bytes(changed)
