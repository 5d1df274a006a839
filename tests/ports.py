"""Ports for servers of tests, from a range that nobody else takes any from."""

import contextlib
import random
import socket

HOST = "127.0.0.1"
PORTS = range(20_000, 30_000)
"""Above those of Ray's workers and below those that the system gives to whoever asks for any: a port that is chosen now
is still free when its server starts, or starts again."""


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        probes: list[socket.socket] = []
        for port in random.Random().sample(PORTS, len(PORTS)):
            if len(probes) == count:
                break
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                probes.append(probe)
        return [probe.getsockname()[1] for probe in probes]


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
