# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for `vllm serve` on machines without a GPU; README.md beside this package says what it imitates."""

VERSION = "0.33.0"
