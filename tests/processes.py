"""What tests ask of processes that may end at any moment."""

import psutil


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return True
