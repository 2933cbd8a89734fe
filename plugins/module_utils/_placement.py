# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the models that nobody may have to wait for would survive the loss of a worker. Private to the collection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# A worker as the gateway tells it (GET /catalogue on its port for monitors): `name`, `warm` (the models that it has loaded, as it
# told last, or as the inventory announces them), `cold` (those that it would load), `address` (of its machine), `weight` (0: it gets
# nothing) and `state`: "read" (live, and tells its models), "failed" (live, but does not tell them), "unreachable", "unread" (being
# asked), "down".
Worker = Mapping[str, Any]


def placement_warnings(
    models: Iterable[str], workers: Sequence[Worker], sparks: Sequence[str] = ()
) -> list[str]:
    """Warn of each of the ``models`` that the ``workers`` of fewer than two machines have loaded: what a loss would mean, and what to do.

    ``sparks`` are the workers that are copies on Sparks; a pair of them in mode tp is a worker of its own, named after its head.
    """
    return [warning for model in models if (warning := _warning(model, workers, sparks))]


def places(models: Iterable[str], workers: Sequence[Worker]) -> dict[str, list[str]]:
    """Each of the ``models`` with those of the ``workers`` that have it loaded."""
    return {model: _names(worker for worker in workers if _is_warm(model, worker)) for model in models}


def _warning(model: str, workers: Sequence[Worker], sparks: Sequence[str]) -> str:
    having = [worker for worker in workers if _is_warm(model, worker)]
    if len({worker["address"] for worker in having}) > 1:
        return ""
    warm = _names(having)
    cold = _names(
        worker
        for worker in workers
        if worker["state"] == "read" and worker["weight"] and model in worker["cold"]
    )
    mute = _names(worker for worker in workers if worker["state"] == "failed")
    pairs = [f"{spark}-tp" for spark in sparks]
    is_tp = any(name in pairs for name in warm)
    # Of copies and pair only one can serve at a time.
    excluded = sparks if is_tp else pairs
    away = _names(
        worker
        for worker in workers
        if worker["state"] in ("down", "unread", "unreachable")
        and model in worker["warm"]
        and worker["name"] not in excluded
    )
    where = (
        "on one machine alone, by " + " and ".join(warm)
        if warm[1:]
        else f"on {warm[0]} alone"
        if warm
        else "nowhere"
    )
    after = "; should that be lost, " if warm else "; "
    if cold:
        loss = f"requests wait until {' or '.join(cold)} has loaded it (a cold load)"
    elif mute:
        loss = f"requests are tried on {' or '.join(mute)}, of which nobody knows what it has"
    else:
        loss = "nobody serves it"
    advice = [
        *(["switch to mode replica, since in mode tp the pair is one worker"] if is_tp else []),
        *([f"bring back {' and '.join(away)}, which had it or shall have it"] if away else []),
        *([f"ask {' or '.join(cold)} for it once and let it stay loaded there"] if cold else []),
        *([f"mend {' and '.join(mute)}, so that it tells its models"] if mute else []),
    ]
    advice = advice or ["serve it on a second worker"]
    return f"The model {model} (gateway_critical_models) is loaded {where}{after}{loss}. To have it on two: {', or '.join(advice)}."


def _is_warm(model: str, worker: Worker) -> bool:
    return worker["state"] == "read" and worker["weight"] and model in worker["warm"]


def _names(workers: Iterable[Worker]) -> list[str]:
    return [str(worker["name"]) for worker in workers]
