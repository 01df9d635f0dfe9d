"""The layout of RocksDB's files: enough of the format to damage one part on purpose."""

import struct
from dataclasses import dataclass

TRAILER = 5
MAGIC = 0x88E241B785F4CFF7


@dataclass
class Part:
    """A named stretch of a file."""

    kind: str
    start: int
    end: int

    @property
    def middle(self):
        """The offset of a byte in the middle."""
        return (self.start + self.end) // 2


def varint(data, at):
    """A varint, and the offset after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def handle(data, at=0):
    """A block's offset and size, and the offset after the handle."""
    offset, at = varint(data, at)
    size, at = varint(data, at)
    return offset, size, at


def entries(block):
    """(key, value) of an uncompressed block."""
    restarts = struct.unpack_from("<I", block, len(block) - 4)[0] & 0x7FFFFFFF
    at, end, key = 0, len(block) - 4 - 4 * restarts, b""
    while at < end:
        shared, at = varint(block, at)
        fresh, at = varint(block, at)
        length, at = varint(block, at)
        key = key[:shared] + block[at : at + fresh]
        yield key, block[at + fresh : at + fresh + length]
        at += fresh + length


def table(path):
    """The parts of a block-based table: `data`, `index`, `metaindex`, `footer`, and the meta blocks by name."""
    data = path.read_bytes()
    footer = len(data) - 53
    assert struct.unpack_from("<Q", data, len(data) - 8)[0] == MAGIC, path
    version = struct.unpack_from("<I", data, len(data) - 12)[0]
    parts = [Part("footer", footer, len(data))]
    if version >= 6:
        size = struct.unpack_from("<I", data, footer + 13)[0]
        meta = (footer - size - TRAILER, size)
    else:
        offset, size, at = handle(data, footer + 1)
        meta = (offset, size)
        offset, size, _ = handle(data, at)
        parts.append(Part("index", offset, offset + size))
    parts.append(Part("metaindex", meta[0], sum(meta)))
    for name, value in entries(data[meta[0] : sum(meta)]):
        name = name.decode()
        if name.startswith(("rocksdb.", "fullfilter.", "partitionedfilter.")):
            offset, size, _ = handle(value)
            kind = {"fullfilter": "filter", "partitionedfilter": "filter-index"}.get(name.split(".")[0], name)
            parts.append(Part("index" if name == "rocksdb.index" else kind, offset, offset + size))
    first = min([part.start for part in parts])
    if first > 0:
        # Data blocks come first, so the first one ends before any other part begins.
        parts.append(Part("data", 0, min(first - TRAILER, 200)))
    return parts


def log(path):
    """The records of a WAL or a MANIFEST, one part for each fragment, without those of a recycled file's earlier use."""
    data = path.read_bytes()
    number = int("".join(c for c in path.name if c.isdigit()))
    at, parts = 0, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            break
        header = 7 if kind < 5 or kind == 9 else 11
        if header == 11 and struct.unpack_from("<I", data, at + 7)[0] != number:
            break
        parts.append(Part("record", at, at + header + length))
        at += header + length
    return parts


def blob(path):
    """The parts of a blob file: header, footer, and the header and value of the first record."""
    data = path.read_bytes()
    key_length, value_length = struct.unpack_from("<QQ", data, 30)
    return [
        Part("blob-header", 0, 30),
        Part("blob-record-header", 30, 62),
        Part("blob-value", 30, 62 + key_length + value_length),
        Part("blob-footer", len(data) - 32, len(data)),
    ]


def flip(path, at, bit=0):
    """Flips one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
