# SPDX-License-Identifier: Apache-2.0
"""Start the command, or say what the environment lacks for it."""

from __future__ import annotations

import importlib.util
import sys

_NEEDS = ("jinja2", "pydantic", "pytest", "rich")


def _start() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever comes here with an older one gets a sentence)
        print("error: needs Python 3.11 or newer; this is " + sys.version.split()[0], file=sys.stderr)
        return 2
    absent = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        print(f"error: environment lacks {', '.join(absent)} ({sys.executable})", file=sys.stderr)
        print("→ install what is missing, or let `nox -s regress` make an environment", file=sys.stderr)
        return 2
    from ci.regress.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(_start())
