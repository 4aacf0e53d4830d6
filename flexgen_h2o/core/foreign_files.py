"""Files that people have prompts in and that are no JSON lines: what they are, and the remedy."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

HEAD_BYTES = 64  # bytes of a file that show its kind
# Endings of files of lines. A file that was sent to the server has none.
LINES = ("", ".jsonl", ".ndjson", ".json", ".txt")
# First bytes of files that have no lines, with what they are and how to unpack them.
_MAGIC = {
    b"\x1f\x8b": ("is packed by gzip", "unpack it: gunzip -k {}"),
    b"\x28\xb5\x2f\xfd": ("is packed by zstd", "unpack it: unzstd {}"),
    b"BZh": ("is packed by bzip2", "unpack it: bunzip2 -k {}"),
    b"\xfd7zXZ": ("is packed by xz", "unpack it: unxz -k {}"),
    b"7z\xbc\xaf": ("is packed by 7-Zip", "unpack it: 7z x {}"),
    b"PK\x03\x04": ("is packed by zip", "unpack it: unzip {}"),
    b"\xff\xfe": ("is UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("is UTF-16 text", "save it as UTF-8"),
    b"\x89PNG": ("is a picture", "give JSON lines"),
    b"%PDF": ("is a PDF", "give JSON lines"),
    b"PAR1": ("is a Parquet file", ""),
    b"ARROW1": ("is an Arrow file", ""),
    b"SQLite format 3": ("is a database", "write its rows as JSON lines"),
}
# Endings of tables, with what they are and pandas' reader.
_TABLES = {
    ".csv": ("is a CSV table", "read_csv({})"),
    ".tsv": ("is a table", "read_csv({}, sep='\\t')"),
    ".parquet": ("is a Parquet file", "read_parquet({})"),
    ".feather": ("is an Arrow file", "read_feather({})"),
    ".arrow": ("is an Arrow file", "read_feather({})"),
    ".xlsx": ("is an Excel table", "read_excel({})"),
    ".xls": ("is an Excel table", "read_excel({})"),
    ".ods": ("is a table", "read_excel({})"),
}
_TABLE_OF = {"is a Parquet file": ".parquet", "is an Arrow file": ".arrow"}
_PACKED = {
    ".gz": b"\x1f\x8b",
    ".zst": b"\x28\xb5\x2f\xfd",
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ",
    ".7z": b"7z\xbc\xaf",
    ".zip": b"PK\x03\x04",
}
_PAGE = "docs/how-to/your-data.md"
_URL = re.compile(r"([a-z][a-z0-9]+):/", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def kind_of(path: Path, head: bytes, column: str = "text") -> str | None:
    """Return what a file is and what to do, if it is none of lines. None if it may be.

    head: its first HEAD_BYTES. column: the key that the lines should have.
    """
    suffix = path.suffix.lower()
    name = shlex.quote(path.name)
    lines = path.with_suffix(".jsonl").name
    found = next((start for start in _MAGIC if head.startswith(start)), _PACKED.get(suffix))
    what, remedy = _MAGIC[found] if found is not None else ("", "")
    kind = suffix if suffix in _TABLES else _TABLE_OF.get(what)
    if kind is not None:
        what, reader = _TABLES[kind]
        return (
            f"{what}; write its rows as JSON lines, with its column of prompts named {column}: "
            f"pandas.{reader.format(repr(path.name))}.rename(columns={{'COLUMN': {column!r}}})"
            f".to_json({lines!r}, orient='records', lines=True); {_PAGE} also shows how to join "
            "the answers"
        )
    if what:
        return f"{what}; {remedy.format(name)}"
    begins = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if suffix == ".txt" or not begins:
        return None
    target = shlex.quote(lines if lines != path.name else "lines.jsonl")
    if re.match(rb"\[\s*(\n|\{)", begins):
        return f"is one JSON array; write a line for each: jq -c '.[]' {name} > {target}"
    if re.match(rb'\{\s*\n\s+"', begins):
        return f"has JSON objects over several lines; write each on one: jq -c . {name} > {target}"
    if suffix not in LINES and not begins.startswith(b"{"):
        return "has no JSON lines; name it .txt if each of its lines is a prompt"
    return None


def where_else(name: str) -> str:
    """Return what to do about a name of an input that is no file. Empty if it is a usual one."""
    if name == "-" or re.fullmatch(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+", name):
        return "a job reads its input more than once; save it to a file: cat > prompts.jsonl"
    url = _URL.match(name.replace("hf:", "hf:/", 1) if name.startswith("hf:") else name)
    is_hub = not Path(name).suffix and _HUB_NAME.fullmatch(name) is not None
    if (url is not None and url[1].lower() == "hf") or (url is None and is_hub and "/" in name):
        return (
            "data sets of the hub are not fetched; save it as JSON lines with the package datasets:"
            f" load_dataset(...).to_json('prompts.jsonl') ({_PAGE})"
        )
    if url is not None:
        return "files of the network are not fetched; download it and name the file"
    return ""
