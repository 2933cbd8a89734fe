# SPDX-License-Identifier: GPL-3.0-or-later
"""The configuration of the agent: one JSON file in which every key is required and no other is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
_SHORTEST_SECRET = 6  # characters; a shorter value would blank out ordinary words of the log


class ConfigError(Exception):
    """The configuration cannot be used. The message names the key, its value and what is allowed."""


def _between(low: float, high: float | None = None) -> dict[str, float | None]:
    return {"low": low, "high": high}


def _one_of(*choices: str) -> dict[str, tuple[str, ...]]:
    return {"choices": choices}


@dataclass(frozen=True, kw_only=True)
class Api:
    """Where the engine serves; `port` on 127.0.0.1."""

    port: int = field(metadata=_between(1, 65535))


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Where the agent answers /health, /status and /metrics; `port` on every address."""

    port: int = field(metadata=_between(1, 65535))


@dataclass(frozen=True, kw_only=True)
class MemoryGate:
    """How much memory must be available before a start (GiB) and how long to wait for it (seconds)."""

    budget_gib: float = field(metadata=_between(0))
    wait_seconds: float = field(metadata=_between(0))
    drop_page_cache: bool = field()


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Bounds in seconds.

    start: from `docker run` to the first healthy answer. verify: for the first completion.
    drain: for requests in flight once a stop is asked for. drain_notice: the shortest drain, so that the
    gateway sees it. engine_shutdown: the engine's own --shutdown-timeout. container_stop: `docker stop -t`.
    """

    start: float = field(metadata=_between(1))
    verify: float = field(metadata=_between(1))
    drain: float = field(metadata=_between(0))
    drain_notice: float = field(metadata=_between(0))
    engine_shutdown: float = field(metadata=_between(0))
    container_stop: float = field(metadata=_between(1))


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """interval: seconds between looks at the engine. canary_timeout: seconds a one-token request may take,
    and the quiet time after which one is sent. strikes: failed canaries in a row that mean wedged."""

    interval: float = field(metadata=_between(0.1))
    canary_timeout: float = field(metadata=_between(0.1))
    strikes: int = field(metadata=_between(1))


@dataclass(frozen=True, kw_only=True)
class StartLimit:
    """When to stay down: after `burst` failures in a row, none of them after serving for `served_seconds`.

    systemd's own limit counts starts within a time, those that a person asks for too; and a model that loads for ten
    minutes and then fails never reaches it.
    """

    burst: int = field(metadata=_between(1))
    served_seconds: float = field(metadata=_between(0))


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """This rank of a tensor-parallel pair. head and peer are addresses on the fabric; times in seconds."""

    rank: int = field(metadata=_between(0, 1))
    size: int = field(metadata=_between(2, 2))
    head: str = field()
    peer: str = field()
    heartbeat_port: int = field(metadata=_between(1, 65535))
    peer_wait_seconds: float = field(metadata=_between(1))
    heartbeat_timeout: float = field(metadata=_between(1, 15))


@dataclass(frozen=True, kw_only=True)
class Config:
    """One engine: `command` is the whole `docker run` in the foreground; `api` is null on a headless rank."""

    mode: str = field(metadata=_one_of("replica", "tp"))
    unit: str = field()
    container: str = field()
    image: str = field()
    model: str = field()
    served_model_name: str = field()
    command: list[str] = field()
    environment_file: str = field()
    api: Api | None = field()
    agent: Agent = field()
    memory: MemoryGate = field()
    timeouts: Timeouts = field()
    start_limit: StartLimit = field()
    watchdog: WatchdogConfig = field()
    pair: PairConfig | None = field()


def load(path: Path) -> Config:
    """Read and check the configuration file; raises ConfigError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}") from error
    try:
        config: Config = _build(Config, document, "", {})
        _check_whole(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def read_environment(path: str) -> dict[str, str]:
    """Read a file in the format of `docker run --env-file`; raises ConfigError when it cannot be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'environment_file "{path}" cannot be read: {error}') from error
    pairs = (line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#"))
    return {name.strip(): value for name, _equals, value in pairs}


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """The values that must not show in a log, longest first."""
    values = {value for name, value in environment.items() if _SECRET_NAME.search(name.upper())}
    return sorted((value for value in values if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _wrong(path: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{path or 'the file'} is {json.dumps(value)}; allowed: {allowed}")


def _build(kind: Any, value: Any, path: str, limits: Mapping[str, Any]) -> Any:
    """Turn a JSON value into `kind`, or say which key is wrong and what it may be."""
    if get_origin(kind) is UnionType:  # X | None
        return None if value is None else _build(get_args(kind)[0], value, path, limits)
    if is_dataclass(kind):
        return _build_object(kind, value, path)
    if kind is bool:
        if not isinstance(value, bool):
            raise _wrong(path, value, "true or false")
    elif kind is int or kind is float:
        low, high = limits["low"], limits["high"]
        types = int if kind is int else (int, float)
        is_number = isinstance(value, types) and not isinstance(value, bool)
        if not is_number or value < low or (high is not None and value > high):
            noun = "an integer" if kind is int else "a number"
            at_most = "" if high is None else f" and at most {high}"
            raise _wrong(path, value, f"{noun} of at least {low}{at_most}")
    elif kind is str:
        choices = limits.get("choices")
        if choices and value not in choices:
            raise _wrong(path, value, " or ".join(choices))
        if not isinstance(value, str) or not value:
            raise _wrong(path, value, "a text that is not empty")
    elif not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise _wrong(path, value, "a list of texts that is not empty")
    return value


def _build_object(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    prefix = f"{path}." if path else ""
    names = [each.name for each in fields(kind)]
    for name in names:
        if name not in value:
            raise ConfigError(f"{prefix}{name} is missing; every key is required")
    for name in value:
        if name not in names:
            raise ConfigError(f"{prefix}{name} is not a key; allowed: {', '.join(names)}")
    hints = get_type_hints(kind)
    return kind(
        **{
            each.name: _build(hints[each.name], value[each.name], prefix + each.name, each.metadata)
            for each in fields(kind)
        }
    )


def _check_whole(config: Config) -> None:
    """Check what only several keys together can break."""
    limits = config.timeouts
    if limits.engine_shutdown >= limits.container_stop:
        raise _wrong(
            "timeouts.engine_shutdown",
            limits.engine_shutdown,
            f"less than timeouts.container_stop, which is {limits.container_stop:g}",
        )
    names = [value for option, value in pairwise(config.command) if option == "--name"]
    if f"--name={config.container}" not in config.command and config.container not in names:
        raise _wrong("command", config.command, f"a docker run with --name {config.container}")
    if (config.mode == "tp") != (config.pair is not None):
        raise ConfigError(f"pair must be set in mode tp and null in mode replica; mode is {config.mode}")
    if config.pair is not None:
        for key, address in (("pair.head", config.pair.head), ("pair.peer", config.pair.peer)):
            try:
                ip_address(address)
            except ValueError:
                raise _wrong(key, address, "an IP address") from None
    headless = config.pair is not None and config.pair.rank > 0
    if (config.api is None) != headless:
        raise ConfigError("api must be null on rank 1, which is headless, and set everywhere else")
