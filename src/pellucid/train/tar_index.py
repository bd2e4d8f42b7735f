"""Where the files of a tar archive lie, so that any of them can be read alone; nothing is unpacked.

Read here are POSIX ustar headers, pax records of path and size, GNU long names and GNU numbers beyond octal, as in
POSIX.1-2008 (pax) and the tar(5) page of libarchive. Of a damaged or cut archive, what lies before the damage counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pellucid.core.errors import PellucidError

BLOCK = 512
MAX_NAME = 64 * 1024  # bytes of a long name or of pax records
FILES = (b"0", b"\0", b"7")
EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices and folders: no bytes, whatever their size says
SPARSE = b"S"  # GNU's own, with a map before the bytes


@dataclass(frozen=True)
class Member:
    """One file of an archive."""

    name: str
    offset: int  # of its bytes
    size: int


class TarDamagedError(PellucidError):
    """The archive cannot be read on from here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "data-damaged")


def members(path: Path) -> Iterator[Member]:
    """The files of an archive in their order; ends with TarDamagedError where it is cut off or broken."""
    with path.open("rb", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        place, long_name, pax = 0, "", {}
        while (head := block(file, place, end)) is not None:
            kind, size = head[156:157], number(head[124:136])
            if kind == b"x":
                pax = pax_records(note(file, place, size, end))
            elif kind == b"L":
                long_name = text(note(file, place, size, end))
            elif kind == SPARSE:
                raise TarDamagedError(f"{shown(head)} is stored sparse, which is not read here")
            elif kind in FILES:
                size = int(pax.get("size", size))
                if place + BLOCK + size > end:
                    raise TarDamagedError(f"{shown(head)} is cut off")
                yield Member(pax.get("path") or long_name or shown(head), place + BLOCK, size)
            if kind not in (b"x", b"L", b"g", b"K"):  # those speak of the file that follows
                long_name, pax = "", {}
            place += BLOCK + (0 if kind in EMPTY else -(-size // BLOCK) * BLOCK)


def block(file: BinaryIO, place: int, end: int) -> bytes | None:
    """The header at a place, or None at the end: a block of zeros, or the end of the file."""
    if place == end:
        return None
    if place > end:
        raise TarDamagedError("it is cut off")
    file.seek(place)
    head = file.read(BLOCK)
    if head == bytes(BLOCK):
        return None
    if len(head) < BLOCK:
        raise TarDamagedError("it is cut off")
    plain = head[:148] + b" " * 8 + head[156:]  # the sum does not count itself
    claimed = number(head[148:156])
    if claimed != sum(plain) and claimed != signed_sum(plain):
        raise TarDamagedError("it is no tar archive" if place == 0 else f"its header at byte {place} is broken")
    return head


def signed_sum(raw: bytes) -> int:
    """Of bytes from −128 to 127, as some old writers have it."""
    return sum(raw) - 256 * sum(byte > 127 for byte in raw)


def note(file: BinaryIO, place: int, size: int, end: int) -> bytes:
    """What is said of the file that follows, of bounded size."""
    if size > MAX_NAME or place + BLOCK + size > end:
        raise TarDamagedError(f"the long name at byte {place} is broken")
    file.seek(place + BLOCK)
    return file.read(size)


def number(digits: bytes) -> int:
    """Octal digits, or a binary number after a byte with its highest bit set; below 2⁶³."""
    if digits[0] & 0x80:
        found = int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    else:
        try:
            found = int(digits.strip(b" \0") or b"0", 8)
        except ValueError:
            raise TarDamagedError(f"{digits!r} is no number") from None
    if not 0 <= found < 2**63:
        raise TarDamagedError(f"{digits!r} is no size")
    return found


def shown(head: bytes) -> str:
    """The name in a ustar header."""
    name, prefix = text(head[:100]), text(head[345:500]) if head[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def pax_records(records: bytes) -> dict[str, str]:
    """Records of the form `length key=value\\n`, where length counts all of it; only path and size are of use here."""
    found = {}
    while records:
        digits = records.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        if not len(digits) < length <= len(records) or records[length - 1 : length] != b"\n":
            raise TarDamagedError("its pax records are broken")
        key, _, value = records[len(digits) + 1 : length - 1].partition(b"=")
        if key == b"path":
            found["path"] = value.decode("utf-8", "replace")
        if key == b"size":
            found["size"] = str(pax_size(value))
        records = records[length:]
    return found


def pax_size(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise TarDamagedError("its pax records are broken")
    return int(value)
