"""systemd's notification protocol (sd_notify(3)): one datagram to ``$NOTIFY_SOCKET``."""

from __future__ import annotations

import os
import socket


def notify(**values: str) -> None:
    """Tell the service manager, if there is one, e.g. ``notify(READY="1", STATUS="...")``."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    message = "\n".join(f"{name}={value}" for name, value in values.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
        try:
            client.connect("\0" + address[1:] if address.startswith("@") else address)
            client.sendall(message.encode())
        except OSError:
            return  # nobody listens: that is the service manager's affair
