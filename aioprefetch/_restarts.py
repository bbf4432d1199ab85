"""How often workers may die: as often as it takes, but not in a loop."""

from __future__ import annotations

from collections import deque

_WINDOW = 5.0  # seconds
_WORTH = 3  # tasks a death, from which workers are worth their deaths
_FIRST_DELAY = 0.02
_LONGEST_DELAY = 1.0


class Restarts:
    """Says when a dead worker is replaced, and when it makes no more sense.

    Deaths are a loop when they come one after another without a task being done in between,
    or fast and with little done beside them. The first of a row are forgiven at once, later
    ones after a growing delay; where much is done, many deaths only slow the next start.

    Parameters
    ----------
    num_proc
        Workers that may die of the same cause at once.
    retries
        Deaths that one item is forgiven.
    forgiving
        Whether only workers that do not come up are given up: where many share them, what one
        asks for, again and again, must not end the others.
    """

    def __init__(self, num_proc: int, retries: int, *, forgiving: bool = False) -> None:
        self._forgiving = forgiving
        self._at_once = num_proc
        self._in_a_row = 2 * num_proc + 4 * (retries + 1)
        self._in_window = 10 + 5 * num_proc
        self._row = 0
        self._failed = 0  # starts one after another
        self._done = 0  # tasks
        self._deaths: deque[tuple[float, int]] = deque()  # when, and tasks done by then

    def progress(self, tasks: int) -> None:
        """Tasks have been done."""
        self._row = 0
        self._done += tasks

    def delay(self, now: float, *, came_up: bool) -> float | None:
        """A worker has died, or did not come up: seconds until the next try, or None to give up."""
        self._row += 1
        self._failed = 0 if came_up else self._failed + 1
        if (self._failed if self._forgiving else self._row) > self._in_a_row:
            return None
        if not came_up:  # others may be at work meanwhile, and what it lacks may come back
            return min(_FIRST_DELAY * 2.0**self._failed, _LONGEST_DELAY)
        self._deaths.append((now, self._done))
        while self._deaths[0][0] < now - _WINDOW:
            self._deaths.popleft()
        if len(self._deaths) > self._in_window:
            done = self._done - self._deaths[0][1]
            worth_it = self._forgiving or done >= _WORTH * len(self._deaths)
            return _LONGEST_DELAY if worth_it else None
        late = self._row - self._at_once
        return 0.0 if late <= 0 else min(_FIRST_DELAY * 2.0 ** min(late, 9), _LONGEST_DELAY)
