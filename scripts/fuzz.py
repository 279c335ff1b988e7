"""Feeds damaged files to every reader: each gives an object or one of the tool's own errors, in bounded memory.

    python scripts/fuzz.py --seconds 300            5 minutes for each reader
    python scripts/fuzz.py --reader mlb --inputs 5000 --seed 7
    python scripts/fuzz.py --seconds 300 --guided   the same mutations, guided by coverage (pip install atheris)

Starts from small valid files, and changes them knowing their structure: integers at 0, 1, their maximum and one less,
lengths off by one, stretches repeated, removed, swapped, checksums put right afterwards. Prints a table: inputs tried,
crashes, inputs over the limits of memory and time, which grow with the file; a crashing input is kept in --keep.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of this checkout, whatever is installed
from krafla_cli.errors import MlbError

Mutation = Callable[[bytearray, random.Random], None]

MEMORY_FACTOR, MEMORY_FLOOR = 3, 64 << 20
SECONDS_PER_BYTE, SECONDS_FLOOR = 1e-4, 5.0
_INTERESTING = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
_INTERESTING_64 = (*_INTERESTING, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
_FLOATS = (0.0, -0.0, -1.0, 1e38, float("inf"), float("-inf"), float("nan"), 1e-45)


@dataclass(frozen=True)
class Reader:
    """A reader under test: ``read(path)`` of a file called ``name``, valid ``seeds``, ``repair`` of checksums."""

    title: str
    name: str
    seeds: list[bytes]
    read: Callable[[Path], object]
    is_text: bool = False
    repair: Callable[[bytearray], None] | None = None


@dataclass
class Outcome:
    """What came of the inputs of one reader."""

    title: str
    n_inputs: int = 0
    n_valid: int = 0
    n_refused: int = 0
    n_crashes: int = 0
    n_over_memory: int = 0
    n_over_time: int = 0
    worst_seconds: float = 0.0
    first_crash: str = ""

    @property
    def good(self) -> bool:
        return not (self.n_crashes or self.n_over_memory or self.n_over_time)


# --- mutations


def _set_u32(data: bytearray, rng: random.Random) -> None:
    if len(data) >= 4:
        at = rng.randrange(0, min(len(data) - 3, 512)) // 4 * 4
        struct.pack_into("<I", data, at, rng.choice(_INTERESTING))


def _set_u64(data: bytearray, rng: random.Random) -> None:
    if len(data) >= 8:
        struct.pack_into("<Q", data, rng.randrange(0, len(data) - 7), rng.choice(_INTERESTING_64))


def _set_f32(data: bytearray, rng: random.Random) -> None:
    if len(data) >= 4:
        struct.pack_into("<f", data, rng.randrange(0, len(data) - 3) // 4 * 4, rng.choice(_FLOATS))


def _nudge(data: bytearray, rng: random.Random) -> None:
    """A length off by one."""
    if data:
        at = rng.randrange(len(data))
        data[at] = (data[at] + rng.choice((-1, 1))) % 256


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    if data:
        del data[rng.randrange(len(data)) :]


def _extend(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.choice((1, 7, 100)))


def _remove(data: bytearray, rng: random.Random) -> None:
    if data:
        at = rng.randrange(len(data))
        del data[at : at + rng.choice((1, 4, 8, 64))]


def _repeat(data: bytearray, rng: random.Random) -> None:
    if data:
        at = rng.randrange(len(data))
        data[at:at] = data[at : at + rng.choice((1, 4, 8, 64))]


def _swap(data: bytearray, rng: random.Random) -> None:
    if len(data) >= 32:
        a, b = (rng.randrange(len(data) - 15) for _ in range(2))
        data[a : a + 16], data[b : b + 16] = data[b : b + 16], data[a : a + 16]


def _set_digit(data: bytearray, rng: random.Random) -> None:
    """In JSON: a number, a quote or a bracket becomes something else."""
    places = [i for i, c in enumerate(data[:20000]) if chr(c) in '0123456789"[]{},:tf-']
    if places:
        at = rng.choice(places)
        data[at : at + 1] = rng.choice(
            (b"0", b"-1", b"1e999", b"null", b'"', b"[", b"{", b"}", b"9" * 30, b"\\ud800", b"true")
        )


_BINARY: tuple[Mutation, ...] = (
    _set_u32, _set_u32, _set_u64, _set_f32, _nudge, _flip, _cut, _extend, _remove, _repeat, _swap,
)  # fmt: skip
_TEXT: tuple[Mutation, ...] = (_set_digit, _set_digit, _set_digit, _flip, _cut, _remove, _repeat, _swap, _nudge)


def mutated(seed: bytes, rng: random.Random, reader: Reader) -> bytes:
    """``seed`` after one to four mutations."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        rng.choice(_TEXT if reader.is_text else _BINARY)(data, rng)
    if reader.repair is not None and rng.random() < 0.8:
        reader.repair(data)
    return bytes(data)


