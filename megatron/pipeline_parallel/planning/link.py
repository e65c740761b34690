"""A link to the host on which copies of several ranks slow each other."""

from heapq import heappop, heappush


class SharedLink:
    """A link on which copies of several ranks slow each other; it goes from one event to the next, a start or an end of a copy.

    At most one copy a stream is on it at once.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._now = 0.0
        self._left: dict[int, float] = {}
        """By stream that copies now, how long its copy would still take alone."""
        self._coming: list[tuple[float, int, float]] = []
        """(start, stream, time that it takes alone) of copies that start later, a heap."""

    def add(self, stream: int, start: float, time: float) -> None:
        heappush(self._coming, (start, stream, time))

    def next_event(self) -> float:
        """When the next copy starts or ends; infinity when there is none."""
        return min(self._next_end(), self._coming[0][0] if self._coming else float("inf"))

    def _next_end(self) -> float:
        return self._now + min(self._left.values()) * self._slowness() if self._left else float("inf")

    def _slowness(self) -> float:
        return self._factor if len(self._left) > 1 else 1.0

    def advance(self) -> tuple[int, float] | None:
        """Go to the next event; (stream, time) when a copy ends there."""
        ends, then = self._next_end(), self.next_event()
        done = min(self._left, key=lambda stream: (self._left[stream], stream)) if ends <= then else None
        passed = (then - self._now) / self._slowness()
        self._now = then
        if done is not None:
            del self._left[done]
        self._left = {stream: max(0.0, left - passed) for stream, left in self._left.items()}
        if done is not None:
            return done, then
        _, stream, time = heappop(self._coming)
        self._left[stream] = time
        return None
