"""scripts/png.py: the pixels stay what they were, whatever filters the encoder chose."""

import random
import struct
import zlib

import pytest

from png import SIGNATURE, repacked

WIDTH, STRIDE = 5, 15


def part(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def encoded(rows: list[bytes], methods: list[int], depth: int = 8) -> bytes:
    """A PNG whose rows use the given filters, by the formulas of the specification."""
    packed, above = b"", bytes(STRIDE)
    for row, method in zip(rows, methods, strict=True):
        left, corner = bytes(3) + row[:-3], bytes(3) + above[:-3]

        def predicted(i: int, method=method, above=above, left=left, corner=corner) -> int:
            a, b, c = left[i], above[i], corner[i]
            pa, pb, pc = abs(b - c), abs(a - c), abs(a + b - 2 * c)
            paeth = a if pa <= pb and pa <= pc else b if pb <= pc else c
            return (0, a, b, (a + b) // 2, paeth)[method]

        packed += bytes([method]) + bytes((row[i] - predicted(i)) % 256 for i in range(STRIDE))
        above = row
    header = struct.pack(">IIBBBBB", WIDTH, len(rows), depth, 2, 0, 0, 0)
    body = zlib.compress(packed)
    parts = ((b"IHDR", header), (b"IDAT", body[:7]), (b"IDAT", body[7:]), (b"IEND", b""))
    return SIGNATURE + b"".join(part(*entry) for entry in parts)


def test_every_filter_is_undone() -> None:
    source = random.Random(0)
    rows = [source.randbytes(STRIDE) for _ in range(40)]
    result = repacked(encoded(rows, [i % 5 for i in range(40)]))
    assert result == repacked(encoded(rows, [0] * 40))
    assert result[: len(SIGNATURE)] == SIGNATURE
    at = result.index(b"IDAT")
    (length,) = struct.unpack(">I", result[at - 4 : at])
    pixels = zlib.decompress(result[at + 4 : at + 4 + length])
    assert pixels == b"".join(b"\0" + row for row in rows)


def test_other_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="8-bit RGB"):
        repacked(encoded([bytes(STRIDE)], [0], depth=16))
    with pytest.raises(ValueError, match="no PNG"):
        repacked(b"GIF89a")
