"""The program `calibrant`, also as `python -m calibrant`."""

from __future__ import annotations

import sys

from calibrant.extras import MissingPackageError


def main() -> None:
    """Run the command line, or print one line if its packages are not installed."""
    try:
        from calibrant import cli
    except MissingPackageError as error:
        print(f"calibrant: {error}", file=sys.stderr)
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
