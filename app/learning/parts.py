"""The parts of a stream: files, or one data set of the hub, each read row by row from a position that can be kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import ConfigError, DataConfig
from app.learning import corpus
from app.learning.hub import hub_missing

READERS = {".txt": "text", **corpus.ROW_READERS}
TEXT = {"sample_by": "document", "encoding_errors": "replace"}
"""A .txt file is one document, as where the text is prepared."""


@dataclass(frozen=True)
class Part:
    """One file, or a whole data set of the hub."""

    config: DataConfig
    file: Path | None

    def open(self) -> Any:
        """Return its rows, a `datasets.IterableDataset` at its start. Raises ConfigError when it can't be read."""
        import datasets

        try:
            if self.file is None:
                return self._hub()
            reader = READERS[self.file.suffix]
            more = TEXT if reader == "text" else {}
            return datasets.load_dataset(reader, data_files=str(self.file), split="train", streaming=True, **more)
        except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise self._refused(error) from error

    def documents(self, rows: Any) -> Iterator[corpus.Document]:
        """Read on, a document a row.

        Raises ConfigError for rows without text, or that can't be read; other errors when the source is away.
        """
        import datasets

        name = str(self.config.hub_name) if self.file is None else self.file.name
        field = "text" if self.file is not None and self.file.suffix == ".txt" else self.config.text_field
        try:
            yield from corpus.row_documents(rows, field, name, self._place)
        except ConfigError:
            raise
        except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise self._refused(error) from error

    def _hub(self) -> Any:
        """As the hub sends it; where it can't be reached, what an earlier use has left in the local cache."""
        import datasets

        config, missing = self.config, hub_missing(str(self.config.hub_name))
        where = (config.hub_name, config.hub_config)
        if missing is None:
            return datasets.load_dataset(*where, split=config.split, streaming=True)
        return datasets.load_dataset(*where, split=config.split).to_iterable_dataset()

    @property
    def _place(self) -> tuple[str, str | None]:
        return corpus.place_of(self.config) if self.file is None else ("data.path", str(self.file))

    def _refused(self, error: BaseException) -> ConfigError:
        return ConfigError(*self._place, f"cannot be read ({corpus.one_line(error)})")


def parts(config: DataConfig) -> list[Part]:
    """The stream's parts, in the order of their names."""
    if config.source == "hub":
        return [Part(config, None)]
    return [Part(config, file) for file in corpus.corpus_files(config)]
