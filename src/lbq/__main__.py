"""`lbq` and `python -m lbq`: the command line, and quiet where it is interrupted before it is loaded."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from lbq.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("lbq: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
