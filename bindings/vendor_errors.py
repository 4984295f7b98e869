"""From what torch and the vendors' libraries raise to the one error of the device boundary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rowlock.bindings.device import DeviceError, DeviceFault

MESSAGE_MAX = 500


@contextmanager
def as_device_error(fault: DeviceFault, what: str) -> Iterator[None]:
    """Around calls that reach a device.

    The traceback of the vendor's error is cut off: its frames would keep device tensors
    alive for as long as somebody keeps the error.

    Args:
        fault: what a failure means, unless torch says that memory is short.
        what: was being done, for the message.

    Raises:
        DeviceError: in place of every RuntimeError.

    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(DeviceFault.OUT_OF_MEMORY, _message(what, error)) from error.with_traceback(None)
    except RuntimeError as error:
        raise DeviceError(fault, _message(what, error)) from error.with_traceback(None)


def _message(what: str, error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{what}: {first or repr(error)}"[:MESSAGE_MAX]
