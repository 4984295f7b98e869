"""Child processes: ending with their parent, and how they ended."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1
"""prctl(2)."""


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends; end now if its process has already.

    Args:
        parent: process id of who started this one.

    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        raise SystemExit("the owner that started this process is gone")


def end_of(code: int) -> str:
    """How a child ended, to follow the words for it.

    Args:
        code: of subprocess: an exit code, or a signal's number below zero.

    """
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
