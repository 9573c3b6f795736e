"""Torch modules as graphs."""

from megakernel.capture.walk import Captured, capture

__all__ = ["Captured", "capture"]
