"""What was found when a machine was looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        ok: False keeps an owner from starting or from working well.

    """

    name: str
    ok: bool
    detail: str
