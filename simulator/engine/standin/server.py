# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP side: vLLM's paths, bodies, status codes and holes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import math
import random
import struct
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from standin import VERSION, metrics, replies
from standin.replies import Reply
from standin.scheduler import EngineDeadError, QueueFullError, Request

if TYPE_CHECKING:
    from standin.config import EngineConfig
    from standin.scheduler import Scheduler

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
UNCOUNTED = ("/health", "/load", "/metrics", "/ping", "/version")
BODY_LIMIT = 32 * 2**20
SWEEP_SECONDS = 0.05

Body = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(Exception):
    """An error in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """The client's fault: 400."""
    return ApiError(400, message, "BadRequestError", param)


def invalid(message: str, param: str = "") -> ApiError:
    """A body that is not of the form that is asked for: 400, in the words that the checker of bodies has for it."""
    return ApiError(400, message, "Bad Request", f"body.{param}" if param else "body")


def from_engine(error: Exception) -> ApiError:
    """What the client sees of an error of the engine."""
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), "ServiceUnavailableError")
    return ApiError(500, str(error), "InternalServerError")


@dataclass
class EngineState:
    """What the engine's life means for the API; the engine writes, the server reads."""

    draining: bool = False
    dead: bool = False


@dataclass(frozen=True)
class Prompt:
    """One prompt: its bytes (for the prefix cache) and its length in tokens."""

    data: bytes
    tokens: int

    @classmethod
    def of(cls, value: str | list[int]) -> Prompt:
        """From text or from token ids."""
        if isinstance(value, str):
            return cls(value.encode(), replies.count_tokens(value))
        return cls(json.dumps(value).encode(), len(value))


def prompts_of(value: Any, param: str) -> list[Prompt]:
    """From a string, a list of strings, a list of token ids or a list of such lists."""
    items = value if isinstance(value, list) else [value]
    if isinstance(value, list) and items and isinstance(items[0], int):
        items = [items]
    if not items or not all(item and isinstance(item, (str, list)) for item in items):
        message = f"{param} must be a non-empty string or list of token ids, or a list of these"
        raise invalid(message, param) if value else bad_request(message, param)
    return [Prompt.of(item) for item in items]


def integer(body: Body, name: str, default: int | None, minimum: int = 0) -> int | None:
    """A whole number of the body, checked."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(f"{name} should be a valid integer, got {value!r}.", name)
    if value < minimum:
        raise bad_request(f"{name} must be an integer of at least {minimum}, got {value!r}.", name)
    return value


class Shape:
    """How replies look on the wire: this one for /v1/completions."""

    stream_object = final_object = "text_completion"
    id_prefix = "cmpl"
    # What is null unless it is asked for, of a whole answer, of its choices, and of a stream's choices.
    nulls: Body = dict.fromkeys(["service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"])
    choice_nulls: Body = dict.fromkeys(["token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts"])
    stream_nulls: Body = dict.fromkeys(["stop_reason", "prompt_token_ids", "token_ids"])

    def heads(self, reply: Reply, start: int, end: int) -> list[Body]:
        """What a stream's choices tell by themselves before the characters from start to end."""
        return []

    def delta(self, reply: Reply, start: int, end: int) -> Body:
        """The part of a stream's choice that tells the characters from start to end."""
        return {"text": reply.text[start:end]} | self.stream_nulls

    def content(self, reply: Reply) -> Body:
        """The part of a whole choice that holds the reply."""
        return {"text": reply.text}


