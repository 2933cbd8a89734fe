# SPDX-License-Identifier: GPL-3.0-or-later
"""From the raw figures of one run to tables: medians over the rounds, and ours against the others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gateway.gateways import ALL, OURS
from benchmarks.gateway.measures import DIRECT, Record

PLAIN = "haproxy"


@dataclass(frozen=True)
class Figure:
    """One row: what it is, whether less is better, and the value of each gateway; None for never."""

    name: str
    less: bool
    values: dict[str, float | None]


def tables(result: dict[str, Any]) -> str:
    """All tables of a run, in Markdown that can be read as it is."""
    parts = [_head(result)]
    figures = list(_figures(result))
    if figures:
        parts.append(_compared(figures, [name for name in ALL if name in result["versions"]]))
    if result["held"] or result["growth"]:
        parts.append(_ours_alone(result))
    return "\n\n".join(parts)


def _head(result: dict[str, Any]) -> str:
    plan = result["plan"]
    lines = [
        conditions(result),
        f"- Rounds: {plan['rounds']} of {plan['wrk_seconds']} s for requests, {plan['stream_rounds']} for streams, "
        f"{plan['returns']} for the return of workers, 1 for memory and for the death of a worker; medians",
        "- Added is against the direct way to a worker, in the same round; below zero it is noise. Load at the end is the benchmark's own, too",
        "- Versions: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    ]
    lines += [f"- Left out: {name}: {' '.join(why.split())}" for name, why in result["left_out"].items()]
    lines += [f"- Broken off: {name}: {' '.join(why.split())}" for name, why in result["problems"].items()]
    return "\n".join(lines)


def conditions(result: dict[str, Any]) -> str:
    """The line that tells where, when and for how long a benchmark ran."""
    machine = result["machine"]
    return (
        f"- Machine: {machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}, "
        f"Linux {machine['kernel']}; load average {machine['load_average_at_start']:.2f} at the start, "
        f"{machine['load_average_at_end']:.2f} at the end; "
        f"{machine['date']}, {result['seconds']} s in all{' (--quick)' if result['quick'] else ''}"
    )


def _medians(records: Iterable[Record], value: Callable[[Record], float | None]) -> dict[str, float | None]:
    """The median over the rounds of each gateway; None when one of the rounds has no value."""
    found: dict[str, list[float | None]] = {}
    for record in records:
        found.setdefault(record["gateway"], []).append(value(record))
    return {
        name: None if None in values else statistics.median(each for each in values if each is not None)
        for name, values in found.items()
    }


def _added(records: Sequence[Record], key: str) -> dict[str, float | None]:
    """The median of what a gateway adds to the direct way in the same round."""
    direct = {record["round"]: record[key] for record in records if record["gateway"] == DIRECT}
    others = [record for record in records if record["gateway"] != DIRECT and key in record]
    return _medians(others, lambda record: record[key] - direct[record["round"]])


def _figures(result: dict[str, Any]) -> Iterator[Figure]:
    yield from _throughput(result["throughput"])
    for key in ("p50_ms", "p99_ms", "max_ms"):
        if result["streaming"]:
            name = f"streams: delay added to a chunk, {key.partition('_')[0]}, ms"
            yield Figure(name, True, _added(result["streaming"], key))
    if result["memory"]:
        yield Figure("memory: idle, MB", True, _medians(result["memory"], lambda record: record["idle_mb"]))
        streams = result["plan"]["streams"]
        yield Figure(
            f"memory: with {streams} streams, MB",
            True,
            _medians(result["memory"], lambda record: record["streaming_mb"]),
        )
        opened = _medians(result["memory"], lambda record: record["streams"])
        if min(value or 0 for value in opened.values()) < streams:
            yield Figure("memory: streams that it had open then", False, opened)
    yield from _return(result["return"])
    for measure, event in (
        ("stop", "1 of 4 workers dies"),
        ("rolling", "each worker drains and restarts in turn"),
    ):
        for key, meaning in (
            ("cut", "cut off, %"),
            ("refused", "refused, %"),
            ("wrong", "with lost, doubled or disordered chunks, %"),
        ):
            if result[measure]:
                values = _medians(
                    result[measure],
                    lambda record, key=key: 100 * record[key] / record["streams"],  # type: ignore[misc]
                )
                yield Figure(f"{event}: streams {meaning}", True, values)


def _throughput(records: Sequence[Record]) -> Iterator[Figure]:
    cases = sorted({(record["connections"], record["bytes"], record["model_first"]) for record in records})
    by_case = {
        case: [
            record
            for record in records
            if (record["connections"], record["bytes"], record["model_first"]) == case
        ]
        for case in cases
    }
    for (connections, size, first), some in by_case.items():
        if size == 1_000 and not first:
            for key in ("p50_ms", "p99_ms"):
                name = f"latency added, {connections} at once, {key.partition('_')[0]}, ms"
                yield Figure(name, True, _added(some, key))
    for key, name, less in (
        ("per_second", "requests a second", False),
        ("cpu_us", "CPU a request, us", True),
    ):
        for (connections, size, first), some in by_case.items():
            if connections > 1:
                values = _medians(
                    [record for record in some if record["gateway"] != DIRECT and key in record],
                    lambda record, key=key: record[key],  # type: ignore[misc]
                )
                place = "first" if first else "last"
                yield Figure(f"{name}, {size // 1000} kB, model {place}", less, values)
    failed: dict[str, float | None] = {}
    for record in records:
        failed[record["gateway"]] = (failed.get(record["gateway"]) or 0) + record["errors"]
    if any(failed.values()):
        yield Figure("requests of all these that failed", True, failed)


def _return(records: Sequence[Record]) -> Iterator[Figure]:
    if not records:
        return
    outage = f"after {records[0]['outage_seconds']:.0f} s without a worker"
    yield Figure(
        f"{outage}: first good answer, s",
        True,
        _medians(records, lambda record: record["first_good_seconds"]),
    )
    yield Figure(
        f"{outage}: last request that failed, s",
        True,
        _medians(records, lambda record: record["last_failed_seconds"]),
    )
    for when in ("during", "after"):
        values = _medians(
            records,
            lambda record, when=when: 100 * record[f"failed_{when}"] / record[f"sent_{when}"],  # type: ignore[misc]
        )
        sent = "meanwhile" if when == "during" else f"in the {records[0]['watched_seconds']:.0f} s after it"
        yield Figure(f"{outage}: failed of those sent {sent}, %", True, values)


def _compared(figures: Sequence[Figure], names: Sequence[str]) -> str:
    rows = [["", "better", *names, "ours / best peer", "ours / plain HAProxy"]]
    for figure in figures:
        ours = figure.values.get(OURS)
        peers = {
            name: value
            for name, value in figure.values.items()
            if name != OURS and value is not None and name in names
        }
        best = (min if figure.less else max)(peers, key=lambda name: peers[name], default=None)
        rows.append(
            [
                figure.name,
                "less" if figure.less else "more",
                *(_text(figure, name) for name in names),
                f"{_ratio(ours, peers[best])} ({best})" if best else "-",
                _ratio(ours, peers.get(PLAIN)),
            ]
        )
    return table(rows)


def _text(figure: Figure, name: str) -> str:
    if name not in figure.values:
        return "-"
    value = figure.values[name]
    return "never" if value is None else short(value)


def short(value: float) -> str:
    """Three digits that mean something."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _ratio(ours: float | None, other: float | None) -> str:
    # Below zero is noise: nobody is faster than no gateway.
    if ours is None or other is None or ours < 0 or other <= 0:
        return "-"
    return f"{ours / other:.2f}"


