"""Ray's token, as a client of a cluster. Imports nothing of Ray, which reads these settings when it is imported."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


def send_token() -> None:
    """Have Ray's clients in this process send the token, if there is one.

    `ray start` asks for a token where there is one, but a client does not send it unasked; open clusters ignore it.
    """
    if os.environ.keys() & VARIABLES or Path("~/.ray/auth_token").expanduser().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
