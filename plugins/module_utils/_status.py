# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What an operator is told of all Sparks at once. Private to the collection."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLUMNS = (
    *("host", "wanted", "unit", "phase", "since", "last start", "starts", "failures"),
    *("running", "waiting", "tokens/s", "KV"),
)


def status_report(
    sparks: Mapping[str, Mapping[str, Any]],
    gateways: Mapping[str, Mapping[str, Any]],
    held: Mapping[str, Mapping[str, Any]] | None = None,
    switches: Iterable[str] = (),
) -> dict[str, list[str]]:
    """Make the table, and say what is not as wanted and what mends it.

    ``sparks`` maps each Spark to what serving_info returned (with ``unreachable`` true when it did not), ``gateways``
    each gateway to the answer to its health check (``status`` is the HTTP status, -1 when there was none), and ``held``
    each to what its host tells of the virtual address (``stdout`` of ``ip -json address show to ADDRESS``, none where
    there is no such address). ``switches`` are the last lines of each gateway's history of switches.
    Returns ``table`` and ``problems``, both lists of lines.
    """
    problems = [problem for host, info in sparks.items() for problem in _spark_problems(host, info)]
    wishes = {host: info["wanted"] for host, info in sparks.items() if "wanted" in info}
    if len(set(wishes.values())) > 1 and "both" not in wishes.values():
        said = ", ".join(f"{host} {wish}" for host, wish in wishes.items())
        # A third Spark beside a pair in tp mode keeps its copy: that is no split.
        if list(wishes.values()).count("tp") != 2:
            problems.append(
                f"the Sparks are split ({said}): ansible-playbook playbooks/switch_mode.yml -e mode=replica (or tp)"
            )
    serving = any(info.get("active") for info in sparks.values())
    for host, answer in gateways.items():
        status = int(answer.get("status") or -1)
        if status < 0:
            problems.append(f"the gateway on {host} does not answer: systemctl status haproxy on that host")
        elif status != 200 and serving:
            problems.append(
                f"the gateway on {host} reaches no engine (its health is {status}), though one serves: journalctl -u haproxy on that host"
            )
    lines, of_address = _virtual_address(held or {})
    if set(wishes.values()) == {"stopped"} and not problems:
        lines.append(
            "nothing is wanted on any Spark; to serve: ansible-playbook playbooks/switch_mode.yml -e mode=replica (or tp)"
        )
    return {
        "table": table([COLUMNS, *(_row(host, info) for host, info in sparks.items())])
        + lines
        + _under_way(sparks)
        + _last_switches(switches),
        "problems": problems + of_address,
    }