def repair_sha256(data: bytearray) -> None:
    """Puts the trailing SHA-256 of a LEMB file right, so that the damage before it is looked at."""
    if len(data) > 32:
        data[-32:] = hashlib.sha256(data[:-32]).digest()


def repair_safetensors_length(data: bytearray) -> None:
    """Puts the header length of a safetensors file right, where its closing brace can be found."""
    end = data.find(b"}}", 8)
    if end > 0:
        struct.pack_into("<Q", data, 0, end + 2 - 8)


# --- running


def run_reader(reader: Reader, n_inputs: int | None, seconds: float | None, seed: int, keep: Path | None) -> Outcome:
    """Tries ``n_inputs`` damaged files, or as many as fit in ``seconds``."""
    rng, outcome = random.Random(seed), Outcome(reader.title)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / reader.name
        for seed_bytes in reader.seeds:  # what is valid must be read, or the mutations start from nothing
            path.write_bytes(seed_bytes)
            reader.read(path)
        while outcome.n_inputs < n_inputs if n_inputs is not None else time.monotonic() - started < (seconds or 0):
            data = mutated(rng.choice(reader.seeds), rng, reader)
            path.write_bytes(data)
            try_input(reader, path, len(data), outcome)
            if keep is not None and not outcome.good and not outcome.first_crash.endswith("]"):
                kept = keep / f"{reader.title}-{outcome.n_inputs}-{reader.name}"
                kept.write_bytes(data)
                outcome.first_crash += f" [{kept}]"
    return outcome


def try_input(reader: Reader, path: Path, n_bytes: int, outcome: Outcome) -> None:
    outcome.n_inputs += 1
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    started = time.process_time()  # a busy machine must not look like a slow reader
    try:
        reader.read(path)
        outcome.n_valid += 1
    except MlbError as error:
        outcome.n_refused += 1
        if "\x1b" in str(error) or "\n" in str(error):
            outcome.n_crashes += 1
            outcome.first_crash = outcome.first_crash or f"raw control characters: {str(error)!r}"
    except Exception as error:  # noqa: BLE001 - anything else is what is looked for
        outcome.n_crashes += 1
        outcome.first_crash = outcome.first_crash or f"{type(error).__name__}: {error}"
    seconds = time.process_time() - started
    outcome.worst_seconds = max(outcome.worst_seconds, seconds)
    if seconds > SECONDS_FLOOR + SECONDS_PER_BYTE * n_bytes:
        outcome.n_over_time += 1
        outcome.first_crash = outcome.first_crash or f"{seconds:.1f} s for a file of {n_bytes:,} bytes"
    peak = tracemalloc.get_traced_memory()[1] - before
    if peak > MEMORY_FACTOR * n_bytes + MEMORY_FLOOR:
        outcome.n_over_memory += 1
        outcome.first_crash = outcome.first_crash or f"{peak:,} bytes of memory for a file of {n_bytes:,}"


