"""Whole ``mlb convert`` of bfloat16 weights beside llama.cpp's quantizer on the same weights.

Usage: python scripts/bench_convert.py [--shape NAME] [--rounds N] [--threads N] [--llama PYTHON] [-o DIR]

Both take turns in each of --rounds rounds; medians of the wall time are shown with their ratio, peak memory of `mlb
convert`, and its throughput. Each writes a file that is not there yet. The wait of `mlb convert` for the disk (its
final fsync) is taken off and shown apart; llama.cpp does none. llama.cpp quantizes with `pure`. Its importance matrices
cannot be given from Python: for these, its quantizer of rows is timed alone on a part of as many weights, and its time
for all of them is shown, without reading and writing. --llama names the Python that has llama-cpp-python
($MLB_BENCH_LLAMA by default); without it only `mlb convert` is timed.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from bench_checkpoint import write_checkpoint, write_source_gguf
from bench_models import SHAPES

import krafla_cli
from krafla_cli.formats import mli
from krafla_cli.formats.mlb import Header, tensors
from krafla_cli.formats.mli import Dimensions, Imatrix

_WEIGHTS_TIMED = 1 << 24
KINDS = {"q4": ["--wtype", "q4"], "q8": ["--wtype", "q8"], "q4 imatrix": ["--wtype", "q4", "--imatrix"]}

# Run by the other Python: path in, path out, type, threads.
_LLAMA = """
import ctypes, json, sys, time
import llama_cpp as L
source, target, kind, threads = sys.argv[1:5]
log = L.llama_log_callback(lambda *a: None)
L.llama_log_set(log, None)
p = L.llama_model_quantize_default_params()
p.nthread, p.pure = int(threads), True
p.ftype = {"q4": L.LLAMA_FTYPE_MOSTLY_Q4_0, "q8": L.LLAMA_FTYPE_MOSTLY_Q8_0}[kind]
started = time.perf_counter()
code = L.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(p))
print(json.dumps({"code": code, "seconds": time.perf_counter() - started}))
"""

# Likewise: threads, weights a row, rows; prints the seconds for one weight.
_LLAMA_ROWS = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int, c_int64, c_size_t, c_void_p
import numpy as np
from llama_cpp._ggml import libggml as ggml
threads, cols, rows = map(int, sys.argv[1:4])
ggml.ggml_quantize_chunk.restype = c_size_t
ggml.ggml_quantize_chunk.argtypes = [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]
ggml.ggml_quantize_init.argtypes = [c_int]
rng = np.random.default_rng(0)
w = 0.02 * rng.standard_normal((rows, cols), np.float32)
importance = rng.random(cols, np.float32) + np.float32(0.1)
out = np.empty(rows * cols, np.uint8)
Q4_0, step = 2, 64
def quantize(row):
    n = min(step, rows - row)
    ggml.ggml_quantize_chunk(Q4_0, w.ctypes.data, out.ctypes.data, row * cols, n, cols, importance.ctypes.data)
ggml.ggml_quantize_init(Q4_0)
with ThreadPoolExecutor(threads) as pool:
    started = time.perf_counter()
    list(pool.map(quantize, range(0, rows, step)))
    print(json.dumps((time.perf_counter() - started) / w.size))
"""


def convert_once(folder: Path, out: Path, arguments: list[str], threads: int) -> dict[str, float]:
    """Wall seconds of a whole `mlb convert` process, of its fsync, and its peak memory in bytes."""
    report = out.with_suffix(".seconds")
    out.unlink(missing_ok=True)
    code = (
        "import json, sys, time; from pathlib import Path; from krafla_cli.cli import invoke;"
        "from krafla_cli.formats.atomic import Output; real = Output.sync; waited = [0.0]\n"
        "def sync(self):\n started = time.perf_counter(); real(self); waited[0] += time.perf_counter() - started\n"
        "Output.sync = sync; code = invoke(sys.argv[2:])\n"
        "peak = next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "Path(sys.argv[1]).write_text(json.dumps([waited[0], peak])); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(report), "convert", str(folder), "-o", str(out), "--force", "--quiet"]
    started = time.perf_counter()
    subprocess.run([*command, "--threads", str(threads), *arguments], check=True)
    seconds = time.perf_counter() - started
    fsync, peak = json.loads(report.read_text())
    return {"seconds": seconds - fsync, "fsync": fsync, "peak": peak}


