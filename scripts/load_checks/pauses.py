"""`Pauses`: when this process was stopped, as on a machine whose other work stops or starves it."""

from __future__ import annotations

import threading
import time


class Pauses:
    """Watches the clock from now on: a client's time may run out only because neither it nor the server was running.

    Args:
        tick: seconds between two looks at the clock.
        long: seconds from one look to the next that counts as a stop of the process.
    """

    def __init__(self, *, tick: float = 1.0, long: float = 20.0) -> None:
        self._ended, self._tick, self._long = -1.0, tick, long
        threading.Thread(target=self._watch, args=(time.monotonic(),), daemon=True, name="pauses").start()

    def since(self, moment: float) -> bool:
        """Whether there was a pause that ended after a moment (`time.monotonic`)."""
        time.sleep(2 * self._tick)  # the one that ended just now is seen
        return self._ended >= moment

    def _watch(self, looked: float) -> None:
        while True:
            time.sleep(self._tick)
            now = time.monotonic()
            if now - looked > self._long:
                self._ended = now
            looked = now
