"""How every command of the project ends: a user's mistake is a sentence on stderr and a status, never a traceback."""

import sys
from collections.abc import Callable

from sd_training.errors import UserError


def run_cli(main: Callable[[], None]) -> None:
    """Runs a command's `main`.

    Raises:
        SystemExit: the status of a `UserError` (each of its lines printed as "error: ..."), 130 after Ctrl-C;
            other exceptions are defects of the program and keep their traceback.
    """
    try:
        main()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
