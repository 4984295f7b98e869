"""Chat templates: the text that transformers makes of them, and no way out of the sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoints import TINY, copy
from transformers.utils.chat_template_utils import render_jinja_template

from rowlock.bindings.checkpoint.assets import Assets
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.daemon.owner.chat import ChatTemplate, Conversation, Message, read_chat_template
from rowlock.daemon.owner.text import Text
from rowlock.v1.errors import OwnerError, Reason

TURNS = (("system", "be <brief> & kind"), ("user", "Grüß dich\n"), ("assistant", " hm "), ("user", "{{ 1 + 1 }}"))
CONVERSATION = Conversation(tuple(Message(*turn) for turn in TURNS))
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m.content | trim }}\n{% endfor %}",
    "blocks": "{%- for m in messages %}\n    {%- if loop.first %}\n{{ bos_token }}\n    {%- endif %}\n{{ m.content }}\n"
    "{%- endfor %}\n{% if add_generation_prompt %}\n<assistant>\n{% endif %}\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tools": "{% if tools is none %}no tools{% endif %}{{ dict(a=1).items() | list }}",
}


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate(Path("chat_template.jinja"), source, special)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str) -> None:
    messages = [{"role": role, "content": content} for role, content in TURNS]
    (expected,), _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], add_generation_prompt=True, bos_token="<s>"
    )
    assert template(TEMPLATES[name], bos_token="<s>").render(CONVERSATION) == expected


def test_the_real_models_chat_is_that_of_transformers(real_model: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    messages = [{"role": role, "content": content} for role, content in TURNS]
    reference = AutoTokenizer.from_pretrained(real_model).apply_chat_template(messages, add_generation_prompt=True)
    with Checkpoint.open(real_model) as checkpoint:
        text = Text(real_model, checkpoint.assets, checkpoint.config)
    assert list(text.tokens_of(CONVERSATION)) == list(reference["input_ids"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__globals__['__builtins__'] }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.bogus.more }}",
    ],
)
def test_a_template_that_reaches_out_or_refuses_is_a_refusal(source: str) -> None:
    with pytest.raises(OwnerError, match="messages: the chat template refuses them") as caught:
        template(source).render(CONVERSATION)
    assert caught.value.reason is Reason.ARGUMENT_INVALID


def assets(**files: object) -> Assets:
    return Assets(
        {
            name.replace("__", "."): (item if isinstance(item, str) else json.dumps(item)).encode()
            for name, item in files.items()
        }
    )


def rendered(given: Assets) -> str | None:
    found = read_chat_template(Path("/m"), given)
    return found.render(CONVERSATION) if found else None


def test_where_a_template_is_looked_for() -> None:
    config = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "</s>"}, "bos_token": None}
    assert rendered(assets()) is None
    assert rendered(assets(tokenizer_config__json=config)) == "config </s>"
    assert rendered(assets(tokenizer_config__json=config, chat_template__json={"chat_template": "json"})) == "json"
    assert rendered(assets(tokenizer_config__json=config, chat_template__jinja="file {{ eos_token }}")) == "file </s>"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "default"}]
    assert rendered(assets(tokenizer_config__json={"chat_template": named})) == "default"
    assert rendered(assets(tokenizer_config__json={"chat_template": named[:1]})) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (assets(chat_template__jinja="a\n{% for %}"), "chat_template.jinja: chat template, line 2"),
        (assets(tokenizer_config__json={"chat_template": 3}), "tokenizer_config.json: chat_template is not a text"),
        (assets(tokenizer_config__json="{"), "tokenizer_config.json: is not valid JSON"),
        (assets(tokenizer_config__json=[]), "tokenizer_config.json: is not a JSON object"),
        (Assets({"chat_template.jinja": b"\xff"}), "chat_template.jinja: is not UTF-8"),
    ],
)
def test_a_template_that_cannot_be_one_is_refused_with_its_file(given: Assets, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_chat_template(Path("/m"), given)
    assert says in str(caught.value)
    assert caught.value.fault is CheckpointFault.MALFORMED


def test_without_a_template_a_conversation_is_refused(tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "bare")
    with Checkpoint.open(directory) as checkpoint, pytest.raises(OwnerError, match="no chat template"):
        Text(directory, checkpoint.assets, TINY).tokens_of(CONVERSATION)
