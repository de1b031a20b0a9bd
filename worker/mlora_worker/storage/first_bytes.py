"""What a file is by its first bytes, where it lies in the place of another one; and what to do then. Pure.

Only what the expected file can never begin with is named: rows of CSV may begin with any letters.
"""

from __future__ import annotations

from typing import Final

ENOUGH: Final = 1024  # bytes to tell by

_UNPACK = "which is not read: unpack it, or pack text with gzip or zstd"
_TABLE = "which is not read: write it as JSON Lines, CSV or Parquet"
_NO_ROWS = "which is not read"
_PARQUET = "which needs dataset.fileFormat: parquet, or a name that ends in .parquet"
_LFS = b"version https://git-lfs.github.com/spec/"
_ANNEX = b"/annex/objects/"
_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_TAR_AT, _TAR = 257, b"ustar"
_ZIP = b"PK\x03\x04"
_NAME_AT = 30  # of a zip's first file
_UTF_16: Final = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_LETTERS = 32  # of text, each with a byte of zero
_BEGINNINGS: Final = {
    b"\x1f\x8b": ("gzip", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("zstd", _UNPACK),
    b"\x04\x22\x4d\x18": ("lz4", _UNPACK),
    b"\xff\x06\x00\x00sNaPpY": ("snappy", _UNPACK),
    b"\xfd7zXZ\x00": ("xz", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("7z", _UNPACK),
    b"Rar!\x1a\x07": ("rar", _UNPACK),
    b"ARROW1\x00": ("Arrow", _TABLE),
    b"\xff\xff\xff\xff": ("an Arrow stream", _TABLE),
    b"Obj\x01": ("Avro", _TABLE),
    b"SQLite format 3\x00": ("a database of SQLite", _TABLE),
    b"\x89HDF\r\n\x1a\n": ("HDF5", _TABLE),
    b"\x93NUMPY": ("a NumPy array", _TABLE),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("a workbook or document of Microsoft Office", _TABLE),
    b"\x80\x02": ("a pickle", _NO_ROWS),
    b"\x80\x03": ("a pickle", _NO_ROWS),
    b"\x80\x04": ("a pickle", _NO_ROWS),
    b"\x80\x05": ("a pickle", _NO_ROWS),
    b"%PDF-": ("PDF", _NO_ROWS),
    b"\x89PNG\r\n": ("a picture", _NO_ROWS),
    b"\xff\xd8\xff": ("a picture", _NO_ROWS),
    b"GGUF\x02\x00": ("GGUF, a model's weights", _NO_ROWS),
    b"GGUF\x03\x00": ("GGUF, a model's weights", _NO_ROWS),
}
_BZIP2 = tuple(b"BZh%d" % level + block for level in range(1, 10) for block in (b"1AY&SY", b"\x17rE8P\x90"))
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<body")


def stands_in(start: bytes) -> str | None:
    """Of what stands in the place of any file, "is a pointer of Git LFS, ...: what to do"."""
    if start.startswith(_LFS):
        return "is a pointer of Git LFS and not the file itself: fetch that with `git lfs pull` and upload it instead"
    text = start.removeprefix(_BOM).lstrip(_SPACE)
    if _ANNEX in start[:256] and start[:1] in (b"/", b".") and b"\x00" not in start:
        return "is a pointer of git-annex and not the file itself: fetch it with `git annex get`, and upload that"
    lower = text[:64].lower()
    if lower.startswith(_PAGES) or (lower.startswith((b"<?xml", b"<!--")) and b"<html" in text.lower()):
        return (
            "is a web page (HTML) and not the file itself: the address leads to a page about it, or to one that asks for a "
            "login. Take the address of the file's content, on a hub with /resolve/ (or /raw/) in the place of /blob/"
        )
    if lower.startswith(b"<?xml"):
        return "is XML, perhaps a store's or a server's error, and not the file itself: open the address in a browser"
    return None


def named(start: bytes) -> str | None:
    """The same, of all that is no text in UTF-8. ``start``: the first ``ENOUGH`` bytes, or all."""
    found = stands_in(start) or _of_text(start)
    if found is not None:
        return found
    if start.startswith(_ZIP):
        return _zip(start)
    if start.startswith(_BZIP2):
        return f"is bzip2, {_UNPACK}"
    for magic, (name, advice) in _BEGINNINGS.items():
        if start.startswith(magic):
            return f"is {name}, {advice}"
    if start.startswith(b"PARE") and start[4:5] < b" ":
        return "is an encrypted Parquet file, which is not read: write it without encryption"
    if start.startswith(b"PAR1") and start[4:5] < b" ":
        return f"is Parquet, {_PARQUET}"
    if start[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        return "is a tar archive, which is not read: unpack it, and name the files in it"
    return None


def _of_text(start: bytes) -> str | None:
    name = next((name for mark, name in _UTF_16.items() if start.startswith(mark)), None)
    if name is None:  # without a mark: letters of ASCII have every other byte zero
        for first in (0, 1):
            zeros, letters = start[first : 2 * _LETTERS : 2], start[1 - first : 2 * _LETTERS : 2]
            if (
                len(zeros) > 1
                and not any(zeros)
                and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in letters)
            ):
                name = "UTF-16"
    if name is None:
        return None
    return f"is text in {name}, which is not read: write it as UTF-8, such as with `iconv -f {name} -t UTF-8`"


def _zip(start: bytes) -> str:
    name = start[_NAME_AT : _NAME_AT + 64]
    if name.startswith((b"[Content_Types].xml", b"_rels/", b"docProps/", b"xl/", b"word/")):
        return (
            "is an Excel workbook (xlsx) or a document of its kind, which is not read: save it as CSV (UTF-8)"
        )
    if name.startswith(b"mimetypeapplication/vnd.oasis"):
        return "is an OpenDocument file, which is not read: save it as CSV (UTF-8)"
    return f"is zip, {_UNPACK}"
