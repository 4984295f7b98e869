"""Short ways to use a real daemon process."""

from __future__ import annotations

import time
from concurrent.futures import Future
from threading import Thread

import pytest

from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import inference_pb2, owner_pb2


def generated(daemon: DaemonProcess, **fields: object) -> tuple[str, str, str]:
    """Text, name of the finish reason, and the identity that computed it."""
    request = inference_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]
    messages = list(daemon.client.stream(daemon.client.inference.Generate, request))
    finish = inference_pb2.FinishReason.Name(messages[-1].finish_reason).removeprefix("FINISH_REASON_")
    return "".join(message.text for message in messages), finish.lower(), messages[-1].identity.digest


def answer(daemon: DaemonProcess, prompt: str = "hello") -> tuple[list[int], str]:
    """Tokens, and the identity that computed them."""
    request = inference_pb2.GenerateRequest(prompt=prompt, max_tokens=8, ignore_eos=True)
    messages = list(daemon.client.stream(daemon.client.inference.Generate, request))
    assert len({message.identity.digest for message in messages}) == 1
    assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    return [token for message in messages for token in message.tokens], messages[-1].identity.digest


def owner(daemon: DaemonProcess) -> owner_pb2.Owner:
    found: owner_pb2.Owner = daemon.client.call(daemon.client.owner.GetOwner, owner_pb2.GetOwnerRequest()).owner
    return found


def transition(daemon: DaemonProcess, **fields: object) -> list[owner_pb2.TransitionEvent]:
    request = owner_pb2.TransitionRequest(**fields)  # type: ignore[arg-type]
    return [item.event for item in daemon.client.stream(daemon.client.owner.Transition, request)]


def begin(daemon: DaemonProcess, **fields: object) -> Future[list[owner_pb2.TransitionEvent]]:
    """A transition on a thread of its own."""
    done: Future[list[owner_pb2.TransitionEvent]] = Future()

    def run() -> None:
        try:
            done.set_result(transition(daemon, **fields))
        except ClientError as error:
            done.set_exception(error)

    Thread(target=run).start()
    return done


def wait_for_log(daemon: DaemonProcess, event: str) -> None:
    """Until the daemon has logged an event."""
    deadline = time.monotonic() + 60
    while event not in daemon.log.read_text():
        assert time.monotonic() < deadline, f"the daemon never said {event}"
        time.sleep(0.01)


def states(events: list[owner_pb2.TransitionEvent]) -> list[str]:
    return [owner_pb2.TransitionState.Name(event.state).removeprefix("TRANSITION_STATE_") for event in events]


def refused(daemon: DaemonProcess, **fields: object) -> ClientError:
    with pytest.raises(ClientError) as caught:
        transition(daemon, **fields)
    return caught.value
