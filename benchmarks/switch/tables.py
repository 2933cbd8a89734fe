# SPDX-License-Identifier: GPL-3.0-or-later
"""From the figures of a run to tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gateway.gateways import OURS
from benchmarks.gateway.measures import Record
from benchmarks.gateway.tables import conditions, short, table
from benchmarks.switch.absence import NGINX, SETTINGS

TITLES = {OURS: "ours", NGINX: f"nginx, {SETTINGS.nginx_server}"}


def tables(result: dict[str, Any]) -> str:
    """All that a run has measured, in Markdown that can be read as it is."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [f"{conditions(result)}\n- Versions: {versions}"]
    if "away" in result:
        parts += [_summary(result["away"]), _rounds(result["away"])]
    if "switches" in result:
        parts.append(_switches(result["switches"]))
    return "\n\n".join(parts)


def _by_gateway(records: Sequence[Record]) -> dict[str, list[Record]]:
    return {
        name: [record for record in records if record["gateway"] == name]
        for name in TITLES
        if any(record["gateway"] == name for record in records)
    }


def _summary(records: Sequence[Record]) -> str:
    by_gateway = _by_gateway(records)
    watched = records[0]["watched_seconds"]
    rows = [["", *(TITLES[name] for name in by_gateway)]]

    def add(name: str, text: Callable[[list[Record]], str]) -> None:
        rows.append([name, *(text(some) for some in by_gateway.values())])

    add("first 200 after the first copy is READY, s: median", lambda some: _first(some, statistics.median))
    add("the same: worst", lambda some: _first(some, max))
    add(
        "last request that failed, s after READY: worst",
        lambda some: short(max(record["last_failed_seconds"] for record in some)),
    )
    add("failed of those sent while no copy was READY, %", lambda some: _share(some, "during"))
    add(f"failed of those sent in the {watched:.0f} s after READY, %", lambda some: _share(some, "after"))
    add(
        "longest wait of a request that was answered, s",
        lambda some: short(max(record["longest_wait_seconds"] for record in some)),
    )
    return table(rows)


def _first(records: Sequence[Record], of: Callable[[list[float]], float]) -> str:
    seconds = [record["first_good_seconds"] for record in records]
    return "never" if None in seconds else short(of(seconds))


def _share(records: Sequence[Record], when: str) -> str:
    """Of all rounds together, in percent."""
    sent, failed = (sum(record[f"{what}_{when}"] for record in records) for what in ("sent", "failed"))
    return short(100 * failed / sent)


def _rounds(records: Sequence[Record]) -> str:
    by_gateway = _by_gateway(records)
    rows = [
        ["both copies away, s"]
        + [f"{name}: {what}" for what in ("first 200 after READY, s", "failed / sent") for name in by_gateway]
    ]
    for some in zip(*by_gateway.values(), strict=True):
        rows.append(
            [
                f"{some[0]['outage_seconds']:.0f}",
                *(_first([record], max) for record in some),
                *(
                    f"{record['failed_during'] + record['failed_after']} / {record['sent_during'] + record['sent_after']}"
                    for record in some
                ),
            ]
        )
    return table(rows)


def _switches(records: Sequence[Record]) -> str:
    names = {
        "away_seconds": "model away, s",
        "stop_seconds": "of that: drain and stop",
        "engine_seconds": "the engine's start",
        "rest_seconds": "the rest",
        "overhead_seconds": "away beyond the engine's start, s",
        "run_seconds": "the whole run, s",
        "around_seconds": "of that: before and after",
    }

    def text(values: Sequence[float | None]) -> str:
        known = [value for value in values if value is not None]
        return short(statistics.median(known)) if known else "-"

    rows = [["switch to", *names.values()]]
    rows += [[record["mode"], *(text([record[name]]) for name in names)] for record in records]
    for mode in sorted({record["mode"] for record in records}):
        some = [record for record in records if record["mode"] == mode]
        rows.append(
            [f"{mode}, median of {len(some)}", *(text([record[name] for record in some]) for name in names)]
        )
    return table(rows)
