"""What this machine can do at best, measured in the same run as what is compared with it."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from blake3 import blake3

USUAL_MIN = {
    "read": 2.0,
    "read_fresh": 1.5,
    "copy": 5.0,
    "copy_fresh": 1.5,
    "blake3": 2.5,
    "compare": 4.0,
    "scan": 8.0,
    "durable": 0.1,
}
"""GB/s below which a machine of this kind is not itself: a run that finds less says nothing about anything."""
REPEATS = 5
CHUNK = 4 << 20


def measure_limits(path: Path, threads: int) -> dict[str, float]:
    """Median GB/s of each limit, over the bytes of one file.

    ``read``: page-cached file into warm memory. ``read_fresh``: into fresh memory.
    ``copy`` and ``copy_fresh``: memory to warm, and to fresh, memory. ``blake3``: groups of
    64 KiB. ``compare``: two buffers as integers. ``scan``: one buffer, read only. ``durable``: write and fsync of as
    many bytes.
    """
    size = path.stat().st_size // CHUNK * CHUNK
    source = np.fromfile(path, np.uint8, size)
    warm = np.ones(size, np.uint8)
    spans = [slice(start, start + CHUNK) for start in range(0, size, CHUNK)]
    with ThreadPoolExecutor(threads) as executor, open(path, "rb") as file:

        def on_all(job: Callable[[slice], object]) -> Callable[[], None]:
            def run() -> None:
                for _ in executor.map(job, spans):
                    pass

            return run

        def read(target: np.ndarray) -> Callable[[slice], object]:
            return lambda span: os.preadv(file.fileno(), [target[span].data], span.start)

        def hash_groups(span: slice) -> None:
            view = source[span].data
            for start in range(0, CHUNK, 65536):
                blake3(view[start : start + 65536]).digest()

        def read_fresh() -> None:
            on_all(read(np.empty(size, np.uint8)))()

        def copy_fresh() -> None:
            target = np.empty(size, np.uint8)
            on_all(lambda span: np.copyto(target[span], source[span]))()

        def compare() -> None:
            on_all(lambda span: np.array_equal(warm[span].view(np.uint64), source[span].view(np.uint64)))()

        jobs = {
            "read": on_all(read(warm)),
            "read_fresh": read_fresh,
            "copy": on_all(lambda span: np.copyto(warm[span], source[span])),
            "copy_fresh": copy_fresh,
            "blake3": on_all(hash_groups),
            "compare": compare,
            "scan": on_all(lambda span: source[span].view(np.int16).max()),
        }
        hold_memory(2 * size)
        return {name: round(size / 1e9 / _median_seconds(job), 2) for name, job in jobs.items()}


def hold_memory(nbytes: int) -> None:
    """Touch and free as much memory, so that what follows finds free pages.

    A virtual machine that reports its free pages gives them back to its host about a second after they were freed;
    getting 256 MiB again was measured at 0.5 to 1 s there, against 50 ms. Whatever needs fresh memory (a load, a
    transition, ``from_pretrained``, a limit) would be timed by how long ago others freed some.
    """
    np.empty(nbytes, np.uint8)[:: mmap.PAGESIZE] = 0


def too_slow(limits: dict[str, float]) -> list[str]:
    """The limits that are far below the usual range."""
    return [name for name, value in limits.items() if value < USUAL_MIN[name]]


def durable_write_ms(directory: Path, nbytes: int) -> float:
    """Milliseconds of writing and syncing a file once."""
    data = np.ones(nbytes, np.uint8)
    path = directory / "durable.tmp"
    start = time.perf_counter()
    try:
        with open(path, "wb", buffering=0) as file:
            for begin in range(0, nbytes, 65536):
                file.write(data[begin : begin + 65536].data)
            os.fsync(file.fileno())
        return (time.perf_counter() - start) * 1000
    finally:
        path.unlink(missing_ok=True)


def _median_seconds(job: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
