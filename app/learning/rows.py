"""Rows of token ids in a `datasets.Dataset` on disk, read as memory-mapped numpy arrays."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

COLUMN = "input_ids"
TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TokenRows:
    """N rows of S token ids. `take` copies the wanted rows out; nothing else is read from disk.

    An Arrow table lies on disk in record batches, each of them one array: `chunks` are views of those, [n_i, S].
    """

    def __init__(self, chunks: list[TokenArray]) -> None:
        self._chunks = chunks
        self._ends = np.cumsum([len(chunk) for chunk in chunks])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def width(self) -> int:
        """S."""
        return int(self._chunks[0].shape[1])

    def sha256(self) -> str:
        """Of all rows, in hex."""
        digest = hashlib.sha256()
        for chunk in self._chunks:
            digest.update(np.ascontiguousarray(chunk).data)
        return digest.hexdigest()

    def largest(self) -> int:
        """The largest token id."""
        return max(int(chunk.max()) for chunk in self._chunks)

    @staticmethod
    def save(rows: TokenArray, folder: Path) -> None:
        """Write `rows` [N, S] as a dataset that `datasets.load_from_disk` opens."""
        import datasets
        import pyarrow as pa  # type: ignore[import-untyped]

        # built as one Arrow array: from_dict would look at every row
        values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
        features = datasets.Features({COLUMN: datasets.List(datasets.Value(str(rows.dtype)), rows.shape[1])})
        table = pa.table({COLUMN: values}).cast(features.arrow_schema)
        datasets.disable_progress_bars()  # the terminal belongs to whoever shows the run
        datasets.Dataset(table).save_to_disk(str(folder))

    @classmethod
    def open(cls, folder: Path) -> TokenRows:
        """Memory-map a folder that `save` wrote. Raises FileNotFoundError when there is none.

        Reads the Arrow files by pyarrow: importing `datasets` would double the time that a learner takes to restart.
        """
        import pyarrow as pa

        files = json.loads((folder / "state.json").read_text())["_data_files"]
        chunks = []
        for file in files:
            table = pa.ipc.open_stream(pa.memory_map(str(folder / file["filename"]))).read_all()
            column = table.column(COLUMN)
            length = column.type.list_size
            chunks += [c.flatten().to_numpy(zero_copy_only=True).reshape(-1, length) for c in column.chunks]
        return cls(chunks)

    def take(self, indices: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the rows at `indices` [B] as int64 token ids [B, S]."""
        return torch.from_numpy(self._gather(indices).astype(np.int64))

    def _gather(self, indices: npt.NDArray[np.int64]) -> TokenArray:
        # index − end of its chunk is negative: numpy counts it from the chunk's end
        chunk_of = np.searchsorted(self._ends, indices, side="right")
        rows = [self._chunks[chunk][index - self._ends[chunk]] for chunk, index in zip(chunk_of, indices, strict=True)]
        return np.stack(rows)

    def spread(self, count: int) -> TokenRows:
        """Return `count` rows evenly spread over all (all of them when there are fewer), always the same ones."""
        indices = np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(np.int64)
        return TokenRows([self._gather(indices)])
