"""Whether the Hugging Face hub can be reached: where it can't, its own clients try for half a minute."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

ENDPOINT = "https://huggingface.co"
CONNECT_S = 5.0
"""Seconds in which the hub must accept a connection, name look-up included."""
_PORTS = {"https": 443, "http": 80}
_FLAGS = ("huggingface_hub.constants", "datasets.config")
"""Modules that have read HF_HUB_OFFLINE once and for all, if they are imported."""
_unreachable: dict[str, str] = {}
"""Endpoint → why it can't be reached, as this process found."""


def hub_missing(name: str) -> str | None:
    """Why `name` can't be fetched from the hub: None where it can, or where it is a local file or folder.

    From then on this process takes what it can from the local cache and asks the hub for nothing.
    """
    if Path(name).expanduser().exists():
        return None
    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT)
    if endpoint not in _unreachable:
        if _is_offline():
            return "HF_HUB_OFFLINE is set"
        if (error := _connect(endpoint)) is None:
            return None
        _unreachable[endpoint] = f"{endpoint} can't be reached: {error}"
    _go_offline()
    return _unreachable[endpoint]


def _is_offline() -> bool:
    words = (os.environ.get(key, "").upper() for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(word in ("1", "ON", "YES", "TRUE") for word in words)


def _go_offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in _FLAGS:
        if (module := sys.modules.get(name)) is not None:
            module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def _connect(endpoint: str) -> str | None:
    """Why nobody answers there, None when somebody does. A proxy stands between, if there is one."""
    url = urlsplit(endpoint)
    proxy = getproxies().get(url.scheme)
    if proxy is not None:
        url = urlsplit(proxy if "://" in proxy else f"//{proxy}", scheme="http")
    found: list[str | None] = [f"no answer within {CONNECT_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((url.hostname, url.port or _PORTS[url.scheme]), CONNECT_S).close()
            found.append(None)
        except (OSError, KeyError, ValueError) as error:
            found.append(str(error))

    thread = threading.Thread(target=connect, name="look for the hub", daemon=True)  # a look-up has no deadline
    thread.start()
    thread.join(CONNECT_S)
    return found[-1]
