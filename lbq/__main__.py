"""`python -m lbq` is `lbq`."""

from lbq.cli import main

if __name__ == "__main__":
    main()
