# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is said of a switch before it, and what follows from how it went. Private to the collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import _modes as modes
from ._status import table

Results = Mapping[str, Mapping[str, Any]]


def switch_announcement(mode: str, sparks: Results, wishes: Mapping[str, str]) -> list[str]:
    """The lines that tell what a switch is about to do.

    ``mode`` is what was asked for (``replica``, ``tp`` or ``stopped``), ``sparks`` each Spark to what serving_info returned
    just now, ``wishes`` each to the mode that it shall have.
    """
    rows = [("host", "now", "then", "in flight", "last start took")]
    for host, info in sparks.items():
        agent = info.get("agent") or {}
        requests = agent.get("requests") or {}
        seconds = (info.get("last_starts") or {}).get(wishes[host])
        rows.append(
            (
                host,
                info.get("wanted", "?"),
                wishes[host],
                str(sum(requests.values())) if requests else "-",
                "-" if seconds is None else f"{seconds:.0f} s",
            )
        )
    before = sorted({info.get("wanted", "?") for info in sparks.values()})
    return [f"from {' and '.join(before)} to {mode}", *table(rows)]


def switch_outcome(
    mode: str, sparks: Results, unanswered: Mapping[str, str], come_back: bool = True
) -> dict[str, Any]:
    """What a switch came to, and what shall follow.

    ``mode`` is what was asked for. ``sparks`` maps each Spark to ``former`` (the mode that was enabled there before),
    ``wish`` (the mode that it should have got) and ``brought`` (``failed``, ``unreachable`` and ``msg`` of bringing it there).
    ``unanswered`` maps each gateway to why no completion came through it afterwards, empty when one came. ``come_back``
    says whether the operator wants the former mode back.

    Returns ``causes`` (a list, empty when all is well), ``former`` (Spark to mode, empty when there is no way back or it is
    not wanted), ``name`` (the former mode of all Sparks together) and ``message`` (the story, with the causes last).
    """
    causes = _wrong(sparks, "brought", unanswered)
    formers = {host: str(spark["former"]) for host, spark in sparks.items()}
    # A Spark that served nothing, or of which nobody knows what, has nothing to come back to; nor has half of a pair.
    is_way_back = (
        mode != "stopped"
        and set(formers.values()) <= set(modes.UNITS)
        and list(formers.values()).count("tp") in (0, 2)
        and any(spark["former"] != spark["wish"] for spark in sparks.values())
    )
    # A third Spark beside a pair in tp mode has its copy.
    name = "tp" if "tp" in formers.values() else "replica"
    if is_way_back and come_back:
        follows = f"Bringing back {name}."
    else:
        why = "as rollback is false" if is_way_back else "as there was no other mode that served"
        follows = f"Nothing is brought back, {why}. {_try(mode)}"
    return {
        "causes": causes,
        "former": formers if causes and is_way_back and come_back else {},
        "name": name,
        "message": _story([f"The switch to {mode} failed. {follows}"], causes) if causes else "",
    }


def switch_end(outcome: Mapping[str, Any], mode: str, sparks: Results, unanswered: Mapping[str, str]) -> str:
    """The last word on a switch; empty when all is well.

    ``outcome`` is what `switch_outcome` returned. ``sparks`` maps each Spark to ``returned``, as ``brought`` there, of the way
    back; ``unanswered`` is as there, after the way back.
    """
    if not outcome["former"]:
        return str(outcome["message"])
    name = outcome["name"]
    wrong = _wrong(sparks, "returned", unanswered)
    if wrong:
        lines = [
            f"The switch to {mode} failed, and so did the way back to {name}. {_try(name)}",
            "What stands where:",
        ]
        lines += [f"- {line}" for line in wrong]
        lines += [
            f"- {host}: {name} is back" for host, spark in sparks.items() if not _is_bad(spark["returned"])
        ]
    else:
        lines = [f"The switch to {mode} failed. {name} serves again on {', '.join(sparks)}."]
    return _story(lines, outcome["causes"])


# What of a gateway's metrics tells how its clients fared, and what each is called in a report.
COUNTERS = {
    "gateway_held_requests_total": "held",
    "gateway_hold_expired_total": "given up",
    'haproxy_frontend_http_responses_total{proxy="gateway",code="2xx"}': "answered",
    'haproxy_frontend_http_responses_total{proxy="gateway",code="5xx"}': "failed",
}
AWAY = "gateway_model_away_seconds_total{"


def gateway_counters(text: str) -> dict[str, float]:
    """Of a gateway's metrics, as its two pages tell them, what a report needs: by their names there, each of COUNTERS and
    each model's seconds without a live worker."""
    figures = (line.rpartition(" ") for line in text.splitlines())
    return {
        figure: float(value)
        for figure, _space, value in figures
        if figure in COUNTERS or figure.startswith(AWAY)
    }


