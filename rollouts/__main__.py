"""`python -m rollouts`: the same command as `rollouts`."""

from __future__ import annotations

import sys

from rollouts.cli import main

if __name__ == "__main__":
    sys.exit(main())
