"""A read-only file mapping whose pages are handed back after use, so that resident memory stays small."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megakernel.checkpoint.message import problem

AROUND = 2 << 20  # bytes that are given back together


@dataclass(frozen=True)
class MappedFile:
    """A whole file, mapped. Views into it must not outlive `close`."""

    path: Path
    size: int
    mtime_ns: int
    data: mmap.mmap

    @staticmethod
    def open(path: Path) -> MappedFile:
        """Map `path`. Raises CheckpointError when it cannot be read or is empty."""
        try:
            with path.open("rb") as handle:
                status = path.stat()
                if status.st_size == 0:
                    raise problem("the file is empty", path, todo="download it again")
                data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise problem("the file cannot be read", path, got=error.strerror or error) from error
        return MappedFile(path, status.st_size, status.st_mtime_ns, data)

    def view(self, offset: int, count: int) -> npt.NDArray[np.uint8]:
        """Bytes `[count]` at `offset`, not copied."""
        return np.frombuffer(self.data, np.uint8, count, offset)

    def drop(self, offset: int, count: int) -> None:
        """Hand the pages that held these bytes back, and what came with them; the next read fetches them again.

        A fault may map as much as a large page around it, also of what was given back before."""
        start = offset - offset % AROUND
        end = min(len(self.data), -(-(offset + count) // AROUND) * AROUND)
        if count > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmap. Views that an error on its way out still holds keep the mapping until they are gone."""
        with contextlib.suppress(BufferError):
            self.data.close()
