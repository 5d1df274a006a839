"""Text that is too large to prepare: read once through in its own order, packed into blocks of rows on the way.

A position is a few numbers (the data set's own `state_dict` among them), so any block that came back, from a dead
learner or after a restart, is read again as it was. The files come in an order of their own in every epoch.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.config import ConfigError, DataConfig
from app.learning import corpus, tokenizer
from app.learning.blocks import Place
from app.learning.parts import Part, parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DOCUMENTS = 64
"""Documents that are encoded at a time, and read again by whoever goes on in the middle of them."""


@dataclass(frozen=True)
class Position:
    """Where a block begins: everything that reading on depends on, as JSON-able values."""

    epoch: int = 0
    block: int = 0
    part: int = 0
    """Place of the file in the order of this epoch."""
    rows: dict[str, Any] | None = None
    """State of the file's data set before the documents that are being packed; None at its start."""
    skip: int = 0
    """Tokens of these documents that are in earlier rows, or in `carry`."""
    carry: tuple[int, ...] = ()
    """Tokens before those that are in no row yet: fewer than a row has."""

    def state(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Position:
        """Return the position that `state()` described."""
        return cls(**{**state, "carry": tuple(state["carry"])})


@dataclass(frozen=True)
class Block:
    """Rows [n, S] of token ids, where they begin and what follows them."""

    place: Place
    rows: tokenizer.TokenIds
    start: Position
    end: Position


class Reader:
    """Reads block after block, epoch after epoch, from a position on."""

    def __init__(
        self,
        config: DataConfig,
        every: Sequence[Part],
        tokens: PreTrainedTokenizerFast,
        seed: int,
        position: Position | None = None,
    ) -> None:
        """`every`: the parts, in the order of their names."""
        self._config, self._parts, self._tokens, self._seed = config, every, tokens, seed
        self.first = (int(tokens.eos_token_id),)
        """What an epoch begins with."""
        self._at = position or Position(carry=self.first)
        self._ids: tokenizer.TokenIds | None = None  # of the documents that are being packed
        self._rows: Any = None
        self._documents: Iterator[corpus.Document] = iter(())

    def read(self) -> Block:
        """Return the next block. Raises ConfigError for text that can't be used, or none at all in a whole epoch."""
        start, rows = self._at, self._packed()
        if not len(rows):  # the epoch has ended
            if start.block == 0:
                raise ConfigError(*corpus.place_of(self._config), "there is no text for one sample to train on")
            self._begin(start.epoch + 1)
            start, rows = self._at, self._packed()
        place = Place(start.epoch, start.block, 0, len(rows))
        order = np.random.Generator(np.random.Philox(key=[self._seed, (start.epoch << 32) + start.block]))
        self._at = replace(self._at, block=start.block + 1)
        return Block(place, rows[order.permutation(len(rows))], start, self._at)

    def _begin(self, epoch: int) -> None:
        self._at = Position(epoch=epoch, carry=self.first)
        self._ids = self._rows = None

    def _packed(self) -> tokenizer.TokenIds:
        """Up to `block_samples` rows [n, S]; fewer at the epoch's end, none past it."""
        length, wanted = self._config.seq_len, self._config.block_samples
        packed: list[Any] = []
        while wanted > 0 and (ids := self._current()) is not None:
            stream = np.concatenate([np.array(self._at.carry, ids.dtype), ids[self._at.skip :]])
            count = min(wanted, (len(stream) - 1) // (length - 1))
            packed += [np.lib.stride_tricks.sliding_window_view(stream, length)[:: length - 1][:count]] if count else []
            self._advance(count * (length - 1), len(ids))
            wanted -= count
        rows: tokenizer.TokenIds = np.concatenate(packed) if packed else np.empty((0, length), np.uint16)
        return rows

    def _advance(self, taken: int, size: int) -> None:
        """Go on behind the first `taken` tokens of carry and documents; documents that give no row more are left."""
        at, length, ids = self._at, self._config.seq_len, self._ids
        assert ids is not None
        skip, carry = at.skip + max(0, taken - len(at.carry)), at.carry[taken:]
        if len(carry) + size - skip < length:
            rest = tuple(int(token) for token in ids[skip:])
            self._at = replace(at, rows=self._rows.state_dict(), skip=0, carry=(*carry, *rest))
            self._ids = None
        else:
            self._at = replace(at, skip=skip, carry=carry)

    def _current(self) -> tokenizer.TokenIds | None:
        """The documents that are being packed, encoded; None past the epoch's last."""
        while self._ids is None and self._at.part < len(self._parts):
            if self._rows is None:
                self._open()
            texts = [d.text for d in itertools.islice(self._documents, DOCUMENTS)]
            if texts:
                self._ids = tokenizer.encode(self._tokens, self._config.tokenizer, texts)
            else:
                self._at = replace(self._at, part=self._at.part + 1, rows=None)
                self._rows = None
        return self._ids

    def _open(self) -> None:
        order = np.random.Generator(np.random.Philox(key=[self._seed, self._at.epoch])).permutation(len(self._parts))
        part = self._parts[order[self._at.part]]
        self._rows = part.open()
        if self._at.rows is not None:
            self._rows.load_state_dict(self._at.rows)
        self._documents = trained_on(part.documents(self._rows), self._config)


def head(config: DataConfig) -> list[corpus.Document]:
    """The stream's first documents, those to be held out among them. Raises ConfigError as `corpus.read`."""
    every = itertools.chain.from_iterable(part.documents(part.open()) for part in parts(config))
    return list(itertools.islice(every, config.stream_head))


def trained_on(documents: Iterable[corpus.Document], config: DataConfig) -> Iterator[corpus.Document]:
    """Those with text that are not held out: by the hash of the text, wherever in the stream it comes again."""
    return (d for d in documents if d.text and not corpus.is_held_out(d, config.heldout_share))


class Stream:
    """Blocks for a lease book, read ahead by somebody else; what may have to be issued again can be read again."""

    def __init__(self, config: DataConfig, folder: Path, seed: int, state: dict[str, Any] | None = None) -> None:
        """`folder` is that of the prepared data, where the tokenizer lies. `state`: of a stream to go on from."""
        self._new_reader = functools.partial(Reader, config, parts(config), tokenizer.load(folder / "tokenizer"), seed)
        self._next = None if state is None else Position.of(state["next"])
        issued = [] if state is None else [Position.of(position) for position in state["issued"]]
        self._issued = {(position.epoch, position.block): position for position in issued}
        self._rows: dict[tuple[int, int], tokenizer.TokenIds] = {}
        self._ahead: deque[Block] = deque()
        self._reader = self._new_reader(self._next)

    @property
    def ahead(self) -> int:
        """Blocks that were read and not issued."""
        return len(self._ahead)

    def read(self) -> None:
        """Read one block more; it may take long. Raises ConfigError for text that can't be used.

        Any other error means that the source is away: the next call goes on where this one began.
        """
        try:
            self._ahead.append(self._reader.read())
        except ConfigError:
            raise
        except Exception:
            self._reader = self._new_reader(self._ahead[-1].end if self._ahead else self._next)
            raise

    def place(self, _number: int, /) -> Place | None:
        """Issue the next block; None when none was read yet."""
        if not self._ahead:
            return None
        block = self._ahead.popleft()
        self._next = block.end
        self._issued[block.place.epoch, block.place.block] = block.start
        self._rows[block.place.epoch, block.place.block] = block.rows
        return block.place

    def rows(self, epoch: int, block: int) -> tokenizer.TokenIds:
        """Return all rows [n, S] of a block that was issued; read again, which may take long, where it must be.

        Raises KeyError for one that was not, or that `keep` has let go, and what `read` raises.
        """
        position = self._issued[epoch, block]
        if (epoch, block) not in self._rows:
            self._rows[epoch, block] = self._new_reader(position).read().rows
        return self._rows[epoch, block]

    def keep(self, outstanding: set[tuple[int, int]]) -> None:
        """Let go of all issued blocks but these."""
        for key in self._issued.keys() - outstanding:
            del self._issued[key]
        for key in self._rows.keys() - outstanding:
            del self._rows[key]

    def state(self) -> dict[str, Any]:
        """Return what a restart needs, as JSON-able values; what was read and not issued is read again."""
        following = self._next or Position(carry=self._reader.first)
        return {"next": following.state(), "issued": [position.state() for position in self._issued.values()]}