def _under_way(sparks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Who is changing what is served, each run once with the Sparks that it holds."""
    runs: dict[str, list[str]] = {}
    for host, info in sparks.items():
        if who := info.get("changed_by"):
            runs.setdefault(who, []).append(host)
    return [f"{', '.join(hosts)} is being changed by {who}" for who, hosts in runs.items()]


def _last_switches(texts: Iterable[str]) -> list[str]:
    """The last three switches; all gateways keep the same ones, but one that was away lacks some."""
    records = {}
    for line in "\n".join(texts).splitlines():
        try:
            record = json.loads(line)
            records[record["began"]] = record
        except (ValueError, LookupError, TypeError):
            # Half a line of a gateway whose disk was full.
            continue
    rows = [("switch", "to", "went", "model away", "held", "failed")]
    for began, record in sorted(records.items())[-3:]:
        gateways = record["gateways"].values()
        away = max((one["away"] for one in gateways), default=0)
        counts = (f"{sum(one[name] for one in gateways):.0f}" for name in ("held", "failed"))
        rows.append(
            (began, record["mode"], "well" if record["succeeded"] else "back", f"{away:.0f} s", *counts)
        )
    return ["", *table(rows)] if len(rows) > 1 else []


def _virtual_address(held: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Where the address of all gateways is, and what is wrong with that."""
    told = {host: json.loads(shown["stdout"] or "[]") for host, shown in held.items() if "stdout" in shown}
    if not told:
        return [], []
    # Of links without the address ip(8) leaves empty entries.
    found = {
        host: entry["local"]
        for host, links in told.items()
        for link in links
        for entry in link.get("addr_info", ())
        if entry
    }
    lines = [f"the gateways' address {address} is on {host}" for host, address in found.items()]
    if len(found) == 1:
        return lines, []
    where = f"{', '.join(found)} all hold" if found else "no gateway holds"
    return lines, [
        f"{where} the gateways' address (gateway_virtual_address): journalctl -u keepalived on {', '.join(told)}"
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows of cells to lines of text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _row(host: str, info: Mapping[str, Any]) -> list[str]:
    if "wanted" not in info:
        return [host, "?", "?", "not reached", *[""] * (len(COLUMNS) - 4)]
    mode = _shown_mode(info)
    unit = info["units"].get(mode, {})
    agent = info.get("agent") or {}
    requests = agent.get("requests") or {}
    speed, cache = agent.get("tokens_per_second"), agent.get("kv_cache_usage")
    return [
        host,
        info["wanted"],
        f"{mode} {unit.get('active', '')}" if mode else "none active",
        _phase(unit, agent),
        # "Mon 2026-11-30 08:00:00 UTC": day and zone say nothing that is needed here.
        " ".join(unit.get("since", "").split()[1:3]),
        "-" if agent.get("last_start_seconds") is None else f"{agent['last_start_seconds']:.0f} s",
        str(agent.get("starts", "-")),
        str(agent.get("failures", "-")),
        str(requests.get("running", "-")),
        str(requests.get("waiting", "-")),
        "-" if speed is None else f"{speed:.0f}",
        "-" if cache is None else f"{cache:.0%}" + _room(agent.get("capacity") or {}),
    ]


def _room(capacity: Mapping[str, Any]) -> str:
    """How much the KV cache holds, as the engine told when it started."""
    tokens, requests = capacity.get("kv_tokens"), capacity.get("full_context_requests")
    if tokens is None:
        return ""
    return f" of {tokens:,} tokens" + (f" ({requests:g} full contexts)" if requests is not None else "")


def _why(unit: Mapping[str, Any]) -> str:
    """The agent's last words, which systemd keeps; else systemd's own."""
    told = str(unit["status"] or "")
    return told.removeprefix("failed: ") if told.startswith("failed: ") else str(unit["result"])


def _phase(unit: Mapping[str, Any], agent: Mapping[str, Any]) -> str:
    """The phase, and on the way to serving also how far it is; the cause of a failure has a line of its own."""
    phase = str(agent.get("phase") or "").replace("-", " ")
    told = str(unit.get("status") or "")
    if phase in ("serving", "failed") or (phase and not told.startswith(phase)):
        return phase
    return (told.partition(":")[0] if unit.get("active") in ("inactive", "failed") else told) or "-"


def _shown_mode(info: Mapping[str, Any]) -> str:
    """The mode whose unit tells most: the running one, else the wanted one."""
    running = [mode for mode, unit in info["units"].items() if unit["active"] not in ("inactive", "failed")]
    return str([*running, *info["enabled"], ""][0])


def _spark_problems(host: str, info: Mapping[str, Any]) -> list[str]:
    if "wanted" not in info:
        return [f"{host} was not reached: {info.get('msg', 'no answer')}"]
    wanted, units = info["wanted"], info["units"]
    if wanted == "both":
        return [
            f"{host} has both modes enabled: ansible-playbook playbooks/switch_mode.yml -e mode=replica (or tp)"
        ]
    problems = []
    for mode, unit in units.items():
        if mode == wanted or unit["active"] in ("inactive", "failed"):
            continue
        if wanted == "stopped":
            problems.append(
                f"{host} runs {mode}, and no mode is enabled there, so a reboot ends it: ansible-playbook playbooks/switch_mode.yml -e "
                f"mode={mode} (or stopped)"
            )
        else:
            problems.append(
                f"{host} runs {mode}, which is not wanted: systemctl stop vllm-{mode} on that host"
            )
    problems += [f"{host}: {problem}" for problem in info.get("port_problems", ())]
    unit = units.get(wanted)
    if unit is None:
        return problems
    if unit["active"] == "failed":
        problems.append(
            f"{host}: vllm-{wanted} has failed ({_why(unit)}): journalctl -u vllm-{wanted} -e on that host, then run the switch again"
        )
    elif unit["active"] != "active":
        problems.append(
            f"{host}: vllm-{wanted} does not serve yet, it is {unit['active']} ({unit['status'] or unit['sub']})"
        )
    elif (info.get("agent") or {}).get("phase") != "serving":
        phase = (info.get("agent") or {}).get("phase", "silent")
        problems.append(
            f"{host}: vllm-{wanted} is active, but its agent is {phase}: journalctl -u vllm-{wanted} -e on that host"
        )
    elif strikes := info["agent"].get("strikes"):
        problems.append(
            f"{host}: the engine shows no progress and did not answer {strikes} times; it gets no more requests, and is "
            f"restarted unless it moves again: journalctl -u vllm-{wanted} -e on that host"
        )
    if unit["stale"]:
        problems.append(
            f"{host}: vllm-{wanted} runs with former settings: ansible-playbook playbooks/site.yml restarts it"
        )
    return problems
