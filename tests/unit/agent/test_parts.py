# SPDX-License-Identifier: GPL-3.0-or-later
"""The small parts: exit statuses, memory, history, messages to systemd."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_agent import history as history_module
from vllm_agent.container import describe_exit
from vllm_agent.history import History
from vllm_agent.memory import Memory
from vllm_agent.notify import Notifier


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (0, "status 0"),
        (1, "status 1"),
        (125, "status 125 (docker itself failed)"),
        (127, "status 127 (the command cannot be run in the image)"),
        (134, "status 134 (SIGABRT)"),
        (137, "status 137 (SIGKILL: out of memory, or killed by hand)"),
        (-9, "status -9 (the docker client was killed by SIGKILL)"),
        (255, "status 255 (signal 127)"),
    ],
)
def test_an_exit_status_is_explained(status: int, meaning: str) -> None:
    assert describe_exit(status) == meaning


class TestMemory:
    @pytest.fixture
    def proc(self, tmp_path: Path) -> Path:
        (tmp_path / "meminfo").write_text(
            "MemTotal:  127600000 kB\nMemFree: 1 kB\nMemAvailable:   52428800 kB\n"
        )
        for pid, name, pages, cgroup in [
            (7, "python3", 262144, f"0::/docker/{'ab' * 32}"),
            (8, "VLLM::EngineCor", 1310720, f"0::/system.slice/docker-{'cd' * 32}.scope"),
            (9, "sshd", 10, "0::/system.slice/ssh.service"),
        ]:
            folder = tmp_path / str(pid)
            folder.mkdir()
            (folder / "statm").write_text(f"9999999 {pages} 0 0 0 0 0\n")
            (folder / "comm").write_text(f"{name}\n")
            (folder / "cgroup").write_text(f"{cgroup}\n")
        (tmp_path / "10").mkdir()  # a process that is ending
        return tmp_path

    def test_available(self, proc: Path) -> None:
        assert Memory(proc).available_gib() == 50

    def test_the_largest_holders_come_first_with_their_container(self, proc: Path) -> None:
        first, second = Memory(proc).largest_holders(2)
        assert (first.pid, first.name, first.container_id) == (8, "VLLM::EngineCor", "cd" * 32)
        assert first.gib == pytest.approx(5.0)
        assert (second.name, second.container_id) == ("python3", "ab" * 32)

    def test_the_page_cache_is_dropped(self, proc: Path) -> None:
        switch = proc / "sys/vm/drop_caches"
        switch.parent.mkdir(parents=True)
        asyncio.run(Memory(proc).drop_page_cache())
        assert switch.read_text() == "3\n"

    def test_a_host_that_does_not_allow_it_is_an_os_error(self, proc: Path) -> None:
        with pytest.raises(OSError, match="drop_caches"):
            asyncio.run(Memory(proc).drop_page_cache())


class TestHistory:
    def test_it_outlives_the_agent(self, tmp_path: Path) -> None:
        file = tmp_path / "replica-history.json"
        history = History(file)
        assert (history.starts, history.failures, history.expected_seconds("a")) == (0, 0, None)
        history.count_start()
        history.remember_start("a", 412.04)
        history.count_start()
        history.count_failure("engine exited")
        again = History(file)
        assert (again.starts, again.failures, again.last_start_seconds) == (2, 1, 412.0)
        assert again.last_failure == "engine exited"
        assert again.expected_seconds("a") == 412.0
        assert again.expected_seconds("b") is None

    def test_it_is_bounded_and_forgets_the_oldest_image(self, tmp_path: Path) -> None:
        history = History(tmp_path / "h.json")
        for number in range(20):
            history.remember_start(f"image-{number}", number)
        durations = json.loads((tmp_path / "h.json").read_text())["start_seconds"]
        assert list(durations) == [f"image-{number}" for number in range(4, 20)]

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '{"starts": 3}', '{"starts": "x", "failures": 0}', "\udcff"]
    )
    def test_a_broken_file_is_begun_anew(
        self, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "h.json"
        file.write_text(text, errors="surrogateescape")
        history = History(file)
        assert history.starts == 0
        assert "counting from zero again" in caplog.text
        history.count_start()
        assert History(file).starts == 1

    def test_a_disk_that_takes_no_more_does_not_end_the_agent(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        history = History(tmp_path / "missing/h.json")
        history.count_start()
        assert history.starts == 1
        assert "cannot be written" in caplog.text


class TestAttempts:
    """Failures in a row, over several lives of the agent."""

    MOST = 2

    @pytest.fixture
    def begin(self, tmp_path: Path) -> Callable[..., History]:
        def begin(boot: str = "first") -> History:
            return History(tmp_path / "h.json", boot)

        return begin

    def test_so_many_and_no_more(self, begin: Callable[..., History]) -> None:
        for last in (False, True):
            history = begin()
            assert history.begin_attempt(self.MOST, 100)
            assert history.is_last_attempt(self.MOST) == last
        assert not begin().begin_attempt(self.MOST, 100)

    def test_after_giving_up_it_begins_anew(self, begin: Callable[..., History]) -> None:
        for _ in range(self.MOST):
            begin().begin_attempt(self.MOST, 100)
        begin().forgive()
        history = begin()
        assert not history.is_last_attempt(self.MOST)
        assert history.begin_attempt(self.MOST, 100)
        assert not history.is_last_attempt(self.MOST)

    def test_a_life_that_was_forgiven_does_not_count(self, begin: Callable[..., History]) -> None:
        for _ in range(self.MOST * 2):
            history = begin()
            assert history.begin_attempt(self.MOST, 100)
            history.forgive()

    def test_one_that_ended_for_its_peer_does_not_count(self, begin: Callable[..., History]) -> None:
        begin().begin_attempt(self.MOST, 100)
        for _ in range(self.MOST * 2):
            history = begin()
            assert history.begin_attempt(self.MOST, 100)
            history.take_back_attempt()
        begin().take_back_attempt()  # a life that was not counted has nothing to take back
        assert begin().attempts == 1

    def test_those_of_another_boot_do_not_count(self, begin: Callable[..., History]) -> None:
        for boot in range(self.MOST * 2):
            assert begin(str(boot)).begin_attempt(self.MOST, 100)

    def test_those_of_long_ago_do_not_count(
        self, begin: Callable[..., History], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = iter(range(0, 10_000, 101))
        monkeypatch.setattr(history_module, "_since_boot", lambda: next(clock))
        for _ in range(self.MOST * 2):
            assert begin().begin_attempt(self.MOST, 100)

    def test_a_file_from_before_they_were_counted(self, tmp_path: Path) -> None:
        (tmp_path / "h.json").write_text(
            '{"starts": 3, "failures": 1, "last_start_seconds": 4, "start_seconds": {}}'
        )
        history = History(tmp_path / "h.json", "first")
        assert history.starts == 3
        assert history.begin_attempt(self.MOST, 100)


class TestNotifier:
    def test_without_systemd_it_does_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        notifier = Notifier()
        notifier.send("READY=1")
        assert notifier.watchdog_seconds is None

    @pytest.mark.parametrize("abstract", [False, True])
    def test_one_message_holds_all_assignments_one_a_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
    ) -> None:
        name = str(tmp_path / "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.settimeout(5)
            systemd.bind("\0" + name if abstract else name)
            monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
            monkeypatch.setenv("WATCHDOG_USEC", "30000000")
            notifier = Notifier()
            notifier.send("READY=1", "STATUS=two\nlines")
            assert systemd.recv(4096) == b"READY=1\nSTATUS=two lines"
            assert notifier.watchdog_seconds == 30

    def test_a_watchdog_meant_for_another_process_is_not_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        monkeypatch.setenv("WATCHDOG_PID", "1")
        notifier = Notifier()
        notifier.send("READY=1")  # nobody listens: no error
        assert notifier.watchdog_seconds is None
