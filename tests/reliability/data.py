"""A dataset that can come to harm. Workers import this module, so it needs nothing."""

from __future__ import annotations

import ctypes
import os
import time

LENGTH = 400
BAD = 150  # the item that comes to harm, the first time that it is made
SECONDS = 0.004  # that an item takes


class Fragile:
    """Numbers, of which one may end or hold its worker, once.

    Parameters
    ----------
    harm
        "exits", "crashes", "hangs", or anything else for none.
    flag
        A file that is there once it has happened.
    """

    def __init__(self, harm: str, flag: str) -> None:
        self._harm = harm
        self._flag = flag

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        time.sleep(SECONDS)
        if index == BAD and self._harm in ("exits", "crashes", "hangs") and self._is_first():
            if self._harm == "exits":
                os._exit(0)
            if self._harm == "crashes":
                ctypes.string_at(0)
            time.sleep(1000)
        return int(index)

    def _is_first(self) -> bool:
        if os.path.exists(self._flag):
            return False
        with open(self._flag, "w"):
            return True
