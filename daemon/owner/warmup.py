"""Running a new runtime once in the shapes that it will be asked for, before anybody waits for it.

What it allocates, loads or compiles when it first meets a shape is then there. Nothing of it can be seen afterwards: no
page is held, no prefix is known, nothing is counted as served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rowlock.bindings.device import (
    WARMUP_TOKENS,
    DeviceError,
    Preempted,
    Runtime,
    Sampling,
    Sequence,
    Step,
    Variant,
)
from rowlock.bindings.model.config import ModelConfig
from rowlock.daemon.owner.core import CancelledError
from rowlock.v1.errors import OwnerError, Reason


def warm_up(
    runtime: Runtime, config: ModelConfig, variants: tuple[Variant, ...], cancelled: Callable[[], bool]
) -> None:
    """Run each variant.

    Raises:
        OwnerError: CACHE_EXCEEDED, naming the variant.
        CancelledError: nobody waits for it any more; looked at after each step.
        DeviceError: of the runtime.

    """
    for variant in variants:
        for _ in steps_of(runtime, config, variant):
            if cancelled():
                raise CancelledError("the daemon is stopping")


def batch_problem(device: str, batch_max: int, variant: Variant) -> str:
    """Why a device has no program for so many requests, or empty. ``batch_max`` as in DeviceFacts."""
    if not batch_max or variant.batch <= batch_max:
        return ""
    return (
        f"serving.variants: {variant}: a program of {device} is for {batch_max} request at a time, and requests that "
        "run together take turns: name each length once, with batch = 1"
    )


def refuse_variant(device: str, batch_max: int, config: ModelConfig, variant: Variant) -> None:
    """Raise OwnerError: ARGUMENT_INVALID or CONTEXT_EXCEEDED, for a shape that a device or a model cannot run."""
    problem = batch_problem(device, batch_max, variant)
    if problem:
        raise OwnerError(Reason.ARGUMENT_INVALID, problem)
    if variant.capacity > config.context:
        raise OwnerError(
            Reason.CONTEXT_EXCEEDED,
            f"serving.variants: {variant}: with {WARMUP_TOKENS} new tokens it exceeds the context of {config.context}",
        )


def steps_of(runtime: Runtime, config: ModelConfig, variant: Variant) -> Iterator[None]:
    """Run one variant, step by step; whoever ends early leaves nothing behind."""
    sequences: list[Sequence] = []
    try:
        for number in range(variant.batch):
            # they begin in different ways, so that none finds what another has computed
            prompt = ((number + 1) % config.vocab,) + (0,) * (variant.length - 1)
            sequences.append(_opened(runtime, prompt, variant))
        yield from _advanced(runtime, sequences, variant)
    finally:
        for sequence in sequences:
            sequence.close()
        runtime.forget()


def _opened(runtime: Runtime, prompt: tuple[int, ...], variant: Variant) -> Sequence:
    try:
        return runtime.open_sequence(prompt, Sampling(), variant.capacity)
    except DeviceError as error:
        raise OwnerError(Reason.CACHE_EXCEEDED, f"serving.variants: {variant}: {error}") from error


def _advanced(runtime: Runtime, sequences: list[Sequence], variant: Variant) -> Iterator[None]:
    """Until each has its tokens, or an error of its own; it is then closed, since others may wait for what it has."""
    left = {id(sequence): WARMUP_TOKENS for sequence in sequences}
    while running := [sequence for sequence in sequences if left[id(sequence)] > 0]:
        for sequence, step in zip(running, runtime.advance(running), strict=True):
            left[id(sequence)] -= _taken(step, variant)
            if left[id(sequence)] <= 0:
                sequence.close()
        yield


def _taken(step: Step, variant: Variant) -> int:
    if isinstance(step, Preempted):
        raise OwnerError(Reason.CACHE_EXCEEDED, f"serving.variants: {variant}: the pages are not enough for all of it")
    if isinstance(step, DeviceError):
        return WARMUP_TOKENS
    return 0 if step is None else 1
