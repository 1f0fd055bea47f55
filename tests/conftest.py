"""For all tests: one thread of torch a process. They run side by side, and so do the ranks that some of them start;
with a thread a core each they would starve one another, and run into deadlines.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
