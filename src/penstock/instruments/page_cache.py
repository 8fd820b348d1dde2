"""The page cache: how much of some files it holds, and how to empty or fill it for them.

A file that was read lately comes from memory and not from its device, so a timed reader must say
which. `drop_pages` asks the kernel to forget, `warm_pages` reads, and `residency` gives the share
in memory. On systems other than Linux nothing is dropped, and the residency is None. It is also
None for files of another user, for which the kernel would claim that all is in memory.

    drop     fsync, then posix_fadvise(DONTNEED): only clean pages can be dropped
    read     a plain read to the end
    look     mmap, which reads nothing, then mincore, which says for each page if it is in memory

The caches of a hypervisor, a RAID controller or the device itself cannot be seen from here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

_LOCAL = frozenset("apfs bcachefs btrfs ext2 ext3 ext4 f2fs overlay ramfs tmpfs xfs zfs".split())
"""File systems whose files are on this machine."""
PAGE_BLOCK = 8 * 2**20
"""The bytes of one read: more gains nothing on the disks that we know, and fits in few caches."""


def is_safe_to_map(place: str) -> bool:
    """Whether a folder, given by path or URL, is on a file system of this machine.

    A page of a mapped file that cannot be read ends the process by a signal, while a plain read
    would raise an error. On a network such faults are common; on a disk they are rare.
    """
    if "://" in place:
        return False
    path = Path(place).resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[above] for above in (path, *path.parents) if above in mounts), None)
    return kind in _LOCAL


def drop_pages(paths: Iterable[Path]) -> None:
    """Ask the kernel to forget the pages of files. Pages that somebody has mapped stay."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):  # macOS has none
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_pages(paths: Iterable[Path]) -> None:
    """Read the files to their ends."""
    buffer = memoryview(bytearray(PAGE_BLOCK))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def residency(paths: Iterable[Path]) -> float | None:
    """The share of the files' pages that is in memory, 0 to 1; None if it is unknown."""
    if sys.platform != "linux":
        return None
    resident = total = 0
    for path in paths:
        pages = _pages(path)
        if pages is None:
            return None
        resident += sum(pages)
        total += len(pages)
    return resident / total if total else None


def _pages(path: Path) -> bytes | None:
    """A 1 or a 0 for every page of a file; None where the kernel would not answer truly."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        # Since 2019 the kernel answers the owner, or a user who may write; others might spy by it.
        if status.st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        if status.st_size == 0:
            return b""
        # Private and writable, for ctypes takes the address of nothing that is read-only.
        mapped = mmap.mmap(
            descriptor, status.st_size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)
    with mapped:
        pages = (ctypes.c_ubyte * -(-status.st_size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        address, size = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(status.st_size)
        failed = ctypes.CDLL(None, use_errno=True).mincore(address, size, pages)
        del start  # a mapping that something points into cannot be closed
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
        return bytes(page & 1 for page in pages)  # the other bits are reserved