def llama_once(python: str, source: Path, out: Path, kind: str, threads: int) -> float:
    """Wall seconds of llama.cpp's quantizer, inside the process."""
    out.unlink(missing_ok=True)
    command = [python, "-c", _LLAMA, str(source), str(out), kind, str(threads)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    answer = json.loads(result.stdout.splitlines()[-1])
    if answer["code"] != 0:
        sys.exit(f"llama.cpp's quantizer ended with {answer['code']}")
    return float(answer["seconds"])


def llama_rows_once(python: str, header: Header, threads: int) -> float:
    """Seconds of llama.cpp's quantizer of rows with importances, for all matrices of the shape; from a part of them."""
    n_rows = _WEIGHTS_TIMED // header.dim
    command = [python, "-c", _LLAMA_ROWS, str(threads), str(header.dim), str(n_rows)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    n_weights = sum(spec.n_weights for spec in tensors(header) if spec.is_quantized)
    return n_weights * float(json.loads(result.stdout.splitlines()[-1]))


def write_imatrix(path: Path, header: Header) -> None:
    """An importance matrix of the shape with random sums."""
    dimensions = Dimensions.of(header)
    sums = np.random.default_rng(0).random(dimensions.n_sums) + 0.1
    mli.write(Imatrix(dimensions, sums, 1, 1), path, force=True)


def bench(kind: str, work: Path, source: Path, options: argparse.Namespace, llama: str | None) -> dict[str, Any]:
    """The row of one kind: medians over the rounds, both in turn."""
    extra = [str(work / "bench.mli")] if kind == "q4 imatrix" else []
    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(convert_once(work / "checkpoint", work / "out.mlb", KINDS[kind] + extra, options.threads))
        if llama and kind == "q4 imatrix":
            theirs.append(llama_rows_once(llama, SHAPES[options.shape].header, options.threads))
        elif llama:
            theirs.append(llama_once(llama, source, work / "out.gguf", kind, options.threads))
    row: dict[str, Any] = {"kind": kind, "mlb s": statistics.median(r["seconds"] for r in ours)}
    row["fsync s"] = statistics.median(r["fsync"] for r in ours)
    row["peak MB"] = max(r["peak"] for r in ours) / 1e6
    row["llama.cpp s"] = statistics.median(theirs) if theirs else None
    row["ratio"] = row["mlb s"] / row["llama.cpp s"] if theirs else None
    return row


def main() -> None:
    """Writes the weights, runs every kind, prints a table and a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[n for n, s in SHAPES.items() if s.gguf_arch], default="qwen2.5-0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama", default=os.environ.get("MLB_BENCH_LLAMA"))
    parser.add_argument("-o", "--output", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    shape, work = SHAPES[options.shape], options.output / f"convert-{options.shape}"
    work.mkdir(parents=True, exist_ok=True)
    source = work / "source.gguf"
    compileall.compile_dir(Path(krafla_cli.__file__).parent, quiet=1)  # as an installed package is
    write_checkpoint(work / "checkpoint", shape.header)
    write_imatrix(work / "bench.mli", shape.header)
    if options.llama:
        write_source_gguf(source, shape.header, str(shape.gguf_arch))
    rows = [bench(kind, work, source, options, options.llama) for kind in KINDS]
    n_bytes = (work / "checkpoint" / "model.safetensors").stat().st_size
    print(f"{options.shape}, {n_bytes / 1e6:.0f} MB of bfloat16, {options.threads} threads, {options.rounds} rounds")
    print(f"{'kind':<12} {'mlb s':>7} {'GB/s':>6} {'fsync s':>8} {'peak MB':>8} {'llama.cpp s':>12} {'ratio':>6}")
    for r in rows:
        other = f"{r['llama.cpp s']:>12.2f} {r['ratio']:>6.2f}" if r["ratio"] else f"{'':>12} {'':>6}"
        speed = n_bytes / r["mlb s"] / 1e9
        print(f"{r['kind']:<12} {r['mlb s']:>7.2f} {speed:>6.2f} {r['fsync s']:>8.2f} {r['peak MB']:>8.0f} {other}")
    (options.output / "convert.json").write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
