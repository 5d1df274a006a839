"""The learning rate as a function of global tokens, and the learner's estimate of those between two updates."""

from __future__ import annotations

import math
from collections import deque

from app.config import TrainConfig

HISTORY = 8
"""Updates over which growth is measured: single ones are too uneven."""
MOST_GROWTH = 8.0
"""Growth of the global count per own token is at most this many times the live learners."""


def learning_rate(tokens: int, config: TrainConfig) -> float:
    """Return the learning rate after `tokens` global tokens: linear warm-up, then a cosine down to its share.

    lr · n/n_w for n < n_w;  lr · (s + (1−s)·(1 + cos π·(n−n_w)/(N−n_w))/2) after that, with n tokens, n_w
    `warmup_tokens`, N the budget `tokens`, s `min_lr_share`. Beyond the budget it stays at lr·s.
    """
    if tokens < config.warmup_tokens:
        return config.lr * max(0, tokens) / config.warmup_tokens
    if tokens >= config.tokens:
        return config.lr * config.min_lr_share
    done = (tokens - config.warmup_tokens) / (config.tokens - config.warmup_tokens)
    share = config.min_lr_share
    return config.lr * (share + (1 - share) * (1 + math.cos(math.pi * done)) / 2)


def rejoin_factor(steps_since_join: int, rejoin_warmup_steps: int) -> float:
    """Return what the learning rate is multiplied by while the moments are still empty after a rejoin, up to 1.

    `steps_since_join` counts the steps taken: step number k of n (from 1) runs at k/n.
    """
    if steps_since_join >= rejoin_warmup_steps:
        return 1.0
    return (steps_since_join + 1) / rejoin_warmup_steps


class TokenEstimate:
    """The global token count as a learner knows it: exact at updates, extrapolated from its own progress between.

    Never falls, never passes the budget. Without updates (a lost syncer) it goes on as the pool went before.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._updates: deque[tuple[int, int]] = deque(maxlen=HISTORY)  # (global tokens, own tokens)
        self._live = 1
        self._highest = 0

    def update(self, global_tokens: int, own_tokens: int, live: int) -> None:
        """Take the syncer's count of global tokens, the own count at that moment, and the live learners."""
        self._live = max(1, live)
        if not self._updates or own_tokens > self._updates[-1][1]:
            self._updates.append((global_tokens, own_tokens))
        else:  # no own step since the last update: only the newer count matters
            self._updates[-1] = (max(global_tokens, self._updates[-1][0]), self._updates[-1][1])
        self.at(own_tokens)

    def at(self, own_tokens: int) -> int:
        """Return the estimated global tokens when this learner has processed `own_tokens`."""
        known, then = self._updates[-1] if self._updates else (0, 0)
        estimate = known + round(max(0, own_tokens - then) * self._growth())
        self._highest = min(self._budget, max(self._highest, estimate))
        return self._highest

    def _growth(self) -> float:
        """Return global tokens per own token over the history; the live learners' number before there is one."""
        if len(self._updates) < 2:
            return float(self._live)
        (old_global, old_own), (new_global, new_own) = self._updates[0], self._updates[-1]
        return min(max((new_global - old_global) / (new_own - old_own), 1.0), MOST_GROWTH * self._live)
