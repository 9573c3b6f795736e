"""The ring of stages of an AMD worker: how weights travel to LDS on each target. Read by the builder, which cuts the
weights into units, and by the compiler's flags; nothing of it is typed again in C++.
"""

from __future__ import annotations

from dataclasses import dataclass

from megakernel.errors import TargetError
from megakernel.target import Target


@dataclass(frozen=True)
class RingShape:
    """`stages` of `stage_bytes` in LDS, of which all but one may be on their way.

    `copiers`: waves that do nothing but copy. `copy_bytes`: what one lane of an asynchronous copy brings; 0 where the
    target has none and a copy goes through registers.
    """

    stages: int
    stage_bytes: int
    copiers: int
    copy_bytes: int


# A wave counts at most 63 loads on their way. With 4 bytes a lane that is 16 KB, so more waves copy. 3 stages of 8 KB
# on their way cover 1.4 us of a 304th of 5.3 TB/s, 5 of 16 KB 2.6 us of a 256th of 8 TB/s, 6 of 32 KB 2.5 us of a
# 256th of 19.6 TB/s.
_RINGS = {
    "gfx90a": RingShape(4, 8 << 10, 4, 4),
    "gfx942": RingShape(4, 8 << 10, 4, 4),
    "gfx950": RingShape(6, 16 << 10, 2, 16),
    "gfx1100": RingShape(4, 8 << 10, 8, 0),
    "gfx1250": RingShape(7, 32 << 10, 1, 16),
}


def ring_shape(target: Target) -> RingShape:
    """Raises TargetError for a target that hip.h does not know."""
    if target.name not in _RINGS:
        raise TargetError(f"unknown AMD target {target.name!r}; known: {', '.join(_RINGS)}")
    return _RINGS[target.name]