class ChatShape(Shape):
    """For /v1/chat/completions."""

    stream_object, final_object, id_prefix = "chat.completion.chunk", "chat.completion", "chatcmpl"
    nulls: Body = Shape.nulls | dict.fromkeys(["prompt_logprobs", "prompt_token_ids", "prompt_text"])
    choice_nulls: Body = dict.fromkeys(["token_ids", "routed_experts"])
    stream_nulls: Body = dict.fromkeys(["token_ids"])

    def heads(self, reply: Reply, start: int, end: int) -> list[Body]:
        """Each tool call that begins between start and end: its name comes before its arguments."""
        heads, offset = [], 0
        for index, call in enumerate(reply.calls):
            if start <= offset < end:
                part = {"id": call.id, "type": "function", "index": index, "function": {"name": call.name}}
                heads.append({"delta": {"content": None, "tool_calls": [part]}} | self.stream_nulls)
            offset += len(call.arguments)
        return heads

    def delta(self, reply: Reply, start: int, end: int) -> Body:
        """Content, or the arguments of the tool calls that lie between start and end."""
        if not reply.calls:
            text = reply.text[start:end]
            return {"delta": {"content": text} if text else {}} | self.stream_nulls
        parts, offset = [], 0
        for index, call in enumerate(reply.calls):
            low, high = max(start, offset), min(end, offset + len(call.arguments))
            if low < high:
                parts.append({"index": index, "function": {"arguments": reply.text[low:high]}})
            offset += len(call.arguments)
        return {"delta": {"content": None, "tool_calls": parts}} | self.stream_nulls

    def content(self, reply: Reply) -> Body:
        """The assistant's message."""
        message: Body = {"role": "assistant", "content": None if reply.calls else reply.text}
        message |= dict.fromkeys(["refusal", "annotations", "audio", "function_call"])
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in reply.calls
            ]
        return {"message": message | {"reasoning": None}}


