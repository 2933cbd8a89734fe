# SPDX-License-Identifier: GPL-3.0-or-later
"""Command line of the agent.

Exit status: 0 stopped because it was asked to; 1 failed, worth a restart; 2 the configuration cannot be used, so
that a restart cannot help; 3 failed so often in a row that it stays down. systemd does not restart after 2 and 3.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from . import __version__
from .config import Config, ConfigError, load, read_environment, secrets_of
from .digest import settings_digest
from .memory import Memory
from .supervisor import UNUSABLE_CONFIGURATION, Supervisor


class _JournalFormatter(logging.Formatter):
    """Puts the syslog level that systemd understands in front of every line."""

    _LEVELS: ClassVar = {
        logging.DEBUG: 7,
        logging.INFO: 6,
        logging.WARNING: 4,
        logging.ERROR: 3,
        logging.CRITICAL: 2,
    }

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{self._LEVELS.get(record.levelno, 6)}>" if "JOURNAL_STREAM" in os.environ else ""
        return "\n".join(f"{prefix}vllm-agent: {line}" for line in super().format(record).splitlines())


def main(arguments: Sequence[str] | None = None, proc: Path = Path("/proc")) -> int:
    """Run the agent; `proc` is another folder than /proc only in tests."""
    parser = argparse.ArgumentParser(prog="vllm_agent", description="Supervise one vLLM engine container.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="JSON, see config.py")
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    parser.add_argument(
        "--digest", action="store_true", help="print the digest of the present settings, see digest.py"
    )
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(_JournalFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        config = load(options.config)
        if options.check:
            return 0
        environment = read_environment(config.environment_file)
        digest = settings_digest(options.config, Path(config.environment_file))
        if options.digest:
            print(digest)
            return 0
    except ConfigError as error:
        logging.error("%s", error)
        return UNUSABLE_CONFIGURATION
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    return asyncio.run(_supervise(config, environment, Memory(proc), digest))


async def _supervise(config: Config, environment: dict[str, str], memory: Memory, digest: str) -> int:
    state = Path(os.environ.get("STATE_DIRECTORY", "/var/lib/vllm").partition(":")[0])
    return await Supervisor(
        config, environment.get("VLLM_API_KEY", ""), secrets_of(environment), memory, state, digest
    ).run()


if __name__ == "__main__":
    sys.exit(main())
