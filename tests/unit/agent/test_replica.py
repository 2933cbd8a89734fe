# SPDX-License-Identifier: GPL-3.0-or-later
"""The real agent process in mode replica, with a fake docker and a fake engine."""

from __future__ import annotations

from .harness import Spark


def test_start_to_ready_and_stop(spark: Spark) -> None:
    spark.ready()
    assert spark.get("/health") == (200, "serving\n")
    spark.terminate()
    assert spark.exit_status() == 0
    print(spark.messages, spark.journal(), spark.docker_calls)
    assert spark.engine_pid is None
