"""Which packages a kind of device needs, and in which of our virtual environments they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

AUTOLOAD_VARIABLE: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""While it is "0", `import torch` does not load every vendor's package that happens to be installed."""


class DeviceRefusedError(Exception):
    """A device that this process cannot drive; the message says what would help."""


def installed_version(package: str) -> str | None:
    """Version of an installed distribution; imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Environment:
    """A virtual environment that one vendor's packages need for themselves.

    Attributes:
        target: the make target that builds it, and less its ``env-`` its suffix.
        packages: distribution -> version. A build of that version (``+cpu``) is as good.

    """

    target: str
    packages: Mapping[str, str]

    @property
    def python(self) -> str:
        return f".venv-{self.target.removeprefix('env-')}/bin/python"

    def check(self, installed: Callable[[str], str | None] = installed_version) -> None:
        """Refuse another environment.

        Raises:
            DeviceRefusedError: naming what is needed, what there is, and the command that makes it.

        """
        wrong = []
        for package, wanted in self.packages.items():
            found = installed(package)
            if found is None:
                wrong.append(f"{package} {wanted} is not installed")
            elif found.partition("+")[0] != wanted.partition("+")[0]:
                wrong.append(f"{package} is {found}, not {wanted}")
        if wrong:
            raise DeviceRefusedError(
                f"this is not the environment of that device: {', '.join(wrong)}; "
                f"run `make {self.target}`, then `{self.python} -m rowlock.cli ...`"
            )


@dataclass(frozen=True)
class Visibility:
    """How a vendor's library is shown one device only, whose logical number is then 0.

    Attributes:
        variable: environment variable that lists the physical numbers that are visible.
        settings: further variables that the library has to find, so that those numbers mean what they say.
        conflicts: variables that number the devices in another way: refused while they are set.

    """

    variable: str
    settings: Mapping[str, str]
    conflicts: tuple[str, ...] = ()

    def narrow(self, physical: int, environment: MutableMapping[str, str]) -> None:
        """Hide every device but one. Has to come before the library is loaded.

        Raises:
            DeviceRefusedError: the device is hidden from this process, or numbered by other variables.

        """
        for name in self.conflicts:
            if environment.get(name):
                raise DeviceRefusedError(f"{name}={environment[name]} numbers the devices in another way; unset it")
        given = environment.get(self.variable, "")
        visible = [item.strip() for item in given.split(",")] if given else []
        if visible and str(physical) not in visible:
            raise DeviceRefusedError(
                f"{self.variable}={given} hides device {physical} from this process; "
                "the number after the colon is the physical one, as the vendor's own tools show it"
            )
        environment.update(self.settings)
        environment[self.variable] = str(physical)
