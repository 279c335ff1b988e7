"""A small model and a corpus of every kind of file with something wrong in each, for tests of sharded jobs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from krafla_cli.formats import lemb
from tests.embed.students import WORDS, header_of, random_model

N_SHARDS = 9  # of 16 texts
FAULTS = [
    "d.parquet: no Parquet file: Parquet magic bytes not found in footer. Either the file is corrupted or this is not "
    "a parquet file.",
    "a.txt: line 18: not UTF-8 at byte 4",
    "b.jsonl: line 41: has no field 'text' (it has: body); --field names another",
    "c.parquet: row 40: field 'text' is null",
]


def texts(n: int, seed: int) -> list[str]:
    """Texts of 0 to 9 known words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS[:16], k=rng.randint(0, 9))) for _ in range(n)]


def write_model(path: Path, seed: int = 0) -> Path:
    """Writes a random LEMB model."""
    lemb.write(path, random_model(header_of("int4", "ternary"), seed))
    return path


def write_corpus(folder: Path) -> list[str]:
    """Writes the corpus into ``folder``; returns its texts in order, those that can be read."""
    lines, objects, rows = texts(40, 1), texts(40, 2), texts(39, 3)
    data = [line.encode() for line in lines]
    data.insert(17, b"bad \xff")
    (folder / "a.txt").write_bytes(b"\n".join(data) + b"\n")
    documents = [json.dumps({"text": text}) for text in objects] + ['{"body": 1}', "", " "]
    (folder / "b.jsonl").write_text("\n".join(documents) + "\n")
    pq.write_table(pa.table({"text": [*rows, None]}), folder / "c.parquet", row_group_size=7)
    (folder / "d.parquet").write_bytes(b"PAR1, but then nothing like it")
    return lines + objects + rows


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
