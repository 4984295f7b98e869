"""The OpenAI-compatible API of the real daemon process, through OpenAI's own client and a plain one.

Every answer is compared with what gRPC's Generate says to the same prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.daemons import generated, owner, transition
from support.http import HTTP, post, url_of, with_chat_template
from tokenizers import Tokenizer

from rowlock.cli.daemon_process import DaemonProcess

CLIENTS = 16
GREEDY = {"temperature": 0.0, "max_tokens": 12}
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny, tmp_path_factory.mktemp("chat") / "base")


@pytest.fixture(scope="module")
def target(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return change_rows(checkpoint, tmp_path_factory.mktemp("chat") / "target", EMBED, list(range(256)), negate)


@pytest.fixture(scope="module")
def daemon(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests that leave it as it is."""
    with DaemonProcess(tmp_path_factory.mktemp("http") / "state", [*HTTP, "--checkpoint", str(checkpoint)]) as process:
        yield process


@pytest.fixture(scope="module")
def url(daemon: DaemonProcess) -> str:
    return url_of(daemon)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_and_identity(client: openai.OpenAI, daemon: DaemonProcess, url: str) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("rowlock").id == "rowlock"
    resident = owner(daemon)
    raw = httpx.get(f"{url}/v1/models")
    assert raw.headers["x-rowlock-identity"] == raw.json()["data"][0]["identity"] == resident.identity.digest
    assert raw.headers["x-rowlock-generation"] == str(resident.generation)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_a_completion_is_what_grpc_answers(client: openai.OpenAI, daemon: DaemonProcess, checkpoint: Path) -> None:
    text, finish, identity = generated(daemon, prompt="hello", max_tokens=12, ignore_eos=True)
    answer = client.completions.create(model="rowlock", prompt="hello", **GREEDY, extra_body=ENDLESS)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, finish)
    assert answer.system_fingerprint == identity
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode("hello").ids
    tokens = client.completions.create(model="rowlock", prompt=ids, **GREEDY, extra_body=ENDLESS)
    assert tokens.choices[0].text == text


def test_several_prompts_are_several_choices(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    prompts = ["hello", "a", "something else"]
    answer = client.completions.create(model="rowlock", prompt=prompts, **GREEDY, extra_body=ENDLESS)
    expected = [generated(daemon, prompt=prompt, max_tokens=12, ignore_eos=True)[0] for prompt in prompts]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.completions.create(model="rowlock", prompt=prompts, stream=True, **GREEDY, extra_body=ENDLESS):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_a_chat_is_the_template_and_then_a_completion(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    rendered = "<system>be brief\n<user>hi\n<assistant>"
    text, _, identity = generated(daemon, prompt=rendered, max_tokens=12, ignore_eos=True)
    answer = client.chat.completions.create(
        model="rowlock",
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        ],
        temperature=0,
        max_completion_tokens=12,
        extra_body=ENDLESS,
    )
    assert (answer.choices[0].message.content, answer.choices[0].message.role) == (text, "assistant")
    assert answer.system_fingerprint == identity
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(rendered)


def test_streams_are_the_same_in_pieces(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    expected, finish, identity = generated(daemon, prompt="<user>hi\n<assistant>", max_tokens=12, ignore_eos=True)
    chunks = list(
        client.chat.completions.create(
            model="rowlock",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
            extra_body=ENDLESS,
        )
    )
    *parts, usage = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [finish]
    assert {chunk.system_fingerprint for chunk in chunks} == {identity}
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (20, 12)
    completion = client.completions.create(
        model="rowlock", prompt="<user>hi\n<assistant>", stream=True, **GREEDY, extra_body=ENDLESS
    )
    assert "".join(part.choices[0].text for part in completion) == expected


def test_sixteen_clients_get_what_each_would_get_alone(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    prompts = [f"client {number} says" for number in range(CLIENTS)]
    expected = [generated(daemon, prompt=prompt, max_tokens=12, ignore_eos=True)[0] for prompt in prompts]
    together = threading.Barrier(CLIENTS)

    def ask(prompt: str) -> list[str]:
        together.wait()
        return [
            client.completions.create(model="rowlock", prompt=prompt, **GREEDY, extra_body=ENDLESS).choices[0].text
            for _ in range(3)
        ]

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(ask, prompts))
    assert answers == [[text] * 3 for text in expected]


def test_a_seed_decides_and_no_seed_does_not(client: openai.OpenAI) -> None:
    def ask(**options: int) -> str:
        return (
            client.completions.create(model="rowlock", prompt="x", max_tokens=40, extra_body=ENDLESS, **options)
            .choices[0]
            .text
        )  # type: ignore[call-overload, no-any-return]

    assert ask(seed=7) == ask(seed=7) != ask(seed=8)
    assert ask() != ask(), "the default is temperature 1"


def test_max_tokens_default_to_what_the_context_has_left(client: openai.OpenAI) -> None:
    prompt = [1] * 2000
    answer = client.completions.create(model="rowlock", prompt=prompt, temperature=0, extra_body=ENDLESS)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (48, "length")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="rowlock", prompt=prompt, max_tokens=49)
    assert caught.value.code == "context_length_exceeded"
    assert "2048" in caught.value.message
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="rowlock", prompt=[1] * 2048)


