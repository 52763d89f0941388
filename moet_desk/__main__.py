"""Start of the program: hands over to the command line. Nothing heavy is imported here."""

from __future__ import annotations

import sys

from moet_desk.cli import main as run_command


def main() -> None:
    """Entry point of `moet-desk` and of `python -m moet_desk`."""
    sys.exit(run_command())


if __name__ == "__main__":
    main()
