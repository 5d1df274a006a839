"""Whether a message is one at all: its class, and type, length and range of each of its fields.

What stands in a message was written by another process. It is looked at here before anything is computed, allocated
or written from it; whether the values are possible is for the rules of the protocol to say. Nothing here raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from app.diloco.messages import Ask, Contained, Contribution, Hello, Offer, Reply, Report, Sender, Welcome

Check = Callable[[Any], bool]

MOST_COUNT = 2**62
"""No counter reaches it: sums of a few, also with the size of a fragment, stay far from any limit."""
MOST_TEXT = 1024
"""Characters of a name, a hash or a token."""
MOST_ENTRIES = 2**16
"""Of a list whose length the layout does not tell."""
DISCARDS = ("overwritten", "missed")
"""Reasons for which a learner discards work; `Held` is what uses them."""


def sender_of(message: object) -> Sender | None:
    """Who sent a report or a contribution, whatever else is in it; None where it does not say."""
    sender = vars(message).get("sender") if type(message) in (Report, Contribution) else None
    return sender if isinstance(sender, Sender) and _sender(sender) else None


def round_of(message: object) -> tuple[int, int] | None:
    """Fragment and round that a contribution says it is for, whatever else is in it."""
    if type(message) is not Contribution:
        return None
    fragment, number = vars(message).get("fragment"), vars(message).get("round")
    return (fragment, number) if type(fragment) is int and type(number) is int else None


def is_report(message: object, fragments: int) -> bool:
    """Whether it is a report of a learner with so many fragments."""
    return _whole(message, Report, _report(fragments))


def is_contribution(message: object, fragments: int) -> bool:
    """Whether it is a contribution to one of so many fragments, with a report of the same incarnation."""
    if not _whole(message, Contribution, _contribution(fragments)):
        return False
    assert isinstance(message, Contribution)
    mine, reported = message.sender, message.report.sender
    return (mine.run_id, mine.learner, mine.incarnation) == (reported.run_id, reported.learner, reported.incarnation)


def is_hello(message: object) -> bool:
    """Whether it asks to join."""
    return _whole(message, Hello, _HELLO)


def is_welcome(message: object, fragments: int) -> bool:
    """Whether it admits a learner, with a full value of each of so many fragments."""
    if not _whole(message, Welcome, _welcome(fragments)):
        return False
    assert isinstance(message, Welcome)
    offers = message.offers
    in_full = all(offer.base_version is None for offer in offers)
    return in_full and sorted(offer.fragment for offer in offers) == list(range(fragments))


def is_reply(message: object, fragments: int) -> bool:
    """Whether it answers a poll of a learner with so many fragments."""
    return _whole(message, Reply, _reply(fragments))


def _whole(message: object, kind: type, checks: Mapping[str, Check]) -> bool:
    if type(message) is not kind:
        return False
    values = vars(message)
    return values.keys() == checks.keys() and all(check(values[name]) for name, check in checks.items())


# ---- fields


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_COUNT


def _number(value: object) -> bool:
    """Also NaN and infinities: the loss of a model that diverged."""
    return type(value) is float or (type(value) is int and abs(value) < MOST_COUNT)


def _amount(value: Any) -> bool:
    return _number(value) and math.isfinite(value) and value >= 0


def _flag(value: object) -> bool:
    return type(value) is bool


def _text(value: object) -> bool:
    """What can be written down: no half of a surrogate pair."""
    return type(value) is str and len(value) <= MOST_TEXT and not any("\ud800" <= c <= "\udfff" for c in value)


def _name(value: Any) -> bool:
    """Of a learner: it becomes part of file names."""
    return _text(value) and value not in ("", ".", "..") and value.isprintable() and not set(value) & set("/\\")


def _payload(value: Any) -> bool:
    """Contiguous uint8 [bytes]; of no class that could do something else when it is read."""
    return type(value) is np.ndarray and value.dtype == np.uint8 and value.ndim == 1 and value.flags.c_contiguous


def _below(bound: int) -> Check:
    return lambda value: type(value) is int and 0 <= value < bound


def _tuple(item: Check, least: int, most: int) -> Check:
    return lambda value: type(value) is tuple and least <= len(value) <= most and all(map(item, value))


def _table(key: Check, item: Check, most: int) -> Check:
    return lambda value: (
        type(value) is dict and len(value) <= most and all(key(k) and item(v) for k, v in value.items())
    )


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _of(kind: type, checks: Mapping[str, Check]) -> Check:
    return lambda value: _whole(value, kind, checks)


def _cut_id(value: object) -> bool:
    return _tuple(_count, 2, 2)(value)


# ---- messages

_SENDER: Mapping[str, Check] = {"run_id": _text, "epoch": _count, "learner": _name, "incarnation": _count}
_HELLO: Mapping[str, Check] = {
    "run_id": _text,
    "learner": _name,
    "layout_hash": _text,
    "pool": _text,
    "token": _text,
    "timeline": _table(_text, _amount, MOST_ENTRIES),
    "cpu_s": _amount,
}
_CONTAINED: Mapping[str, Check] = {
    "learner": _name,
    "incarnation": _count,
    "epoch": _count,
    "round": _count,
    "base": _count,
    "version": _count,
    "c_steps": _count,
    "c_tokens": _count,
    "weight": _amount,
    "samples": _count,
}


def _sender(value: object) -> bool:
    return _whole(value, Sender, _SENDER)


@cache
def _report(fragments: int) -> Mapping[str, Check]:
    of_each = _table(lambda reason: reason in DISCARDS, _count, len(DISCARDS))
    return {
        "sender": _sender,
        "seq": _count,
        "heard": _count,
        "clock": _count,
        "steps": _count,
        "tokens": _count,
        "step_time": _amount,
        "loss": _number,
        "held": _tuple(_count, fragments, fragments),
        "discarded": _tuple(of_each, fragments, fragments),
        "outstanding": _tuple(_count, fragments, fragments),
        "idle": _flag,
        "leaving": _flag,
        "need_full": _tuple(_below(fragments), 0, fragments),
        "samples": _count,
        "cut_taken": _maybe(_cut_id),
        "cut_saved": _maybe(_cut_id),
    }


@cache
def _contribution(fragments: int) -> Mapping[str, Check]:
    return {
        "sender": _sender,
        "fragment": _below(fragments),
        "round": _count,
        "base_version": _count,
        "c_steps": _count,
        "c_tokens": _count,
        "codec": _text,
        "payload": _payload,
        "digest": _text,
        "report": _of(Report, _report(fragments)),
    }


@cache
def _offer(fragments: int) -> Mapping[str, Check]:
    return {
        "fragment": _below(fragments),
        "version": _count,
        "epoch": _count,
        "clock": _count,
        "base_version": _maybe(_count),
        "codec": _text,
        "payload": _payload,
        "digest": _text,
        "contains": _tuple(_of(Contained, _CONTAINED), 0, MOST_ENTRIES),
        "restart": _flag,
    }


@cache
def _ask(fragments: int) -> Mapping[str, Check]:
    return {"fragment": _below(fragments), "round": _count, "epoch": _count, "version": _count}


@cache
def _welcome(fragments: int) -> Mapping[str, Check]:
    return {
        "sender": _sender,
        "clock": _count,
        "offers": _tuple(_of(Offer, _offer(fragments)), fragments, fragments),
        "tokens_processed": _count,
        "finish": _flag,
        "seq": lambda value: value == -1 or _count(value),
        "donors": _tuple(_name, 0, MOST_ENTRIES),
    }


@cache
def _reply(fragments: int) -> Mapping[str, Check]:
    return {
        "epoch": _count,
        "clock": _count,
        "tokens_processed": _count,
        "live": _count,
        "asks": _tuple(_of(Ask, _ask(fragments)), 0, fragments),
        "offers": _tuple(_of(Offer, _offer(fragments)), 0, fragments),
        "finish": _flag,
        "fenced": _flag,
        "cut": _maybe(_cut_id),
    }
