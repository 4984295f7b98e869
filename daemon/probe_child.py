"""``python -m rowlock.daemon.probe_child DEVICE [--without-hardware]``: look for one device, and end.

See :mod:`rowlock.daemon.probing`.
"""

from __future__ import annotations

import json
import sys
from typing import Final

from rowlock.bindings.finding import Finding
from rowlock.daemon.devices import select_device
from rowlock.daemon.environments import DeviceRefusedError

WITHOUT_HARDWARE: Final = "--without-hardware"


def main(name: str, without_hardware: bool) -> None:
    try:
        kind, address = select_device(name)
    except DeviceRefusedError as error:
        _say(Finding("environment", False, str(error)))
        return
    if kind.probe is not None:
        for finding in kind.probe(address, without_hardware):
            _say(finding)


def _say(finding: Finding) -> None:
    print(json.dumps(vars(finding)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], WITHOUT_HARDWARE in sys.argv[2:])
