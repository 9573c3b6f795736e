"""Tile tasks: one Python half and one device half each. Files are found by scanning this folder."""
