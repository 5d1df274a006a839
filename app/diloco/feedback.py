"""Error feedback: what a codec left out of one contribution is added to the learner's next one of that fragment.

A contribution is d = θ − Θ̂_base. With feedback the learner sends encode(d + e); the syncer reads q = decode(…), and
ε = d + e − q is missing. What e becomes depends on what the learner keeps of d when it adopts the version that
contains the contribution. Take one learner, η = 1 and μ = 0, so that this version is Θ̂_base + q:

    overwrite  θ ← Θ̂_base + q          nothing of d is kept, so all of ε must be carried
    mix α      θ ← Θ̂_base + αd + (1−α)q  the next d starts with α(d − q): that part is carried by θ
    rebase     θ ← Θ̂_base + d          the next d starts with d − q: θ carries everything

No work is lost or sent twice if θ + e does not change by an adoption. With s the share of its own progress that the
learner keeps (0, α, 1), θ changes by −(1−s)(d − q), and e by as much the other way:

    e ← e + (1−s)(d − q) = s·e + (1−s)·ε

a mean of two bounded errors, so it never grows. Rebase needs no e: it starts at 0 and stays there. Nor does
`keep`, where d is always all that Θ̂ lacks.

With more learners the version holds a mean instead of q; what each gave is still q, and the same rule keeps the sum of
what it gave equal to the sum of what it did, but for the last e.

Which contributions count. e changes only when an offer says that a version contains one. One that was refused, lost
or given up moved no Θ: its e was not delivered, so it stays. Two contributions may have been sent with the same e, if
the first one's fate was still open, but never are both merged: the syncer takes nothing whose base is older than a
version that holds this learner's work, and with that base the learner adopted what that version contains. Under mix a
contribution that is contained after another version was adopted is treated like any other; θ then has less than α of
d − q, and the difference is lost, as mix loses progress anyway. With the learner's death e is lost, like all of its
work without a fate.

Source: 1-bit SGD (Seide et al. 2014), EF-SGD (arXiv 1901.09847); relative to a base and with s: ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from app.diloco.settings import DilocoSettings


@dataclass
class Feedback:
    """The carried error e of one fragment of one learner, fp32 [numel]; None is 0. Replaced, never written in place."""

    kept: float
    """s: the share of its own progress that the learner keeps at an adoption."""
    error: Tensor | None = None

    def wanted(self, delta: Tensor) -> Tensor:
        """d + e: what the next contribution should deliver."""
        return delta if self.error is None else delta + self.error

    def contained(self, residue: Tensor) -> None:
        """A version contains the contribution that left `residue`, its ε."""
        fresh = (1 - self.kept) * residue
        self.error = fresh if self.error is None else self.kept * self.error + fresh


def feedback_for(settings: DilocoSettings) -> Feedback | None:
    """The feedback of a fragment, or None where there is no error to carry."""
    if not settings.error_feedback or settings.codec_up == "fp32" or settings.adopt in ("rebase", "keep"):
        return None
    return Feedback(settings.mix_alpha if settings.adopt == "mix" else 0.0)
