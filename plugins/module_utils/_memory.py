# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The arithmetic of one memory pool that the engine shares with everything else. Private to the collection.

All sizes are GiB (2**30 bytes) unless a name says otherwise; a share is a part of the whole pool, 0 to 1.
"""

from __future__ import annotations

import math

GIB = 2**30


def largest_share(device_gib: float, reserved_gib: float) -> float:
    """The largest share, in steps of 0.01, that leaves ``reserved_gib`` of ``device_gib`` to the rest of the host."""
    # A whole number of hundredths first: 0.29 * 100 is 28.999... in binary.
    return math.floor(round((device_gib - reserved_gib) / device_gib * 100, 6)) / 100


def budget(device_gib: float, share: float) -> float:
    """What the engine takes at this share: weights, working memory and KV cache together."""
    return device_gib * share


def kv_tokens(budget_gib: float, fixed_gib: float, bytes_per_token: float) -> int:
    """Tokens that the KV cache holds: what is left after everything that does not grow with it (0 when nothing is)."""
    return max(0, int((budget_gib - fixed_gib) * GIB / bytes_per_token))
