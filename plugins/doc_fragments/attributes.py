# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What all modules of the collection say of themselves; a module adds what differs."""

from __future__ import annotations


class ModuleDocFragment:
    """The attributes that are the same in each module."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Returns the differences between the state before and the wish.
    support: full
  idempotent:
    description: When run twice in a row outside check mode, with the same arguments, the second run has nothing to change.
    support: full
  platform:
    description: Target OS families that can be operated against.
    support: full
    platforms: posix
"""
