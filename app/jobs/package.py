"""The code that travels with a job: what `pyproject.toml` installs, and nothing else of the folder."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

from app.jobs.job import JobError

MOST_BYTES = 50 * 1024 * 1024
"""Of the package; Ray refuses 100 MiB."""
_DATE = (1980, 1, 1, 0, 0, 0)
"""Of every file in it: the same code makes the same package, which a cluster that has it is not sent again."""


def write_package(root: Path, target: Path) -> int:
    """Zip the packages of the project at `root`. Returns the bytes of the zip. Raises JobError."""
    with zipfile.ZipFile(target, "w") as archive:
        for path in _files(root):
            entry = zipfile.ZipInfo(path.relative_to(root).as_posix(), _DATE)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    size = target.stat().st_size
    if size > MOST_BYTES:
        raise JobError(f"{', '.join(_packages(root))} in {root} come to {size:,} bytes, {MOST_BYTES:,} are allowed")
    return size


def _files(root: Path) -> list[Path]:
    found = [path for name in _packages(root) for path in (root / name).rglob("*")]
    return sorted(path for path in found if path.is_file() and not _is_left_out(path.relative_to(root)))


def _is_left_out(path: Path) -> bool:
    return any(part == "__pycache__" or part.startswith(".") for part in path.parts)


def _packages(root: Path) -> list[str]:
    """Top-level packages of the project."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text())
    except OSError as error:
        raise JobError(f"the project's own folder is needed, with its pyproject.toml: {error}") from error
    return sorted({name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]})
