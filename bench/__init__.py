"""Measurements beside other programs. Nothing here is installed."""