def test_stop_strings_cut_where_they_begin(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    text = generated(daemon, prompt="hello", max_tokens=12, ignore_eos=True)[0]
    stop = text[4:7]
    answer = client.completions.create(model="rowlock", prompt="hello", stop=["nowhere", stop], **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    cut, finish, _ = generated(daemon, prompt="hello", max_tokens=12, stop=[stop])
    assert (cut, finish) == (text[: text.index(stop)], "stop")


BAD_FIELDS = [
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": 10**400}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "n": 2}, "n"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "echo": True}, "echo"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "logprobs": 0}, "logprobs"),
    ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty"),
    ({"prompt": "x", "logit_bias": {"1": 2}}, "logit_bias"),
    ({"prompt": "x", "stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus"),
    ({"prompt": "x", "bogus": 1}, "bogus"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["x", 3]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({}, "prompt"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
    ({"messages": [{"role": "user", "content": "x"}], "logprobs": True}, "logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "bogus": 1}]}, "messages[0].bogus"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
]


@pytest.mark.parametrize(("body", "param"), BAD_FIELDS, ids=[param for _, param in BAD_FIELDS])
def test_what_is_not_understood_is_refused_by_name(url: str, body: dict[str, object], param: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = post(url, path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")
    assert error["param"] in {param, None}
    assert set(error) == {"message", "type", "param", "code"}


def test_values_that_ask_for_nothing_are_accepted(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="rowlock", messages=[{"role": "user", "content": "x"}], max_tokens=1, n=1, logprobs=False, user="me",
        presence_penalty=0, frequency_penalty=0.0, response_format={"type": "text"}, stop=None, metadata={"a": "b"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {"content-type": "application/json"}, 400),
        (b"[1]", {"content-type": "application/json"}, 400),
        (b'{"prompt": "a", "prompt": "b"}', {"content-type": "application/json"}, 400),
        (b'{"prompt": NaN}', {"content-type": "application/json"}, 400),
        (b"[" * 100_000, {"content-type": "application/json"}, 400),
        (b'{"prompt": "\xff"}', {"content-type": "application/json"}, 400),
        (b'{"\\ud800": 1, "prompt": "x"}', {"content-type": "application/json"}, 400),
        (b'{"prompt": "\\ud800"}', {"content-type": "application/json"}, 400),
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415),
        (b'{"prompt": "x"}', {}, 415),
        (b" " * (4 * 1024 * 1024 + 1), {"content-type": "application/json"}, 413),
    ],
)
def test_bad_bodies(url: str, content: bytes, headers: dict[str, str], status: int) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_routes_that_are_not_there(url: str) -> None:
    assert httpx.get(f"{url}/v1/embeddings").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{url}/v1/completions").status_code == 405
    assert post(url, "/v1/completions", prompt="x", model="gpt-4o").json()["error"]["code"] == "model_not_found"


def test_a_pinned_identity_answers_or_nobody_does(client: openai.OpenAI, daemon: DaemonProcess, url: str) -> None:
    digest = owner(daemon).identity.digest
    for pin in (digest, digest[:12]):
        answer = client.completions.create(
            model="rowlock", prompt="x", max_tokens=1, extra_headers={"x-rowlock-identity": pin}
        )
        assert answer.system_fingerprint == digest
    other = "0" * 64
    answer = post(url, "/v1/completions", {"x-rowlock-identity": other}, prompt="x", max_tokens=1, stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "identity_differs")
    assert answer.headers["x-should-retry"] == "false"
    with pytest.raises(openai.ConflictError):
        client.completions.create(model="rowlock", prompt="x", extra_headers={"x-rowlock-identity": other})
    assert post(url, "/v1/completions", {"x-rowlock-identity": "short"}, prompt="x").status_code == 400


def test_probes_and_version(url: str, daemon: DaemonProcess) -> None:
    assert httpx.get(f"{url}/health").json() == {"status": "alive", "state": "READY"}
    assert httpx.get(f"{url}/ready").json() == {"status": "ready", "state": "READY"}
    assert httpx.get(f"{url}/version").json()["device"] == owner(daemon).device


def test_a_transition_moves_every_answer_to_the_new_identity(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "state", [*HTTP, "--checkpoint", str(checkpoint)]) as daemon:
        url = url_of(daemon)
        old = owner(daemon).identity.digest
        before = post(url, "/v1/completions", prompt="hello", **GREEDY, **ENDLESS).json()
        transition(daemon, target=str(target))
        after = post(url, "/v1/completions", prompt="hello", **GREEDY, **ENDLESS)
        assert before["system_fingerprint"] == old != after.json()["system_fingerprint"]
        assert before["choices"][0]["text"] != after.json()["choices"][0]["text"]
        assert after.headers["x-rowlock-identity"] == owner(daemon).identity.digest
        assert after.headers["x-rowlock-generation"] == "2"
        assert post(url, "/v1/completions", {"x-rowlock-identity": old}, prompt="x").status_code == 409