def _fared(before: str, after: str) -> dict[str, float]:
    """How a gateway's clients fared between two readings of its metrics; ``away`` is in seconds, of the model that was away longest."""
    former, now = gateway_counters(before), gateway_counters(after)
    # A gateway that was reloaded meanwhile counts from there.
    grown = {
        name: value - former.get(name, 0) if value >= former.get(name, 0) else value
        for name, value in now.items()
    }
    away = max((value for name, value in grown.items() if name.startswith(AWAY)), default=0.0)
    return {**{word: grown.get(name, 0.0) for name, word in COUNTERS.items()}, "away": round(away, 1)}


def switch_report(
    mode: str,
    began: str,
    sparks: Results,
    before: Mapping[str, str],
    after: Mapping[str, str],
    causes: Sequence[str] = (),
) -> dict[str, Any]:
    """How a switch went, in figures.

    ``mode`` is what was asked for, ``began`` when it began. ``sparks`` maps each Spark to ``former``, ``wish``,
    ``brought``, ``durations`` and ``engine`` (of serving_mode, in seconds). ``before`` and ``after`` map each gateway to its metrics
    then; one whose metrics are missing is left out. ``causes`` says why it failed, empty when it did not.

    Returns ``record`` (for a file), and ``table`` (lines for people).
    """
    gateways = {host: _fared(before.get(host, ""), text) for host, text in after.items() if text}
    record: dict[str, Any] = {
        "began": began,
        "mode": mode,
        "succeeded": not causes,
        "sparks": {
            host: {
                "from": spark["former"],
                "to": spark["wish"],
                "seconds": dict(spark.get("durations") or {}),
                "engine": spark.get("engine"),
            }
            for host, spark in sparks.items()
        },
        "gateways": gateways,
    }
    rows: list[Sequence[str]] = [("gateway", "model away", "held", "given up", "answered", "failed")]
    rows += [
        (
            host,
            f"{one['away']:.1f} s",
            *(f"{one[name]:.0f}" for name in ("held", "given up", "answered", "failed")),
        )
        for host, one in gateways.items()
    ]
    steps = [("spark", "from", "to", "took")]
    steps += [
        (
            host,
            one["from"],
            one["to"],
            ", ".join(f"{what} {seconds:.1f} s" for what, seconds in one["seconds"].items()) or "-",
        )
        for host, one in record["sparks"].items()
    ]
    return {"record": record, "table": [*table(steps), "", *table(rows)]}


def rolling_problems(sparks: Results) -> list[str]:
    """Why these Sparks (each with what serving_info returned) cannot be restarted one after the other; empty when they can."""
    problems = []
    for host, info in sparks.items():
        wanted = info["wanted"]
        if wanted == "tp":
            problems.append(
                f"{host} is half of a pair (mode tp), and a rank cannot rejoin a running pair: restarting one takes the other down, so "
                "there is no restart one at a time. To restart both at once, with the model away until they are loaded: "
                "ansible sparks --become -m twospark.serving.serving_mode -a 'mode=tp restart=true'"
            )
        elif wanted != "replica":
            problems.append(
                f"{host} is in mode {wanted}, not replica, so there is no copy to restart. Switch first: "
                "ansible-playbook playbooks/switch_mode.yml -e mode=replica"
            )
        elif len(sparks) > 1 and "replica" not in info["active"]:
            problems.append(
                f"{host} does not serve its copy (its unit is {info['units']['replica']['active']}), so restarting another could leave "
                f"nobody to serve. Mend it first: ansible-playbook playbooks/rolling_restart.yml --limit {host}"
            )
    return problems


def _story(lines: list[str], causes: list[str]) -> str:
    return "\n".join([*lines, "The cause:", *(f"- {cause}" for cause in causes)])


def _wrong(sparks: Results, part: str, unanswered: Mapping[str, str]) -> list[str]:
    wrong = [f"{host}: {_said(spark[part])}" for host, spark in sparks.items() if _is_bad(spark[part])]
    return wrong + [f"{host}: {why}" for host, why in unanswered.items() if why]


def _is_bad(result: Mapping[str, Any]) -> bool:
    return bool(result.get("failed") or result.get("unreachable"))


def _said(result: Mapping[str, Any]) -> str:
    return (
        f"not reached ({result.get('msg', 'no answer')})"
        if result.get("unreachable")
        else str(result.get("msg", "failed"))
    )


def _try(mode: str) -> str:
    return (
        f"Try: ansible-playbook playbooks/status.yml, mend what it names, then: "
        f"ansible-playbook playbooks/switch_mode.yml -e mode={mode}"
    )
