"""The HTTP API of a real daemon process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from rowlock.cli.daemon_process import DaemonProcess
from support.checkpoints import copy

HTTP = ["--threads", "1", "--http", "127.0.0.1:0"]
"""Options of a daemon that serves HTTP on a free port."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def log_lines(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]


def url_of(daemon: DaemonProcess) -> str:
    """Where the daemon listens, from its log."""
    (line,) = [line for line in log_lines(daemon) if line["event"] == "daemon.listening_http"]
    return str(line["url"])


def post(url: str, path: str, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=fields, headers=headers, timeout=60)


def with_chat_template(base: Path, directory: Path, template: str = CHAT_TEMPLATE) -> Path:
    """A copy of a checkpoint that has a chat template."""
    copy(base, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory
