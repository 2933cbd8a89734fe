# SPDX-License-Identifier: GPL-3.0-or-later
"""What the stand-in says: countable text, tool calls that fit their schema, a reversible tokenizer."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TOKEN_BYTES = 4


def encode(text: str) -> list[int]:
    """Token ids of a text: each holds up to four bytes, so that `decode` can give them back."""
    data = text.encode()
    return [
        int.from_bytes(b"\1" + data[i : i + TOKEN_BYTES], "big") for i in range(0, len(data), TOKEN_BYTES)
    ]


def decode(ids: Sequence[int]) -> str:
    """The text of token ids; ids that `encode` never gives count as unknown."""
    pieces = [i.to_bytes((i.bit_length() + 7) // 8, "big") for i in ids if i >= 0]
    return b"".join(p[1:] if p[:1] == b"\1" else b"<unk>" for p in pieces).decode(errors="replace")


def count_tokens(text: str) -> int:
    """How many tokens `encode` makes of the text."""
    return -(-len(text.encode()) // TOKEN_BYTES)


def numbered(count: int) -> str:
    """`count` tokens of text: `000 001 002 ` and so on, from 999 back to 000."""
    return "".join(f"{i % 1000:03d} " for i in range(count))


@dataclass(frozen=True)
class ToolCall:
    """One call of a function, arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"chatcmpl-tool-{uuid.uuid4().hex}")


@dataclass(frozen=True)
class Reply:
    """A whole answer, known before its first token is generated."""

    text: str
    tokens: int
    finish_reason: str
    stop_reason: str | None = None
    calls: tuple[ToolCall, ...] = ()

    @property
    def engine_finish_reason(self) -> str:
        """As the metrics count it: a tool call is an ordinary stop."""
        return "stop" if self.finish_reason == "tool_calls" else self.finish_reason

    def position(self, tokens: int) -> int:
        """How many characters the first `tokens` tokens show (the text is ASCII)."""
        return len(self.text) if tokens >= self.tokens else min(TOKEN_BYTES * tokens, len(self.text))


def text_reply(
    natural: int, max_tokens: int, min_tokens: int, ignore_eos: bool, stop: Sequence[str]
) -> Reply:
    """Numbered text that ends by itself after `natural` tokens, if no limit or stop string comes first."""
    ends_itself = not ignore_eos and max(natural, min_tokens) < max_tokens
    tokens = max(natural, min_tokens) if ends_itself else max_tokens
    text = numbered(tokens)
    found = [(text.find(word), word) for word in stop if word and word in text]
    if found:
        start, word = min(found)
        return Reply(text[:start], -(-(start + len(word)) // TOKEN_BYTES), "stop", word)
    return Reply(text, tokens, "stop" if ends_itself else "length")


def tool_reply(calls: Sequence[ToolCall], max_tokens: int, finish_reason: str) -> Reply:
    """An answer that calls tools."""
    text = "".join(call.arguments for call in calls)
    tokens = max(1, count_tokens(text))
    if tokens > max_tokens:
        return Reply(text[: TOKEN_BYTES * max_tokens], max_tokens, "length", calls=tuple(calls))
    return Reply(text, tokens, finish_reason, calls=tuple(calls))


def wanted_tools(tools: Sequence[dict[str, Any]], prompt: str) -> list[dict[str, Any]]:
    """The tools that a prompt asks for: by name, or by a word of its name of four letters and more."""
    asked = prompt.lower()

    def is_asked(name: str) -> bool:
        words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if len(word) >= 4]
        return name.lower() in asked or any(re.search(rf"\b{re.escape(word)}", asked) for word in words)

    return [tool for tool in tools if is_asked(tool["function"]["name"])]


def call_tool(tool: dict[str, Any], prompt: str) -> ToolCall:
    """A call whose arguments fit the tool's schema; text arguments quote the prompt where it quotes something."""
    function = tool["function"]
    quoted = re.findall(r"\"([^\"]+)\"|'([^']+)'", prompt)
    texts = [double or single for double, single in quoted]
    return ToolCall(function["name"], json.dumps(_example(function.get("parameters") or {}, "", texts)))


def _example(schema: dict[str, Any], name: str, texts: list[str]) -> Any:
    """A value that fits a JSON schema: required properties only, first choices, smallest numbers."""
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        return {key: _example(properties.get(key, {}), key, texts) for key in schema.get("required", [])}
    if kind == "array":
        return [_example(schema.get("items", {}), name, texts) for _ in range(schema.get("minItems", 1))]
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    return texts.pop(0) if texts else name or "text"
