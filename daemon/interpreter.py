"""What the interpreter itself takes from the owner thread: its lock, and its search for garbage."""

from __future__ import annotations

import gc
import sys
from typing import Final

SWITCH_S: Final = 0.0002
"""How long another thread may keep the interpreter's lock from one that asks for it. A step asks for it some
dozen times, and at the default of 5 ms a busy planner can hold it up for 100 ms."""


def share_lock_fairly() -> None:
    """Have the interpreter's lock change hands soon when several threads want it."""
    sys.setswitchinterval(SWITCH_S)


def set_aside_long_lived() -> None:
    """Take everything that is alive now out of the search for garbage.

    A search through all that the libraries made at their import holds the interpreter's lock for 100 ms and more,
    and planning, which makes many objects, sets one off. What is set aside is still freed when its last
    reference goes.
    """
    gc.collect()
    gc.freeze()