def run_guided(reader: Reader, seconds: float, seed: int, keep: Path | None) -> Outcome:
    """The same with libFuzzer choosing which inputs to go on from, in a process of its own, which it ends itself."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "outcome.json"
        child = os.fork()
        if child == 0:
            _fuzz_guided(reader, Path(folder), told, seconds, seed)
        os.waitpid(child, 0)
        outcome = Outcome(**json.loads(told.read_text()))
        bad = Path(folder) / "bad"
        if bad.exists() and keep is not None:
            kept = keep / f"{reader.title}-{outcome.n_inputs}-{reader.name}"
            kept.write_bytes(bad.read_bytes())
            outcome.first_crash += f" [{kept}]"
        return outcome


def _fuzz_guided(reader: Reader, folder: Path, told: Path, seconds: float, seed: int) -> None:
    """Does not return. ``told`` is written again and again: nothing runs when libFuzzer ends the process."""
    import atheris

    corpus, path, outcome = folder / "corpus", folder / reader.name, Outcome(reader.title)
    corpus.mkdir()
    for i, data in enumerate(reader.seeds):
        (corpus / str(i)).write_bytes(data)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - as long as the process lives
    os.dup2(sys.stderr.fileno(), 2)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try_input(reader, path, len(data), outcome)
        if not outcome.good and not (folder / "bad").exists():
            (folder / "bad").write_bytes(data)
        if outcome.n_inputs % 50 == 1 or not outcome.good:
            told.write_text(json.dumps(asdict(outcome)))

    def mutate(data: bytes, max_size: int, mutation_seed: int) -> bytes:
        return mutated(data, random.Random(mutation_seed), reader)[:max_size]

    options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed + 1}", "-max_len=1048576", "-timeout=600"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], read, custom_mutator=mutate)
    atheris.Fuzz()


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as lines of text."""
    columns = ("inputs", "valid", "refused", "crashes", "memory", "time")
    lines = [f"{'reader':<16} {' '.join(f'{c:>8}' for c in columns)} {'slowest':>9}"]
    for o in outcomes:
        counts = (o.n_inputs, o.n_valid, o.n_refused, o.n_crashes, o.n_over_memory, o.n_over_time)
        lines.append(
            f"{o.title:<16} {' '.join(f'{n:>8}' for n in counts)} {o.worst_seconds:>8.3f}s {o.first_crash}".rstrip()
        )
    return "\n".join(lines)


def main(readers: list[Reader], arguments: list[str] | None = None) -> int:
    """Runs the readers that the arguments name; returns 1 where one crashed or took too much memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", action="append", choices=[r.title for r in readers], help="only this one")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each reader")
    parser.add_argument("--inputs", type=int, help="for each reader, instead of a time")
    parser.add_argument("--guided", action="store_true", help="by coverage; needs atheris")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the first bad input of each reader")
    args: Any = parser.parse_args(arguments)
    tracemalloc.start()
    chosen = [r for r in readers if not args.reader or r.title in args.reader]
    outcomes = []
    for reader in chosen:
        if args.guided:
            outcomes.append(run_guided(reader, args.seconds, args.seed, args.keep))
        else:
            outcomes.append(run_reader(reader, args.inputs, args.seconds, args.seed, args.keep))
        print(table(outcomes[-1:]).splitlines()[-1], file=sys.stderr)
    print(table(outcomes))
    return int(not all(o.good for o in outcomes))


def load_readers(guided: bool) -> list[Reader]:
    """The readers of the tests; for guided fuzzing the package is imported with its branches counted."""
    if not guided:
        return list(importlib.import_module("tests.helpers.readers").readers())
    import atheris

    with atheris.instrument_imports(include=["krafla_cli"]):
        return list(importlib.import_module("tests.helpers.readers").readers())


if __name__ == "__main__":
    sys.exit(main(load_readers("--guided" in sys.argv)))
