"""What can be wrong with a checkpoint."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class CheckpointFault(StrEnum):
    """Why a checkpoint is refused. The value is stable: clients match on it."""

    NOT_FOUND = "NOT_FOUND"
    UNREADABLE = "UNREADABLE"
    MALFORMED = "MALFORMED"
    DUPLICATE = "DUPLICATE"
    INDEX = "INDEX"
    MISSING = "MISSING"
    OUTSIDE = "OUTSIDE"
    UNEXPECTED = "UNEXPECTED"
    SHAPE = "SHAPE"
    DTYPE = "DTYPE"
    ALIAS = "ALIAS"
    CHANGED = "CHANGED"
    UNSUPPORTED = "UNSUPPORTED"


class CheckpointError(Exception):
    """A checkpoint that cannot be used, with the file, the field and what to do.

    Attributes:
        fault: the kind, stable.
        path: the file or directory concerned.
        problem: what is wrong with it.
        hint: one sentence on what the user can do.

    """

    def __init__(self, fault: CheckpointFault, path: Path, problem: str, hint: str = "") -> None:
        super().__init__(f"{path}: {problem}")
        self.fault = fault
        self.path = path
        self.problem = problem
        self.hint = hint

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[CheckpointFault, Path, str, str]]:
        return type(self), (self.fault, self.path, self.problem, self.hint)
