# SPDX-License-Identifier: GPL-3.0-or-later
"""Supervisor of one vLLM engine container on one DGX Spark, run as the main process of a systemd unit."""

__version__ = "0.1.0"
