"""Θ̄, the average of Θ over the latest part of the run: the model that is evaluated and exported.

Θ itself swings about the path of the run, as the learners' noise and the outer momentum make it; its average lies
closer to the path, and costs nobody a byte or a step. The same gain is known from averaging along plain SGD (Polyak and
Juditsky 1992; arXiv 1803.05407). Learners never see Θ̄.
"""

from __future__ import annotations

from torch import Tensor

from app.diloco.settings import DilocoSettings


def average_weight(settings: DilocoSettings, before: int, clock: int, last: bool) -> float:
    """The weight of a new Θ in Θ̄: (steps since the version before) / (`average` · all steps), 0 to 1.

    So Θ̄ remembers about the share `average` of the run, however long it is by now. In the last round (`last`) Θ is the
    mean of all learners' weights and weighs at least `average_last`. `before` and `clock`: global clock of the version
    before and of this one.
    """
    horizon = settings.average * clock
    weight = min(1.0, (clock - before) / horizon) if horizon > 0 else 1.0
    return max(weight, settings.average_last) if last else weight


def averaged(average: Tensor, theta: Tensor, weight: float) -> Tensor:
    """Θ̄ + weight · (Θ − Θ̄), a new fp32 tensor of the same shape; Θ itself where the weight is 1.

    Multiplication and addition are separate operations, so that the bits do not depend on the number of threads.
    """
    return theta if weight == 1 else average + (theta - average) * weight