def _ours_alone(result: dict[str, Any]) -> str:
    lines = [
        f"{record['held']} requests held while no worker is there: {record['held_mb']:.0f} MB, "
        f"{record['served']} of them served when workers came."
        for record in result["held"]
    ]
    sizes = sorted({(record["workers"], record["models"]) for record in result["growth"]})
    rows = [
        [
            "ours with",
            "requests a second",
            "CPU a request, us",
            "MB",
            "idle CPU, %",
            "list of models, p50 / p99 ms",
        ]
    ]
    for workers, models in sizes:
        some = [
            record
            for record in result["growth"]
            if (record["workers"], record["models"]) == (workers, models)
        ]

        def median(value: Callable[[Record], float], some: list[Record] = some) -> str:
            return short(statistics.median(value(record) for record in some))

        rows.append(
            [
                f"{workers} workers, {models} model{'s' if models > 1 else ''}",
                median(lambda record: record["per_second"]),
                median(lambda record: record["cpu_us"]),
                median(lambda record: record["resident_mb"]),
                median(lambda record: record["idle_cpu_percent"]),
                median(lambda record: record["list_of_models"]["p50_ms"])
                + " / "
                + median(lambda record: record["list_of_models"]["p99_ms"]),
            ]
        )
    if sizes:
        lines += ["", table(rows)]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join(
        [lines[0], "| " + " | ".join("-" * max(3, width) for width in widths) + " |", *lines[1:]]
    )
