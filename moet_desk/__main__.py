"""Start of the program: hands over to the command line. Nothing heavy is imported here."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of `moet-desk` and of `python -m moet_desk`."""
    try:
        from moet_desk.cli import main as run_command  # Ctrl+C may come while it is imported

        status = run_command()
    except KeyboardInterrupt:
        status = 130  # ExitCode.INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
