"""`lbq` and `python -m lbq`: the command line, and one line where it is interrupted while it is loaded."""

from __future__ import annotations

import sys

from lbq.system import signals


def main() -> None:
    signals.remember_interrupts()
    try:
        from lbq.cli import main as run

        run()
    except (KeyboardInterrupt, Exception) as error:
        if not isinstance(error, KeyboardInterrupt) and not signals.interrupted():
            raise
        sys.stderr.write("lbq: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
