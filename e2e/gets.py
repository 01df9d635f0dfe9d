"""GETs beside other work, each with its time: for programs that measure."""

import itertools
import threading
import time


class Gets(threading.Thread):
    """Gets `key()` 2,000 times a second over the connections, in turn."""

    def __init__(self, connections, key):
        super().__init__(daemon=True)
        self.connections, self.key = connections, key
        self.over, self.times, self.absent = threading.Event(), [], 0
        self.start()

    def run(self):
        due = time.monotonic()
        for client in itertools.cycle(self.connections):
            if self.over.is_set():
                return
            key = self.key()
            before = time.monotonic()
            found = client.call("GET", key)
            self.times.append((time.monotonic() - before) * 1000)
            self.absent += found is None
            due += 0.0005
            time.sleep(max(0, due - time.monotonic()))

    def forget(self):
        """Drops the times so far."""
        self.times, self.absent = [], 0

    def take(self, what, removed=False):
        """Prints how the GETs since the last call were, and drops their times. Keys must exist that nobody has removed."""
        assert self.is_alive(), "the GETs have failed"
        assert removed or not self.absent, f"{self.absent} GETs found nothing"
        times = sorted(self.times)
        self.forget()
        if not times:
            return
        at = lambda share: times[min(len(times) - 1, int(len(times) * share))]  # noqa: E731
        print(f"{what}: {len(times)} GETs, median {at(0.5):.2f} ms, p99 {at(0.99):.2f}, p99.9 {at(0.999):.2f}, longest {times[-1]:.2f}", flush=True)
