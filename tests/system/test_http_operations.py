"""The HTTP API as an operator sees it: who may call, probes, deadlines, readers that go away, starts and stops."""

from __future__ import annotations

import re
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from support.certificates import write_certificates
from support.checkpoints import EMBED, change_rows, negate
from support.commands import rowlock
from support.daemons import generated, owner, transition
from support.http import HTTP, log_lines, post, url_of, with_chat_template

from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.answering.meter import REQUEST_METRICS
from rowlock.daemon.http.app import Probes
from rowlock.daemon.http.generating import Service
from rowlock.daemon.http.owner_metrics import OWNER_METRICS
from rowlock.daemon.http.server import HttpServer
from rowlock.daemon.owner.scheduler import ACTIVE_MAX, WAITING_MAX
from rowlock.daemon.settings import HttpSettings
from rowlock.v1 import inference_pb2, owner_pb2

LONG = {"prompt": "x", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
KEY = "correct horse battery staple"


@pytest.fixture(scope="module")
def daemon(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests that leave it as it is."""
    with DaemonProcess(tmp_path_factory.mktemp("http") / "state", [*HTTP, "--checkpoint", str(tiny)]) as process:
        yield process


@pytest.fixture(scope="module")
def url(daemon: DaemonProcess) -> str:
    return url_of(daemon)


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again; the test's own time limit ends what never comes."""
    while not condition():
        pass


def samples(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def metric(url: str, name: str, **labels: str) -> float:
    return samples(url).get((name, frozenset(labels.items())), 0)


def configured(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "rowlock.toml"
    path.write_text(text)
    return ["--config", str(path), "--threads", "1"]


def test_every_metric_of_the_list_is_there_and_no_other(daemon: DaemonProcess, url: str) -> None:
    generated(daemon, prompt="x", max_tokens=2, ignore_eos=True)
    post(url, "/v1/completions", prompt="x", max_tokens=2, ignore_eos=True)
    listed = OWNER_METRICS | REQUEST_METRICS
    found = {
        family.name: family
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        if not family.name.endswith("_created")
    }
    assert set(found) == set(listed)
    for name, info in listed.items():
        assert (found[name].type, found[name].documentation) == (info.kind, info.text)
        labels = {label for sample in found[name].samples for label in sample.labels} - {"le"}
        assert labels == set(info.labels)


def test_requests_are_counted(daemon: DaemonProcess, url: str) -> None:
    before = samples(url)
    post(url, "/v1/completions", prompt="abc", max_tokens=5, ignore_eos=True)
    post(url, "/v1/completions", prompt="abc", max_tokens=5000)
    generated(daemon, prompt="abc", max_tokens=7, ignore_eos=True)
    after = samples(url)

    def grown(name: str, **labels: str) -> float:
        key = name, frozenset(labels.items())
        return after[key] - before.get(key, 0)

    assert grown("rowlock_requests_total", api="http", outcome="length") == 1
    assert grown("rowlock_requests_total", api="http", outcome="context_exceeded") == 1
    assert grown("rowlock_requests_total", api="grpc", outcome="length") == 1
    assert (grown("rowlock_prompt_tokens_total", api="http"), grown("rowlock_prompt_tokens_total", api="grpc")) == (
        3,
        3,
    )
    assert grown("rowlock_generated_tokens_total", api="http") == 5
    assert grown("rowlock_generated_tokens_total", api="grpc") == 7
    assert grown("rowlock_computed_tokens_total") == 12
    assert grown("rowlock_first_token_seconds_count", api="http") == 1
    assert grown("rowlock_token_seconds_count", api="http") == 4
    assert after["rowlock_requests_active", frozenset()] == 0


@pytest.mark.parametrize("ahead", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_gives_its_pages_back(
    daemon: DaemonProcess, url: str, stream: bool, ahead: bytes
) -> None:
    """At once, and not when the answer would have been complete; also one that has sent its next request ahead."""
    given_up = metric(url, "rowlock_requests_total", api="http", outcome="cancelled")
    computed = metric(url, "rowlock_computed_tokens_total")
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        body = httpx.Request("POST", url, json={**LONG, "stream": stream}).content
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s%s" % (len(body), body, ahead)
        )
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: owner(daemon).requests_active == 1)
    until(lambda: owner(daemon).requests_active == 0)
    until(lambda: metric(url, "rowlock_cache_pages", window="0", use="in_use") == 0)
    until(lambda: metric(url, "rowlock_requests_total", api="http", outcome="cancelled") == given_up + 1)
    assert metric(url, "rowlock_computed_tokens_total") < computed + 2000
    assert [line for line in log_lines(daemon) if line["level"] == "error"] == []


def test_a_full_queue_is_429_with_a_time_to_come_back(daemon: DaemonProcess, url: str) -> None:
    endless = [daemon.client.inference.Generate(_long()) for _ in range(ACTIVE_MAX)]
    for call in endless:
        next(iter(call))
    waiting = [daemon.client.inference.Generate(_long()) for _ in range(WAITING_MAX)]
    until(lambda: owner(daemon).requests_waiting == WAITING_MAX)
    answer = post(url, "/v1/completions", prompt="x", max_tokens=1)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    long = post(url, "/v1/completions", prompt=[1] * 3000)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded"), "not kept in the queue"
    assert httpx.get(f"{url}/ready").status_code == 200
    for call in (*waiting, *endless):
        call.cancel()
    until(lambda: owner(daemon).requests_active == owner(daemon).requests_waiting == 0)


def _long() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt="x", max_tokens=2000, ignore_eos=True)


def test_deadline_stall_keys_and_tls(tiny: Path, tmp_path: Path) -> None:
    """One daemon that is configured in every way."""
    files = write_certificates(tmp_path / "tls", "localhost", [])
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\n{'x' * 16}\n\n{KEY}\n")
    options = configured(
        tmp_path,
        f'[api]\nstall_s = 5\n[http]\nlisten = "0.0.0.0:0"\ncertificate = "{files}/localhost.pem"\n'
        f'key = "{files}/localhost.key"\napi_keys = "{keys}"\nmodel = "tiny"\ndeadline_s = 0.000001\n',
    )
    with DaemonProcess(tmp_path / "state", [*options, "--checkpoint", str(tiny)]) as daemon:
        url = url_of(daemon).replace("0.0.0.0", "localhost")
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(files / "ca.pem"))
        with httpx.Client(verify=context, base_url=url) as client:
            assert client.get("/ready").status_code == client.get("/health").status_code == 200
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": KEY},
            ):
                for path in ("/v1/models", "/metrics", "/v1/completions"):
                    refused = client.get(path, headers=headers)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            client.headers["authorization"] = f"Bearer {KEY}"
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            assert client.get("/metrics").status_code == 200
            late = client.post("/v1/completions", json={"prompt": "x", "model": "tiny"})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_passed")
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health")


