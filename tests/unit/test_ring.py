import numpy as np
import pytest

from app.diloco.ring import Ring


def change(version: int) -> np.ndarray:
    return np.full(3, version, dtype=np.uint8)


def filled(capacity: int, versions: int) -> Ring:
    ring = Ring(capacity)
    for version in range(versions):
        ring.push(version, change(version) if version else None)
    return ring


def test_keeps_the_last_versions() -> None:
    ring = filled(capacity=3, versions=5)
    assert (ring.oldest, ring.newest) == (2, 4)
    assert [version for version in range(-1, 7) if version in ring] == [2, 3, 4]


def test_changes_reach_back_one_version_behind_the_oldest() -> None:
    ring = filled(capacity=3, versions=5)
    got = {after: ring.changes(after) for after in range(6)}
    values = {after: None if x is None else [int(c[0]) for c in x] for after, x in got.items()}
    assert values == {0: None, 1: [2, 3, 4], 2: [3, 4], 3: [4], 4: [], 5: None}


def test_an_unknown_change_breaks_the_chain() -> None:
    ring = Ring(4)
    ring.push(7, None)
    ring.push(8, change(8))
    assert ring.changes(6) is None
    assert [c.tolist() for c in ring.changes(7) or []] == [[8, 8, 8]]


def test_starts_anywhere_and_goes_on_by_one() -> None:
    ring = Ring(2)
    ring.push(41, None)
    for wrong in (40, 41, 43):
        with pytest.raises(ValueError, match=f"version {wrong} cannot follow version 41"):
            ring.push(wrong, None)
    ring.push(42, change(42))
    assert ring.newest == 42


def test_holds_private_copies() -> None:
    ring = Ring(2)
    payload = change(1)
    ring.push(1, payload)
    payload[:] = 0
    assert [c.tolist() for c in ring.changes(0) or []] == [[1, 1, 1]]


def test_an_empty_ring_has_nothing() -> None:
    ring = Ring(2)
    assert 0 not in ring
    assert ring.changes(0) is None
    with pytest.raises(IndexError):
        _ = ring.newest
    with pytest.raises(IndexError):
        _ = ring.oldest


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Ring(0)