class Server:
    """The API of one engine."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, counters: metrics.EngineMetrics) -> None:
        self.state = EngineState()
        self._config = config
        self._args = config.args
        self._scheduler = scheduler
        self._metrics = counters
        self._http = metrics.HttpMetrics()
        self._created = int(time.time())
        self._open: dict[asyncio.Task[Any], web.Request] = {}
        self._quiet = set((self._args.disable_access_log_for_endpoints or "").split(","))
        self._chat_shape, self._text_shape = ChatShape(), Shape()
        self._fingerprint = {"system_fingerprint": config.system_fingerprint}
        self.idle = asyncio.Event()  # set while nothing is in flight
        self.idle.set()

    @property
    def in_flight(self) -> int:
        """How many requests are not answered yet."""
        return len(self._open)

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(
            middlewares=[self._track, self._answer_errors, self._guard], client_max_size=BODY_LIMIT
        )
        get = {
            "/health": self._health,
            "/ping": self._health,
            "/load": self._load,
            "/version": self._version,
            "/v1/models": self._models,
            "/metrics": self._exposition,
        }
        post = {
            "/ping": self._health,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/invocations": self._invocations,
        }
        if self._config.pooling and self._args.convert == "embed":
            post["/v1/embeddings"] = self._embeddings
        elif not self._config.pooling:
            post |= {"/v1/chat/completions": self._chat, "/v1/completions": self._completions}
        app.add_routes([web.get(path, handler, allow_head=False) for path, handler in get.items()])
        app.add_routes([web.post(path, handler) for path, handler in post.items()])
        return app

    async def sweep(self) -> None:
        """Cancel, for ever, the requests whose clients have left (aiohttp's versions differ in doing so)."""
        while True:
            for task, request in list(self._open.items()):
                if request.transport is None or request.transport.is_closing():
                    task.cancel()
            await asyncio.sleep(SWEEP_SECONDS)

    # --- middlewares, outermost first ---

    @web.middleware
    async def _track(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        task, began = asyncio.current_task(), time.monotonic()
        assert task is not None
        self._open[task] = request
        self.idle.clear()
        try:
            response = await handler(request)
        finally:
            del self._open[task]
            if not self._open:
                self.idle.set()
        if request.path not in UNCOUNTED:
            resource = request.match_info.route.resource
            path = resource.canonical if resource else "none"
            sizes = request.content_length or 0, response.content_length or 0
            self._http.count(path, request.method, response.status, *sizes, time.monotonic() - began)
        if not self._args.disable_uvicorn_access_log and request.path not in self._quiet:
            line = f'{request.remote} - "{request.method} {request.path} HTTP/1.1" {response.status}'
            print(f"(APIServer) INFO:     {line}", flush=True)
        return response

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return web.json_response(error.body, status=error.status)
        except (EngineDeadError, QueueFullError) as error:
            answer = from_engine(error)
            return web.json_response(answer.body, status=answer.status)
        except web.HTTPException as error:
            return web.json_response({"detail": error.reason}, status=error.status)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        keys = self._config.api_keys
        if keys and request.method != "OPTIONS" and request.path.startswith(GUARDED):
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            known = [hmac.compare_digest(token.encode(), key.encode()) for key in keys]
            if scheme.lower() != "bearer" or not any(known):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    # --- what any server has ---

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.state.dead else 200)

    async def _load(self, request: web.Request) -> web.Response:
        tracked = self._args.enable_server_load_tracking
        return web.json_response({"server_load": self._scheduler.unfinished if tracked else 0})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": f"{VERSION}+standin"})

    async def _exposition(self, request: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), content_type="text/plain", charset="utf-8")

    @property
    def _permission(self) -> Body:
        refused = ("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking")
        return {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": self._created,
            **dict.fromkeys(refused, False),
            **dict.fromkeys(["allow_sampling", "allow_logprobs", "allow_view"], True),
            "organization": "*",
            "group": None,
        }

    async def _models(self, request: web.Request) -> web.Response:
        models: list[Body] = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": str(self._config.model),
                "parent": None,
                "max_model_len": self._config.max_model_len,
                "permission": [self._permission],
            }
            for name in self._config.served_names
        ]
        return web.json_response({"object": "list", "data": models})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        text = self._chat_text(body) if "messages" in body else body.get("prompt")
        if not isinstance(text, str):
            raise invalid("prompt must be a string", "prompt")
        tokens = replies.encode(text)
        answer = {"count": len(tokens), "max_model_len": self._config.max_model_len, "tokens": tokens}
        return web.json_response(answer | {"token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await self._body(request)).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise invalid("tokens must be a list of integers", "tokens")
        return web.json_response({"prompt": replies.decode(tokens)})

    async def _invocations(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        if self._config.pooling and "input" in body:
            return await self._embeddings(request)
        if not self._config.pooling and "messages" in body:
            return await self._chat(request)
        if not self._config.pooling and "prompt" in body:
            return await self._completions(request)
        raise bad_request("no handler of this model takes such a body")

    # --- generating ---

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        prompt = Prompt.of(self._chat_text(body))
        limit = integer(body, "max_completion_tokens", integer(body, "max_tokens", None, 1), 1)
        max_tokens = self._max_tokens(prompt, limit)
        reply = self._tool_reply(body, max_tokens) or self._text_reply(body, max_tokens)
        return await self._generate(request, body, self._chat_shape, [(prompt, reply)])

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        limit = integer(body, "max_tokens", 16, 1)
        pairs = []
        for prompt in prompts_of(body.get("prompt"), "prompt"):
            pairs.append((prompt, self._text_reply(body, self._max_tokens(prompt, limit))))
        return await self._generate(request, body, self._text_shape, pairs)

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        prompts = prompts_of(body.get("input"), "input")
        size = integer(body, "dimensions", None, 1) or int(self._config.model_config.get("hidden_size", 384))
        for prompt in prompts:
            self._max_tokens(prompt, 0)
        requests = [Request(prompt.data, prompt.tokens, 0, "stop") for prompt in prompts]
        await self._run(requests)
        data = [
            {"index": index, "object": "embedding", "embedding": _vector(prompt.data, size, body)}
            for index, prompt in enumerate(prompts)
        ]
        tokens = sum(prompt.tokens for prompt in prompts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        answer = {"id": f"embd-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return web.json_response(answer | {"model": self._model(body), "data": data, "usage": usage})

    async def _generate(
        self, request: web.Request, body: Body, shape: Shape, pairs: Sequence[tuple[Prompt, Reply]]
    ) -> web.StreamResponse:
        n = integer(body, "n", 1, 1) or 1
        if n > 1 and body.get("temperature") == 0:
            raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
        options = body.get("stream_options")
        if options and not body.get("stream"):
            raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
        all_replies = [reply for _, reply in pairs for _ in range(n)]
        requests = [
            Request(prompt.data, prompt.tokens, reply.tokens, reply.engine_finish_reason)
            for prompt, reply in pairs
            for _ in range(n)
        ]
        limit = (
            body.get("max_completion_tokens") or body.get("max_tokens") or max(r.tokens for r in all_replies)
        )
        for reply in all_replies:
            self._metrics.observe("request_params_n", n)
            self._metrics.observe("request_params_max_tokens", limit)
            self._metrics.observe("request_max_num_generation_tokens", reply.tokens)
        head = {
            "id": f"{shape.id_prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}",
            "object": shape.stream_object if body.get("stream") else shape.final_object,
            "created": int(time.time()),
            "model": self._model(body),
        }
        prompt_tokens = sum(prompt.tokens for prompt, _ in pairs)

        def usage() -> Body:
            generated = sum(r.generated for r in requests)
            total = prompt_tokens + generated
            return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": generated}

        details: Body = dict.fromkeys(["prompt_tokens_details", "completion_tokens_details"])

        if body.get("stream"):
            with_usage = bool((options or {}).get("include_usage"))
            return await self._stream(
                request, shape, head, requests, all_replies, usage if with_usage else None
            )
        await self._run(requests)
        choices = [
            {
                "index": index,
                "logprobs": None,
                "finish_reason": reply.finish_reason,
                "stop_reason": reply.stop_reason,
                **shape.content(reply),
                **shape.choice_nulls,
            }
            for index, reply in enumerate(all_replies)
        ]
        answer = head | {"choices": choices, "usage": usage() | details} | self._fingerprint
        return web.json_response(answer | shape.nulls)

    async def _run(self, requests: Sequence[Request]) -> None:
        """Have the engine finish all of them; the client's leaving aborts them."""
        self._refuse_when_draining()
        self._scheduler.submit(requests)
        try:
            for sequence in requests:
                while not sequence.done:
                    await sequence.progress(sequence.generated)
                await sequence.progress(-1)  # raises when it ended badly
        finally:
            for sequence in requests:
                self._scheduler.abort(sequence)

    async def _stream(
        self,
        request: web.Request,
        shape: Shape,
        head: Body,
        requests: Sequence[Request],
        all_replies: Sequence[Reply],
        usage: Callable[[], Body] | None,
    ) -> web.StreamResponse:
        self._refuse_when_draining()
        self._scheduler.submit(requests)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        try:
            await response.prepare(request)
            try:
                # The last chunk tells what answered: the one with the usage where that is wanted.
                last = {} if usage else self._fingerprint
                async for chunk in self._chunks(shape, head, requests, all_replies, last):
                    await _send(response, chunk)
                if usage:
                    await _send(response, head | {"choices": [], "usage": usage()} | self._fingerprint)
            except EngineDeadError as error:
                await _send(response, from_engine(error).body)
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client has left
        finally:
            for sequence in requests:
                self._scheduler.abort(sequence)
        return response

    async def _chunks(
        self,
        shape: Shape,
        head: Body,
        requests: Sequence[Request],
        all_replies: Sequence[Reply],
        last: Body,
    ) -> AsyncIterator[Body]:
        """What a stream tells, choice after choice, as the tokens come; the end of each choice with what ``last`` says."""
        for index, (sequence, reply) in enumerate(zip(requests, all_replies, strict=True)):
            empty = {"index": index, "logprobs": None, "finish_reason": None}
            seen = 0
            while seen < reply.tokens:
                count = await sequence.progress(seen)
                if not seen and isinstance(shape, ChatShape):
                    first = head | {"choices": [empty | {"delta": {"role": "assistant", "content": ""}}]}
                    yield first | dict.fromkeys(["prompt_token_ids", "prompt_text"])
                part = (reply, reply.position(seen), reply.position(count))
                for beginning in shape.heads(*part):
                    yield head | {"choices": [empty | beginning]}
                choice = empty | shape.delta(*part)
                seen = count
                if seen < reply.tokens:
                    yield head | {"choices": [choice]}
                    continue
                end = {"finish_reason": reply.finish_reason, "stop_reason": reply.stop_reason}
                yield head | {"choices": [choice | end]} | last

    # --- reading bodies ---

    async def _body(self, request: web.Request) -> Body:
        if request.content_type != "application/json":
            raise bad_request("Unsupported Media Type: Only 'application/json' is allowed")
        try:
            body = json.loads(await request.read())
        except json.JSONDecodeError as error:
            raise invalid(f"JSON decode error: {error}", str(error.pos)) from error
        except ValueError as error:
            raise bad_request(f"There was an error parsing the body: {error}") from error
        if not isinstance(body, dict):
            raise invalid("the body must be a JSON object")
        self._model(body)
        return body

    def _model(self, body: Body) -> str:
        """The name asked for; without one, the first that is served."""
        names = self._config.served_names
        model = body.get("model") or names[0]
        if model not in names:
            raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        return str(model)

    @staticmethod
    def _chat_text(body: Body) -> str:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            message = "messages must be a non-empty list of objects"
            raise bad_request(message, "messages") if messages == [] else invalid(message, "messages")
        lines = []
        for message in messages:
            if not isinstance(message.get("role"), str):
                raise invalid(
                    "each message must have a role",
                    "messages.0.ChatCompletionDeveloperMessageParam.role",
                )
            lines.append(f"{message['role']}: {_text_of(message)}")
        if body.get("tools"):
            lines.append(json.dumps(body["tools"]))
        return "\n".join(lines)

    def _max_tokens(self, prompt: Prompt, limit: int | None) -> int:
        """How many tokens may come after the prompt. Raises a 400 when both do not fit the context."""
        context = self._config.max_model_len
        if (limit or 0) > context:
            raise bad_request(
                f"max_tokens={limit} cannot be greater than max_model_len={context}. Please request fewer output tokens.",
                "max_tokens",
            )
        room = context - prompt.tokens
        if room < 1 or (limit or 0) > room:
            raise bad_request(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{limit or 0} output tokens and your prompt contains {prompt.tokens} input tokens. "
                "Please reduce the length of the input prompt or the number of requested output tokens.",
                "input_tokens",
            )
        return room if limit is None else limit

    def _text_reply(self, body: Body, max_tokens: int) -> Reply:
        stop = body.get("stop") or []
        minimum = integer(body, "min_tokens", 0) or 0
        natural = self._config.settings.reply_tokens
        words = [stop] if isinstance(stop, str) else stop
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise invalid("stop must be a string or a list of strings", "stop")
        return replies.text_reply(natural, max_tokens, minimum, bool(body.get("ignore_eos")), words)

    def _tool_reply(self, body: Body, max_tokens: int) -> Reply | None:
        tools = body.get("tools") or []
        choice = body.get("tool_choice") or ("auto" if tools else "none")
        if choice == "none":
            return None
        if not tools:
            raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if not all(isinstance(tool, dict) and "name" in tool.get("function", {}) for tool in tools):
            raise invalid("each tool must be an object with a named function", "tools")
        asked: Body = next((m for m in reversed(body["messages"]) if m["role"] != "system"), {})
        prompt = _text_of(asked)
        if isinstance(choice, dict):
            name = (choice.get("function") or {}).get("name")
            named = [tool for tool in tools if tool["function"]["name"] == name]
            if not named:
                raise bad_request(
                    "The tool specified in `tool_choice` does not match any of `tools`", "tool_choice"
                )
            return replies.tool_reply([replies.call_tool(named[0], prompt)], max_tokens, "stop")
        if choice not in ("auto", "required"):
            raise bad_request(f"Invalid value for `tool_choice`: {choice}!", "tool_choice")
        if choice == "auto" and not self._args.enable_auto_tool_choice:
            raise bad_request(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            )
        wanted = replies.wanted_tools(tools, prompt) if asked.get("role") == "user" else []
        if choice == "required":
            wanted = wanted or tools[:1]
        if body.get("parallel_tool_calls") is False:
            wanted = wanted[:1]
        calls = [replies.call_tool(tool, prompt) for tool in wanted]
        return replies.tool_reply(calls, max_tokens, "tool_calls") if calls else None

    def _refuse_when_draining(self) -> None:
        if self.state.draining:
            raise ApiError(500, "cannot schedule new futures after shutdown", "InternalServerError")


async def _send(response: web.StreamResponse, chunk: Body) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


def _text_of(message: Body) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def _vector(data: bytes, size: int, body: Body) -> list[float] | str:
    """A unit vector that depends on the text alone, as numbers or in base64."""
    source = random.Random(hashlib.sha256(data).digest())
    numbers = [source.gauss(0, 1) for _ in range(size)]
    length = math.sqrt(sum(x * x for x in numbers))
    vector = [x / length for x in numbers]
    if body.get("encoding_format") == "base64":
        return base64.b64encode(struct.pack(f"<{size}f", *vector)).decode()
    return vector
