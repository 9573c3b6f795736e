"""`python -m megakernel`."""

from __future__ import annotations

from megakernel.cli import main

main()
