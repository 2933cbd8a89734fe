# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever happens, and in whatever order: never two containers, never READY without a verified completion, and
always an end that systemd can act on. See virtual_host.py for what is checked at every moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from vllm_agent.status import Phase
from vllm_agent.supervisor import GIVEN_UP

from .virtual_host import (
    BAD_COMPLETIONS,
    LONGEST_START,
    RESTART_SECONDS,
    START_LIMIT,
    STOP_SECONDS,
    Host,
    play,
)

SEQUENCES = 200
# An end that was begun, and a start which perhaps must still fail, and one that does not.
SETTLE_SECONDS = STOP_SECONDS + 2 * (LONGEST_START + RESTART_SECONDS)
RANKS = {"replica": None, "head": 0, "worker": 1}

HARMLESS = ["busy", "busy slowly", "counters reset", "clock steps", "disk full", "messages lost"]
ENGINE = [
    *("engine exits 0", "engine exits 1", "engine exits 137", "engine exits 143", "port closed"),
    *("wedge", "wedge", "wedge"),  # only counts where an engine would serve for long
    *("completions hang", "completions 400", "completions 503", "completions empty"),
    *("health refuses", "metrics fail", "metrics hang", "slow load", "deaf to SIGTERM", "unkillable"),
]
HOST = [
    *("docker hangs", "docker fails", "docker gone", "run fails"),
    *("memory short", "model gone", "agent port taken"),
]
ORDERS = ["stop", "start", "signal", "signal all", "agent killed"]
PEER = [
    *("peer away", "peer refused", "peer stuck", "peer silent", "peer lost", "peer failed", "peer draining"),
    *("peer stopping", "peer garbage"),
]


@dataclass(frozen=True)
class Step:
    """After `delay` seconds a fault, which lasts for `seconds` unless it happens at once."""

    delay: float
    fault: str
    seconds: float = 0


# Many short delays, so that faults meet each other and the phases of a start; and some long ones.
DELAYS = st.one_of(
    st.sampled_from([0, 0.1, 0.3, 1, 3]), st.integers(0, 60), st.integers(0, 60), st.integers(100, 2000)
)
DURATIONS = st.sampled_from([1, 10, 50, 300, 1000])


def _steps(*faults: str) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.builds(Step, DELAYS, st.sampled_from(faults), DURATIONS), max_size=12)


REPLICA_FAULTS = (*HARMLESS, *ENGINE, *HOST, *ORDERS)


async def within(seconds: float, host: Host, holds: Callable[[], bool]) -> None:
    """Wait until something holds, as it must before long."""
    for _ in range(round(seconds)):
        if holds():
            return
        await asyncio.sleep(1)
    host.check(False, f"still {host.unit.state} after {seconds:g} s")


def settled(host: Host) -> bool:
    """Does it serve, or has systemd been told to leave it down?"""
    serves = host.life is not None and host.life.phases[-1:] == [Phase.SERVING]
    return host.unit.rests or (host.unit.state == "active" and serves)


def live(role: str, steps: list[Step], stops: bool = True) -> Host:
    """The story of a host on which `steps` happen; at its end it is stopped, at once or when it has settled."""

    async def story(host: Host) -> None:
        for step in steps:
            await asyncio.sleep(step.delay)
            host.happen(step.fault, step.seconds)
        if not stops:
            host.heal()
            await within(SETTLE_SECONDS, host, lambda: settled(host))
        host.happen("stop", 0)
        await within(2 * STOP_SECONDS, host, lambda: host.unit.rests)  # of the agent, and of ExecStopPost
        host.check(host.docker.running is None or host.docker_was_off, "a container outlives its unit")

    return play(RANKS[role], story)


@pytest.mark.parametrize("roles", [["replica"], ["head", "worker"]], ids=" and ".join)
@settings(
    max_examples=SEQUENCES,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data(), stops=st.booleans())
def test_it_always_ends_in_a_state_that_systemd_can_act_on(
    roles: list[str], data: st.DataObject, stops: bool
) -> None:
    role = data.draw(st.sampled_from(roles), label="role")
    faults = REPLICA_FAULTS if role == "replica" else (*REPLICA_FAULTS, *PEER)
    host = live(role, data.draw(_steps(*faults), label="steps"), stops)
    lives = host.unit.lives
    reached = {phase for each in lives for phase in each.phases}
    for phase in reached:
        event(f"reached {phase}")
    event(f"{len(lives)} lives")
    for what, seen in {
        "wedged": any(each.wedged for each in lives),
        "gave up": any(each.exit_status == GIVEN_UP for each in lives),
        "failed while draining": any(
            each.exit_status == 1 and each.reached is Phase.DRAINING for each in lives
        ),
    }.items():
        if seen:
            event(what)


START = [Phase.WAITING_FOR_MEMORY, Phase.STARTING, Phase.LOADING, Phase.VERIFYING, Phase.SERVING]
STOP = [Phase.DRAINING, Phase.STOPPING]