def test_a_chat_template_that_does_not_end_costs_only_its_callers(tiny: Path, tmp_path: Path) -> None:
    """Their responses have a deadline, token prompts are answered, and the daemon can be stopped."""
    ever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    model = with_chat_template(tiny, tmp_path / "model", ever)
    options = configured(tmp_path, '[http]\nlisten = "127.0.0.1:0"\ndeadline_s = 2\n')
    with DaemonProcess(tmp_path / "state", [*options, "--checkpoint", str(model)]) as daemon:
        url = url_of(daemon)
        late = post(url, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_passed")
        assert post(url, "/v1/completions", prompt=[1, 2], max_tokens=2).status_code == 200
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0
        assert log_lines(daemon)[-1]["event"] == "daemon.stopped"


def test_what_cannot_be_listened_on_ends_the_start_with_its_name(daemon: DaemonProcess, tmp_path: Path) -> None:
    taken = url_of(daemon).removeprefix("http://")
    done = rowlock(
        "serve", "--http", taken, "--state", tmp_path / "s", "--socket", tmp_path / "x.sock",
        ROWLOCK_RUNTIME_DIR=str(tmp_path / "run"),
    )  # fmt: skip
    assert (done.code, f"http.listen: {taken}: " in done.err, "in use" in done.err) == (3, True, True)


def test_keys_and_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = write_certificates(tmp_path / "tls", "localhost", [])
    service = Service(None, "m", 1.0, str, float, print)  # type: ignore[arg-type]
    probes = Probes(None, CollectorRegistry(), "m", 0)  # type: ignore[arg-type]
    (tmp_path / "short").write_text("# ours\nsecret\n")
    (tmp_path / "none").write_text("# ours\n")
    for changes, says in (
        ({"api_keys": tmp_path / "short"}, f"{tmp_path}/short:2: a key has at least 16 characters"),
        ({"api_keys": tmp_path / "none"}, "holds no key"),
        ({"api_keys": tmp_path / "absent"}, "No such file"),
        ({"certificate": files / "ca.pem", "key": files / "localhost.key"}, "http.certificate or http.key"),
    ):
        settings = HttpSettings("127.0.0.1", 0, **changes)
        with pytest.raises(OSError, match=re.escape(says)):
            HttpServer(settings, service, probes, 1.0)


def test_ready_follows_the_owner_and_alive_means_alive(tiny: Path, tmp_path: Path) -> None:
    fault, target = tmp_path / "fault.json", change_rows(tiny, tmp_path / "target", EMBED, [5], negate)
    options = [*HTTP, "--checkpoint", str(tiny), "--test-fault-file", str(fault)]
    with DaemonProcess(tmp_path / "state", options) as daemon:
        url = url_of(daemon)
        assert httpx.get(f"{url}/ready").status_code == 200
        assert rowlock("unload", endpoint=daemon.client.endpoint).code == 0
        ready = httpx.get(f"{url}/ready")
        assert (ready.status_code, ready.json()["state"]) == (503, "EMPTY")
        empty = post(url, "/v1/completions", prompt="x")
        assert (empty.status_code, empty.json()["error"]["code"]) == (503, "empty")
        assert empty.headers["retry-after"] == "5"
        assert httpx.get(f"{url}/v1/models").json()["data"] == []
        transition(daemon, target=str(tiny))
        assert httpx.get(f"{url}/ready").status_code == 200
        transition(daemon, target=str(target))
        assert metric(url, "rowlock_transitions_total", outcome="PUBLISHED") == 3
        assert metric(url, "rowlock_last_pause_seconds", level="B2", outcome="PUBLISHED") > 0
        fault.write_text('{"operation": "release", "effect": "error", "count": 1000}')
        transition(daemon, target=str(tiny), require=owner_pb2.REQUIRE_B1)
        ready = httpx.get(f"{url}/ready")
        assert (ready.status_code, ready.json()["state"]) == (503, "QUARANTINED")
        assert httpx.get(f"{url}/health").json() == {"status": "alive", "state": "QUARANTINED"}
        assert post(url, "/v1/completions", prompt="x").json()["error"]["code"] == "quarantined"
        assert metric(url, "rowlock_state", state="QUARANTINED") == 1
        assert metric(url, "rowlock_ready") == 0


def test_a_stream_that_runs_when_the_daemon_stops_is_told_so(tiny: Path, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "state", [*HTTP, "--checkpoint", str(tiny)]) as daemon:
        url = url_of(daemon)
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            daemon.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert '"code": "stopping"' in last
        assert daemon.process.wait(30) == 0
    events = [line["event"] for line in log_lines(daemon)]
    assert events[-3:] == ["daemon.stopping", "owner.stopping", "daemon.stopped"]
    assert [line for line in log_lines(daemon) if line["level"] == "error"] == []
