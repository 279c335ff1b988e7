"""One engine in a process of its own, told what to time by lines of JSON: `bench.py` runs two of them in turns.

Usage: bench_worker.py mlb|llama MODEL THREADS CONTEXT. It answers {"ready": facts}, then each request with its result:
{"do": "prefill", "n": 256} from an empty context -> seconds; {"do": "decode", "n": 16} -> seconds of each token;
{"do": "bandwidth"} -> bytes a second that THREADS threads read of the model; {"do": "memory"} -> bytes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 40000  # ids are taken below it


class MlbRunner:
    """The fast engine of this package."""

    def __init__(self, path: str, n_threads: int, n_ctx: int) -> None:
        from krafla_cli.formats.mlb_file import open_mlb
        from krafla_cli.runtime.engine import EngineOptions
        from krafla_cli.runtime.fast import FastEngine

        started = time.perf_counter()
        before = anonymous_bytes()
        model = open_mlb(path)
        self.data = np.frombuffer(model.data, np.uint8)
        self.n_threads = n_threads
        self.engine = FastEngine(model, EngineOptions(n_ctx, threads=n_threads))
        self.facts = {"opened_s": time.perf_counter() - started, "kv": self.engine.kv}
        self._before = before

    def run(self, ids: list[int]) -> None:
        self.engine.forward(ids, "last")

    def clear(self) -> None:
        self.engine.reset()

    def memory(self) -> int:
        """Anonymous memory since the imports: cache, activations, scratch."""
        return anonymous_bytes() - self._before

    def bandwidth(self) -> float:
        """Bytes a second of reading the mapped model front to back, each thread its part; the best of 3 passes."""
        words = self.data[: len(self.data) // 8 * 8].view(np.int64)
        parts = np.array_split(words, self.n_threads)
        best = 0.0
        for _ in range(3):
            threads = [threading.Thread(target=np.bitwise_xor.reduce, args=(part,)) for part in parts]
            started = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            best = max(best, words.nbytes / (time.perf_counter() - started))
        return best


class LlamaRunner:
    """llama.cpp through the low-level API of llama-cpp-python, its defaults but for the number of threads."""

    def __init__(self, path: str, n_threads: int, n_ctx: int) -> None:
        import llama_cpp as api

        @api.llama_log_callback  # type: ignore[untyped-decorator]
        def ignore(*_: Any) -> None:
            pass

        self._ignore = ignore
        api.llama_log_set(ignore, None)
        api.llama_backend_init()
        self.api, before = api, anonymous_bytes()
        started = time.perf_counter()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, n_ctx, 512
        options.n_threads = options.n_threads_batch = n_threads
        self.context = api.llama_init_from_model(self.model, options)
        system = " ".join(api.llama_print_system_info().decode().split())
        self.facts = {"opened_s": time.perf_counter() - started, "version": api.__version__, "system_info": system}
        self._before = before

    def run(self, ids: list[int]) -> None:
        tokens = (self.api.llama_token * len(ids))(*ids)
        batch = self.api.llama_batch_get_one(tokens, len(ids))
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        self.api.llama_get_logits_ith(self.context, -1)

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def memory(self) -> int:
        return anonymous_bytes() - self._before

    def bandwidth(self) -> float:
        raise RuntimeError("measured by the other runner")


def anonymous_bytes() -> int:
    """Anonymous memory of this process in bytes (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def prefill(runner: Any, n: int) -> float:
    runner.clear()
    ids = [(7 * i + 11) % VOCAB for i in range(n)]
    started = time.perf_counter()
    runner.run(ids)
    return time.perf_counter() - started


def decode(runner: Any, n: int) -> list[float]:
    times = []
    for i in range(n):
        started = time.perf_counter()
        runner.run([(13 * i + 5) % VOCAB])
        times.append(time.perf_counter() - started)
    return times


def main() -> None:
    kind, path, n_threads, n_ctx = sys.argv[1:]
    runners: dict[str, Any] = {"mlb": MlbRunner, "llama": LlamaRunner}
    runner = runners[kind](path, int(n_threads), int(n_ctx))
    actions: dict[str, Callable[..., Any]] = {
        "prefill": lambda n: prefill(runner, n),
        "decode": lambda n: decode(runner, n),
        "bandwidth": runner.bandwidth,
        "memory": runner.memory,
    }
    print(json.dumps({"ready": runner.facts}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(actions[request.pop("do")](**request)), flush=True)


if __name__ == "__main__":
    main()
