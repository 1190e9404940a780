"""The command ``moesaic``: the command-line tool, from the same file as the library."""

from __future__ import annotations

import signal
import sys

from . import _core

__all__ = ["main"]


def main() -> int:
    """Runs the tool with this process's arguments and returns its exit code."""
    # As for any command: Ctrl-C and a closed pipe end it; Python would only take a note of them.
    for name in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(name, signal.SIG_DFL)
    return _core.run_tool(["moesaic", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
