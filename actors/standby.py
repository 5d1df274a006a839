"""The two syncers of a run with a hot standby are of this one class: either follows the journal until it leads.

The journal decides who leads: taking over is to claim the next epoch there, and a leader that lost it leaves at the
next thing that it wants to write or say. So both may be wrong about each other without harm.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
import traceback
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from actors.leader import Follows, Standing
from actors.learner import HANG_SIGNAL
from actors.publishing import follower_of
from actors.service import Whereabouts, whereabouts
from actors.spec import RunSpec
from actors.syncer import Syncer, Takeover
from actors.syncer_status import SyncerStatus
from app.diloco.codec import get_codec
from app.diloco.messages import Contribution, Hello, Payload, Reply, Report, Welcome
from app.run.journal import JournalDamaged
from app.run.record import RecordDamaged
from app.run.succession import Seat, Succession

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
"""How often a follower looks at the journal and at the other syncer."""
CONFIRM_SHARE = 0.5
"""A leader says nothing without having known the journal its own within this share of the standby's patience."""


class PairedSyncer:
    """A syncer that leads once it has to; before, it refuses everybody with `Follows`."""

    def __init__(self, spec: RunSpec, name: str):
        """`name` is its own of `spec.syncers`."""
        faulthandler.register(HANG_SIGNAL, all_threads=True)
        torch.set_num_threads(1)
        self._spec = spec
        (self._other,) = (other for other in spec.syncers if other != name)
        self._syncer: Syncer | None = None
        self._rising = False
        self._error: str | None = None
        threading.Thread(target=self._guarded, name="follow", daemon=True).start()

    # ---- what a syncer is asked

    async def join(self, hello: Hello) -> Welcome:
        """As `Syncer.join`."""
        return await self._answer("join", hello)

    async def poll(self, report: Report, *given: Contribution) -> Reply:
        """As `Syncer.poll`."""
        return await self._answer("poll", report, *given)

    async def report(self, report: Report) -> None:
        """As `Syncer.report`."""
        await self._answer("report", report)

    async def lost(self, learner: str, incarnation: int, reason: str) -> None:
        """As `Syncer.lost`."""
        await self._answer("lost", learner, incarnation, reason)

    async def note(self, kind: str, fields: dict[str, Any]) -> None:
        """As `Syncer.note`."""
        await self._answer("note", kind, fields)

    async def finish(self, reason: str, deadline_s: float) -> None:
        """As `Syncer.finish`."""
        await self._answer("finish", reason, deadline_s)

    async def weights(self) -> tuple[tuple[int, ...], list[Payload], int]:
        """As `Syncer.weights`."""
        return await self._answer("weights")

    async def conclude(self) -> None:
        """As `Syncer.conclude`."""
        await self._answer("conclude")

    async def pid(self) -> int:
        """Process id."""
        return os.getpid()

    async def status(self) -> SyncerStatus | Whereabouts:
        """Where the run stands, from the one that leads; the other one says where it is."""
        if self._syncer is None:
            return whereabouts(self._error)
        return await self._answer("status")

    async def standing(self) -> Standing:
        """Whether it leads; answered at once, whatever else goes on."""
        return Standing(0 if self._syncer is None else self._syncer.epoch, self._rising)

    async def _answer(self, method: str, *args: Any) -> Any:
        """What the syncer says, unless it has been replaced before or meanwhile: then this process leaves."""
        if self._syncer is None:
            raise Follows("this syncer does not lead")
        await self._hold()
        answer = await getattr(self._syncer, method)(*args)
        await self._hold()
        return answer

    async def _hold(self) -> None:
        """Know that this one leads. A process that stood still for as long as the standby waits must ask first."""
        patience_s = CONFIRM_SHARE * self._spec.config.syncer.standby_after_s
        if self._syncer is not None:
            await self._syncer.confirm(patience_s)

    # ---- following, in a thread of its own

    def _guarded(self) -> None:
        try:
            self._follow()
        except Exception:
            _log.critical("the syncer failed", exc_info=True)
            self._error = traceback.format_exc()
        finally:
            self._rising = False

    def _follow(self) -> None:
        diloco = self._spec.config.diloco
        for codec in (diloco.codec_up, diloco.codec_down):
            get_codec(codec, diloco.codec_block)  # its kernels are compiled before they are needed
        follower = follower_of(self._spec)
        succession = Succession(self._spec.config.syncer.standby_after_s, time.monotonic())
        other = _Other(self._spec, self._other)
        newest = 0
        while True:
            try:
                follower.follow()
            except (OSError, JournalDamaged, RecordDamaged) as error:  # the one that leads is the one to mend it
                _log.info("the journal can't be followed: %s", error)
            written, newest = 0 < newest < follower.newest, follower.newest
            if succession.due(other.look(LOOK_EVERY_S), written, time.monotonic()):
                break
        self._rising = True
        silent_since = time.time() - time.monotonic() + succession.sign_at if succession.heard else None
        self._syncer = Syncer(self._spec, Takeover(follower, self._hold, silent_since))


class _Other:
    """Looks at the other syncer, without ever waiting for one that does not answer."""

    def __init__(self, spec: RunSpec, name: str):
        self._spec, self._name = spec, name
        self._asked: Any = None
        self._asked_at = 0.0

    def look(self, wait_s: float) -> Seat:
        """Ask unless a question is open, and take what has come after so long."""
        looked_at = time.monotonic()
        seat = self._look(wait_s)
        time.sleep(max(0.0, looked_at + wait_s - time.monotonic()))
        return seat

    def _look(self, wait_s: float) -> Seat:
        now = time.monotonic()
        try:
            if self._asked is None or now - self._asked_at > self._spec.config.syncer.standby_after_s:
                other = ray.get_actor(self._name, namespace=self._spec.namespace)
                self._asked, self._asked_at = other.standing.remote(), now
        except ValueError:
            return Seat.NOBODY
        except RayError:
            return Seat.SILENT  # the cluster's head is away
        if not ray.wait([self._asked], timeout=wait_s)[0]:
            return Seat.SILENT
        asked, self._asked = self._asked, None
        try:
            standing: Standing = ray.get(asked)
        except RayError:
            return Seat.GONE
        return Seat.LEADS if standing.epoch or standing.rising else Seat.FOLLOWS
