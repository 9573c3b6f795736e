"""Several processes of tests share the cores: none of them takes all for torch."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before anything imports torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")
