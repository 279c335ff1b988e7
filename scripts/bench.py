"""Speed of the fast engine on random models of known shapes, side by side with llama.cpp where that is installed.

Usage: python scripts/bench.py [--shapes A,B] [--models A.mlb,B.mlb] [--wtypes q4,q8] [--threads 1,2] [--rounds N]
       [--llama PYTHON] [-o DIR]

--models are real files beside the random shapes; llama.cpp gets the same weights, exported to GGUF.

Both engines run in processes of their own that stay open and take turns, one waiting while the other works, in each of
--rounds rounds; medians over all rounds are shown, with the ratio of the medians, and the best of all. Shapes, tensor
types and the number of threads are the same for both; llama.cpp keeps its defaults (repacking on). --llama names the
Python that has llama-cpp-python (by default this one, or $MLB_BENCH_LLAMA); without it only this engine is timed.
Decoding is also shown as a share of the memory bandwidth that the same number of threads reached in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bench_models import SHAPES, write_mlb

WORKER = Path(__file__).with_name("bench_worker.py")
PREFILLS = (32, 256, 2048)
DECODE_TOKENS = 16
LONG = 2048
CONTEXT = 4096
NO_LLAMA = "llama-cpp-python not found: give --llama PYTHON, or set MLB_BENCH_LLAMA"


class Worker:
    """A process that runs one engine; see bench_worker.py."""

    def __init__(self, python: str, kind: str, model: Path, n_threads: int) -> None:
        command = [python, str(WORKER), kind, str(model), str(n_threads), str(CONTEXT)]
        self._name = f"{kind} on {model}"
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._answer()["ready"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 (it is a pipe)
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"bench: {self._name} ended without an answer")
        return json.loads(line)

    def ask(self, do: str, **values: int) -> Any:
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()


@dataclass
class Times:
    """Seconds for one piece of work by engine, one entry a repetition."""

    work: str
    n_tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, engine: str, *seconds: float) -> None:
        self.seconds.setdefault(engine, []).extend(seconds)

    def rate(self, engine: str, best: bool = False) -> float:
        """Tokens a second: the median, or the best."""
        seconds = self.seconds[engine]
        return self.n_tokens / (min(seconds) if best else statistics.median(seconds))


def measure(workers: dict[str, Worker], rounds: int) -> list[Times]:
    """Runs all work in turns."""
    decodes = [Times("decode at 0", 1), Times(f"decode at {LONG}", 1)]
    prefills = [Times(f"prefill {n}", n) for n in PREFILLS]
    for worker in workers.values():  # caches, page tables, clocks
        worker.ask("prefill", n=32)
        worker.ask("decode", n=4)
    for _ in range(rounds):
        for times in prefills:
            for name, worker in workers.items():
                times.add(name, worker.ask("prefill", n=times.n_tokens))
                if times.n_tokens == LONG:
                    decodes[1].add(name, *worker.ask("decode", n=DECODE_TOKENS))
        for name, worker in workers.items():
            worker.ask("prefill", n=1)
            decodes[0].add(name, *worker.ask("decode", n=DECODE_TOKENS))
    return [*decodes, *prefills]


def show(results: list[Times], model_bytes: int, bandwidth: float) -> list[dict[str, Any]]:
    """Prints a table; returns it as data."""
    rows = []
    print(f"{'':16} {'mlb tok/s':>10} {'(best)':>8} {'llama.cpp':>10} {'(best)':>8} {'ratio':>6} {'of best':>8}")
    for times in results:
        row: dict[str, Any] = {"work": times.work, "mlb": times.rate("mlb"), "mlb_best": times.rate("mlb", True)}
        line = f"{times.work:16} {row['mlb']:10.1f} {row['mlb_best']:8.1f}"
        if "llama" in times.seconds:
            row |= {"llama": times.rate("llama"), "llama_best": times.rate("llama", True)}
            row |= {"ratio": row["mlb"] / row["llama"], "best_ratio": row["mlb_best"] / row["llama_best"]}
            line += f" {row['llama']:10.1f} {row['llama_best']:8.1f} {row['ratio']:6.2f} {row['best_ratio']:8.2f}"
        if times.work == "decode at 0":
            row["of_bandwidth"] = row["mlb"] * model_bytes / bandwidth
            line += f"   {row['of_bandwidth']:.0%} of the bandwidth"
        print(line)
        rows.append(row)
    return rows


def start_seconds(model: Path) -> list[float]:
    """Seconds of `mlb run` from the shell to its first token, caches warm, in order."""
    command = [sys.executable, "-m", "krafla_cli", "run", str(model), "--prompt-ids", "1,5,7"]
    command += ["-n", "1", "--quiet"]
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)


def has_llama(python: str) -> bool:
    return subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode == 0


@dataclass(frozen=True)
class Case:
    """A model to be timed: as .mlb, and, where llama.cpp has its architecture, as .gguf."""

    name: str
    mlb: Path
    gguf: Path | None


def shape_case(name: str, wtype: str, folder: Path) -> Case:
    """Random weights of a known shape, written where they are not there yet."""
    mlb = folder / f"{name}-{wtype}.mlb"
    if not mlb.exists():
        write_mlb(mlb, SHAPES[name].with_wtype(wtype))
    return file_case(mlb, folder)


def file_case(path: Path, folder: Path) -> Case:
    """A model and its export, which has the same blocks; made anew, for what a model holds may have changed."""
    gguf = folder / f"{path.stem}.gguf"
    command = [sys.executable, "-m", "krafla_cli", "export", str(path), "--to", "gguf", "-o", str(gguf), "--force"]
    exported = subprocess.run([*command, "--quiet"], stderr=subprocess.PIPE, text=True)
    if exported.returncode:
        print(exported.stderr.strip())
    return Case(path.stem, path, gguf if exported.returncode == 0 else None)


def bench(case: Case, n_threads: int, llama: str | None, rounds: int) -> dict[str, Any]:
    """Times one model with one number of threads."""
    workers = {"mlb": Worker(sys.executable, "mlb", case.mlb, n_threads)}
    if llama is not None and case.gguf is not None:
        workers["llama"] = Worker(llama, "llama", case.gguf, n_threads)
    bandwidth = workers["mlb"].ask("bandwidth")
    size = case.mlb.stat().st_size
    print(f"\n{case.name}, {n_threads} threads: {size / 1e6:.0f} MB; memory read at {bandwidth / 1e9:.1f} GB/s")
    if "llama" in workers:
        facts = workers["llama"].facts
        print(f"llama-cpp-python {facts['version']}: {facts['system_info']}")
    rows = show(measure(workers, rounds), size, bandwidth)
    memory = {engine: worker.ask("memory") for engine, worker in workers.items()}
    print("anonymous memory: " + ", ".join(f"{engine} {n / 1e6:.0f} MB" for engine, n in memory.items()), flush=True)
    for worker in workers.values():
        worker.close()
    return {"model": case.name, "threads": n_threads, "bandwidth": bandwidth, "memory": memory, "rows": rows}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen2.5-0.5b,smollm2-135m,qwen3-1.7b,qwen3.5-0.8b", help=", ".join(SHAPES))
    parser.add_argument("--models", default="", help="real .mlb files to be timed as well")
    parser.add_argument("--wtypes", default="q4,q8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama", default=os.environ.get("MLB_BENCH_LLAMA", sys.executable), metavar="PYTHON")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-out"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.out.mkdir(exist_ok=True)
    llama = options.llama if has_llama(options.llama) else None
    if llama is None:
        print(NO_LLAMA)
    wtypes = options.wtypes.split(",")
    cases = [
        shape_case(name, wtype, options.out) for name in filter(None, options.shapes.split(",")) for wtype in wtypes
    ]
    cases += [file_case(Path(path), options.out) for path in filter(None, options.models.split(","))]
    results = []
    for case in cases:
        for n_threads in options.threads.split(","):
            results.append(bench(case, int(n_threads), llama, options.rounds))
            (options.out / "bench.json").write_text(json.dumps(results, indent=2))
        seconds = start_seconds(case.mlb)
        print(f"{case.name}: first token of `mlb run` after {seconds[len(seconds) // 2]:.2f} s (best {seconds[0]:.2f})")


if __name__ == "__main__":
    main()