class TestTheseSequencesReachWhatTheyShould:
    """A property of engines that never served would prove nothing."""

    def test_a_quiet_life(self) -> None:
        (life,) = live("replica", [Step(300, "busy", 100), Step(600, "stop")]).unit.lives
        assert life.phases == START + STOP
        assert life.exit_status == 0

    def test_a_drain_waits_for_requests(self) -> None:
        (life,) = live("replica", [Step(100, "busy", 30), Step(1, "stop")]).unit.lives
        assert life.asked_at is not None
        assert life.ended_at - life.asked_at == pytest.approx(30, abs=5)
        assert life.exit_status == 0

    def test_a_slow_engine_gets_canaries_and_is_left_alone(self) -> None:
        (life,) = live("replica", [Step(100, "busy slowly", 2000), Step(2000, "stop")]).unit.lives
        assert life.status is not None
        assert life.status.canaries > 10
        assert life.exit_status == 0

    @pytest.mark.parametrize(
        "fault", ["completions hang", "completions 400", "metrics hang", "metrics fail", "health refuses"]
    )
    def test_an_engine_that_gets_work_done_is_left_alone(self, fault: str) -> None:
        busy = [] if fault.startswith("metrics") else [Step(100, "busy", 2000)]
        (life,) = live("replica", [*busy, Step(100, fault, 1000), Step(1100, "stop")]).unit.lives
        assert life.reached is Phase.DRAINING
        assert life.exit_status == 0

    def test_what_is_of_no_account_to_an_engine_that_serves(self) -> None:
        faults = [
            *("counters reset", "clock steps", "disk full", "docker hangs", "docker fails", "docker gone"),
            *("memory short", "model gone", "agent port taken", "run fails"),
        ]
        steps = [Step(100, fault, 50) for fault in faults]
        (life,) = live("replica", [*steps, Step(500, "stop")]).unit.lives
        assert life.phases == START + STOP
        assert life.exit_status == 0

    @pytest.mark.parametrize("fault", sorted(BAD_COMPLETIONS))
    def test_an_engine_without_a_completion_never_serves(self, fault: str) -> None:
        host = live("replica", [Step(0, fault, 1000), Step(1000, "stop")])
        assert [each.reached for each in host.unit.lives] == [Phase.VERIFYING] * 3
        assert host.unit.state == "failed"

    def test_docker_may_be_off_for_a_moment_at_the_end(self) -> None:
        """And the client has gone already, which would tell of the container's end."""
        host = live("replica", [Step(100, "docker fails", 5), Step(1, "signal all")])
        assert host.docker.running is None

    def test_a_wedged_engine_is_ended_by_the_watchdog_of_systemd(self) -> None:
        wedged, after = live("replica", [Step(100, "wedge", 300), Step(900, "stop")]).unit.lives
        assert wedged.phases == [*START, Phase.FAILED]
        assert wedged.triggered
        assert wedged.exit_status is None
        assert after.phases == START + STOP

    def test_also_when_systemd_does_not_hear_of_it(self) -> None:
        steps = [Step(100, "wedge", 300), Step(225, "messages lost", 30), Step(900, "stop")]
        wedged, _ = live("replica", steps).unit.lives
        assert wedged.wedged
        assert not wedged.triggered
        assert wedged.exit_status is None

    def test_a_wedge_that_does_not_end_is_given_up(self) -> None:
        host = live("replica", [Step(100, "wedge", 10**4), Step(5000, "busy", 0)])
        assert [each.exit_status for each in host.unit.lives] == [None, 1, GIVEN_UP]
        assert host.unit.state == "failed"

    def test_a_container_that_its_agent_left_is_removed_first(self) -> None:
        steps = [Step(100, "docker hangs", 400), Step(1, "agent killed"), Step(1200, "stop")]
        killed, *_, after = live("replica", steps).unit.lives
        assert killed.exit_status is None
        assert after.phases == START + STOP

    def test_also_when_docker_only_answers_once_the_agent_has_begun(self) -> None:
        """So that neither ExecStopPost nor ExecStartPre has removed it."""
        steps = [Step(100, "docker fails", 60.12), Step(0, "agent killed"), Step(500, "stop")]
        _, after = live("replica", steps).unit.lives
        assert after.phases == START + STOP

    def test_an_engine_that_dies_in_its_drain_is_a_failure(self) -> None:
        steps = [Step(100, "busy", 200), Step(1, "stop"), Step(10, "engine exits 137")]
        (life,) = live("replica", steps).unit.lives
        assert life.reached is Phase.DRAINING
        assert life.exit_status == 1

    def test_a_worker_whose_engine_dies_does_not_wait_for_its_head(self) -> None:
        (life,) = live("worker", [Step(100, "stop"), Step(10, "engine exits 1")]).unit.lives
        assert life.asked_at is not None
        assert life.ended_at - life.asked_at == pytest.approx(10, abs=5)
        assert life.exit_status == 1

    def test_a_second_signal_hastens_the_stop(self) -> None:
        steps = [Step(100, "busy", 200), Step(1, "signal"), Step(10, "signal")]
        (life,) = live("replica", steps).unit.lives
        assert life.asked_at is not None
        assert life.ended_at - life.asked_at == pytest.approx(10, abs=5)
        assert life.exit_status == 0

    @pytest.mark.parametrize("role", ["head", "worker"])
    def test_a_pair_that_is_lost_begins_anew(self, role: str) -> None:
        lost, after = live(role, [Step(100, "peer lost"), Step(600, "stop")]).unit.lives
        assert lost.reached is Phase.SERVING
        assert lost.exit_status == 1
        assert after.reached is Phase.DRAINING
        assert after.exit_status == 0

    @pytest.mark.parametrize("role", ["head", "worker"])
    def test_a_pair_that_never_forms_is_no_attempt(self, role: str) -> None:
        *vain, last = live(role, [Step(0, "peer away", 900), Step(1500, "stop")]).unit.lives
        assert len(vain) > START_LIMIT.burst
        assert not any(each.container for each in vain)
        assert last.reached is Phase.DRAINING
