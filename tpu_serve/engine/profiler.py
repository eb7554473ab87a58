"""Traces of what host and devices do, in the format of TensorBoard's and XProf's profile viewers."""

from __future__ import annotations

import threading
from pathlib import Path

import jax


class Profiler:
    """One trace at a time. Any thread may call it.

    Args:
      folder: takes one subfolder per trace, named by its time.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder).expanduser()
        self._lock = threading.Lock()
        self._is_running = False

    def start(self) -> bool:
        """Starts a trace; False when one is under way. Raises OSError or RuntimeError when it cannot be taken."""
        with self._lock:
            if self._is_running:
                return False
            self.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.folder))
            self._is_running = True
            return True

    def stop(self) -> bool:
        """Ends the trace and writes it, which takes seconds; False when none is under way."""
        with self._lock:
            if not self._is_running:
                return False
            self._is_running = False
            jax.profiler.stop_trace()
            return True
