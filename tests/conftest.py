from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support.checkpoints import write_tiny
from support.devices import CHOSEN_VARIABLE, DEVICES, devices_of_run
from support.owners import OwnerHarness, running_owner

ROOT = Path(__file__).resolve().parent.parent
# The same examples in every run; `--hypothesis-seed=N` explores others.
settings.register_profile("rowlock", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("rowlock")
MODEL = ROOT / ".cache" / "smollm2-135m"
GEMMA = ROOT / ".cache" / "gemma3-270m"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="run the device suites on this device only; see tests/support/devices.py")


def pytest_configure(config: pytest.Config) -> None:
    """Owners of the run are on the chosen device, and what the run starts can be interrupted.

    A shell has what it starts in the background ignore SIGINT, and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = config.getoption("--device")
    if chosen:
        os.environ[CHOSEN_VARIABLE] = chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The device suites run once per device; a device that is not here is skipped, with the reason."""
    if "device_under_test" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--device")
    parameters = []
    for name in devices_of_run(chosen):
        absent = DEVICES[name].absent()
        assert not (absent and chosen), f"--device {chosen}: {absent}"
        marks = [pytest.mark.skip(reason=f"{name}: {absent}")] if absent else []
        parameters.append(pytest.param(name, marks=marks))
    metafunc.parametrize("device_under_test", parameters)


LONG = {"system", "model"}
"""Folders whose tests take seconds each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the real model fail, rather than vanish, where the model is absent: `make test` makes it."""
    for item in items:
        if item.get_closest_marker("torch_bits") and torch.backends.cpu.get_cpu_capability() != "AVX2":
            item.add_marker(
                pytest.mark.skip(reason="torch adds in another order here; see TORCH_AS_ON_AVX2 in Makefile")
            )
        if {"real_model", "gemma"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.model)
    # The long files first: at the end both workers have something to do.
    items.sort(key=lambda item: item.path.parent.name not in LONG)


@pytest.fixture(scope="session")
def real_model() -> Path:
    assert MODEL.is_dir(), f"{MODEL} is missing: run `make test`, which converts it"
    return MODEL


@pytest.fixture(scope="session")
def gemma() -> Path:
    assert GEMMA.is_dir(), f"{GEMMA} is missing: run `make models`, which converts it"
    return GEMMA


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint; never written to."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture
def fault_file(tmp_path: Path) -> Path:
    return tmp_path / "fault.json"


@pytest.fixture
def owner(tmp_path: Path, tiny: Path, fault_file: Path) -> Iterator[OwnerHarness]:
    """A running owner with the tiny model resident."""
    with running_owner(tmp_path / "state", tiny, fault_file) as harness:
        yield harness
