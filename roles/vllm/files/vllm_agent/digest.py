# SPDX-License-Identifier: GPL-3.0-or-later
"""One short text for all that an agent runs with, so that it can be told whether a running one is up to date."""

from __future__ import annotations

import hashlib
from pathlib import Path


def settings_digest(config: Path, environment: Path) -> str:
    """Digest of the configuration, the engine's environment and the agent's own program, as they are on the disk.

    The environment holds secrets and counts by the moment of its last change: a digest of its content could be
    used to try guesses.
    """
    digest = hashlib.sha256(config.read_bytes())
    digest.update(str(environment.stat().st_mtime_ns).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]
