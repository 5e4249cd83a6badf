"""Files that a hostile author would write: raw tar members and pax records, PNG chunks, pickles that leave a canary."""

import struct
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

TAR_END = bytes(1024)


def canary_pickle(canary: Path) -> bytes:
    """Unpickling this makes the folder `canary`; protocol 0, so that it is also text."""
    return f"cos\nmkdir\n(V{canary}\ntR.".encode()


def tar_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """512 bytes that promise a member of `size` bytes, which need not follow."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        member.linkname = "/etc/passwd"
    return member.tobuf(tarfile.GNU_FORMAT)


def tar_member(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Header and content, filled up to whole blocks."""
    return tar_header(name, len(content), kind) + content + bytes(-len(content) % 512)


def pax_records(records: Iterable[tuple[str, str]]) -> bytes:
    """Content of a pax header: each record begins with its own length."""
    found = b""
    for name, value in records:
        rest = f" {name}={value}\n".encode()
        length = len(rest)
        while len(str(length)) + len(rest) != length:
            length = len(str(length)) + len(rest)
        found += str(length).encode() + rest
    return found


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """With the right checksum."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, extra: bytes = b"", pixels: bytes | None = None) -> bytes:
    """An RGB picture, black unless `pixels` says what the compressed rows are; `extra` chunks stand before them."""
    rows = zlib.compress(bytes(1 + 3 * width) * height) if pixels is None else pixels
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = png_chunk(b"IHDR", header) + extra + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def png_text_bomb(mebibytes: int) -> bytes:
    """A compressed text chunk of so many MiB of one letter."""
    return png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"a" * (mebibytes << 20), 9))
