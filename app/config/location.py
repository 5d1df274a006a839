"""Where a run may lie. Looks at no store: whether it can be used shows at the start."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from fsspec import available_protocols

from app.config.chaos import ChaosConfig
from app.config.error import ConfigError
from app.config.schema import RunConfig

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for whatever `ray job submit` runs."""
OWN = ("memory", "local")
"""Schemes of stores that only one process or machine sees, as it sees what URLs with `::` put before a store."""


def check_location(run: RunConfig, chaos: ChaosConfig) -> None:
    """Refuse places that can't be used by all processes of a run. Raises ConfigError."""
    path, cache = run.path, run.cache_dir
    if cache is not None and not Path(cache).expanduser().is_absolute():
        raise ConfigError("run.cache_dir", cache, "an absolute path or null is needed")
    if "://" not in path:
        return
    url = urlsplit(path)
    if url.scheme == "file":
        if url.netloc not in ("", "localhost"):
            raise ConfigError("run.dir", path, "file:///absolute/path is needed")
        return
    if url.scheme in OWN or "::" in path:
        raise ConfigError("run.dir", path, "a store that all processes see is needed")
    if url.scheme not in available_protocols():
        raise ConfigError(
            "run.dir", path, "a path or the URL of a store that fsspec knows is needed, as s3://bucket/name"
        )
    for i, fault in enumerate(chaos.faults):
        if fault.kind == "fill_disk":
            raise ConfigError(f"chaos.faults[{i}].kind", fault.kind, "run.dir as a folder, not a URL, is needed")
    if chaos.rates.fill_disk > 0:
        raise ConfigError("chaos.rates.fill_disk", chaos.rates.fill_disk, "0 is needed when run.dir is a URL")


def check_in_job(run: RunConfig) -> None:
    """Refuse a relative run folder in a Ray job: it would lie in the job's own copy of the code. Raises ConfigError."""
    if "://" not in run.path and not Path(run.path).expanduser().is_absolute():
        raise ConfigError("run.dir", run.path, "in a Ray job an absolute path or a URL is needed")
