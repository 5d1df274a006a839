"""An actor that tells about its process."""

import os
import sys


class Probe:
    """Tells about its process."""

    def facts(self) -> tuple[int, int, bool]:
        """Its id, its parent's, and whether it has what takes long to import."""
        return os.getpid(), os.getppid(), "transformers" in sys.modules
