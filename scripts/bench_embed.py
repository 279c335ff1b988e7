"""Speed of LEMB models and of the index, on random weights in the shape of the specification's section 9.

Usage: python scripts/bench_embed.py [--threads 1,2] [--rounds N] [--texts N] [--rows N] [-o DIR]

Side by side, in one process for each number of threads, taking turns in each of --rounds rounds:

- `batches`: texts of 20 tokens to embeddings of full width, tokenizing included; a new embedder each time, so that no
  word is known beforehand. torch runs the same weights in float32 (no codes, batches of equal length) behind the
  `tokenizers` library; for the static model, model2vec too, where it is installed.
- `one text`: a text alone, words new.
- `load`: opening the file (5 MB), its SHA-256 included, until the first text can come.
- `search`: the 10 best of --rows rows in memory, beside NumPy's float32 product and partition.

Medians and the best are shown; --texts 0 or --rows 0 leaves a part out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from krafla_cli.embed.embedder import Embedder

VOCAB, D_MODEL, N_HEADS, FFN_DIM, OUTPUT_DIM, N_LAYERS = 32000, 256, 4, 1024, 384, 2
WORDS_PER_TEXT = 18  # and [CLS] and [SEP]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SYLLABLES = "ka le mi ra ne to su ev bir ler lar da de yor mak in an ol gel git çok şu ö ü".split()
SINGLES = 100


def vocabulary() -> tuple[str, ...]:
    """Special tokens and distinct made-up words, a third of them continuing pieces."""
    import numpy as np

    rng = np.random.default_rng(0)
    words: dict[str, None] = {}
    while len(words) < VOCAB - len(SPECIAL):
        word = "".join(rng.choice(SYLLABLES, rng.integers(1, 5)))
        words["##" + word if rng.random() < 1 / 3 else word] = None
    return (*SPECIAL, *words)


def write_model(path: Path, n_layers: int) -> None:
    """A model with random codes: int4 rows and, with layers, ternary weights."""
    import numpy as np

    from krafla_cli.formats import lemb
    from krafla_cli.formats.lemb_codes import pack_int4, pack_ternary
    from krafla_cli.formats.lemb_layout import Header, TokenizerConfig, tensors

    header = Header(
        embedding_quant=2,
        weight_quant=1 if n_layers else 0,
        vocab_size=VOCAB,
        d_model=D_MODEL,
        n_layers=n_layers,
        n_heads=N_HEADS,
        ffn_dim=FFN_DIM,
        output_dim=OUTPUT_DIM,
        max_seq_len=128,
        n_matryoshka=3,
        flags=0,
        matryoshka_dims=(64, 128, 256, 0, 0, 0, 0, 0),
        license_id=0,
        version_minor=0,
        version_patch=0,
        model_id=b"bench".ljust(16, b"\0"),
    )
    rng = np.random.default_rng(1)

    def array(name: str, encoding: str, shape: tuple[int, ...]) -> Any:
        if encoding == "int4":
            return pack_int4(rng.integers(-7, 8, shape).astype(np.int8))
        if encoding == "ternary":
            return pack_ternary(rng.integers(-1, 2, shape).astype(np.int8))
        if name.endswith((".scale", ".scales")):
            return np.full(shape, 12 if name.endswith(".scale") else 0.1, np.float32)
        if "ln" in name and name.endswith("weight"):
            return np.ones(shape, np.float32)
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    arrays = {s.name: array(s.name, s.encoding, s.shape) for s in tensors(header)}
    ids = TokenizerConfig(pad_token_id=0, unk_token_id=1, cls_token_id=2, sep_token_id=3, mask_token_id=4)
    lemb.write(path, lemb.LembModel(header, vocabulary(), ids, arrays), force=True)


def make_texts(n: int) -> list[str]:
    """Texts of WORDS_PER_TEXT whole words each; words as frequent as in language (Zipf's law)."""
    import numpy as np

    rng = np.random.default_rng(2)
    words = np.array([w for w in vocabulary()[len(SPECIAL) :] if not w.startswith("##")])
    weights = 1 / np.arange(1, len(words) + 1)
    chosen = rng.choice(len(words), (n, WORDS_PER_TEXT), p=weights / weights.sum())
    return [" ".join(words[row]) for row in chosen]


class TorchModel:
    """The forward pass of section 6 with plain float32 weights, for texts of one length."""

    def __init__(self, path: Path, n_threads: int) -> None:
        import numpy as np
        import torch

        from krafla_cli.embed.wordpiece import TextEncoder
        from krafla_cli.formats import lemb
        from krafla_cli.formats.lemb_codes import unpack_int4, unpack_ternary

        torch.set_num_threads(n_threads)
        model = lemb.read(path)
        self.tokenizer = TextEncoder(model).library
        self.n_layers = model.header.n_layers
        self.w: dict[str, Any] = {}
        for name, stored in model.arrays.items():
            values: Any = np.array(stored)
            if name == "embedding.weight":
                values = unpack_int4(values).astype(np.float32) * model.arrays["embedding.scales"][:, None]
            elif values.dtype == np.uint8:
                values = unpack_ternary(values).astype(np.float32) / model.arrays[name.replace("weight", "scale")]
            self.w[name] = torch.from_numpy(np.ascontiguousarray(values, np.float32))

    def embed(self, texts: list[str], batch: int = 64) -> Any:
        import torch

        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = torch.tensor([[2, *e.ids, 3] for e in encoded])
        with torch.inference_mode():
            return torch.cat([self.forward(part) for part in torch.split(ids, batch)]).numpy()

    def forward(self, ids: Any) -> Any:
        import torch.nn.functional as F  # noqa: N812

        w = self.w
        x = w["embedding.weight"][ids]
        for i in range(self.n_layers):
            p = f"layers.{i}."
            h = self._norm(x, f"{p}ln1")
            q, k, v = (
                F.linear(h, w[f"{p}attn.{m}.weight"]).view(*ids.shape, N_HEADS, -1).transpose(1, 2) for m in "qkv"
            )
            a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + F.linear(a, w[f"{p}attn.out.weight"], w[f"{p}attn.out.bias"])
            f = F.gelu(F.linear(self._norm(x, f"{p}ln2"), w[f"{p}ffn.up.weight"], w[f"{p}ffn.up.bias"]))
            x = x + F.linear(f, w[f"{p}ffn.down.weight"], w[f"{p}ffn.down.bias"])
        pooled = self._norm(x, "final_ln").mean(dim=1)
        return F.normalize(F.linear(pooled, w["projection.weight"], w["projection.bias"]))

    def _norm(self, x: Any, name: str) -> Any:
        import torch.nn.functional as F  # noqa: N812

        return F.layer_norm(x, [D_MODEL], self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-5)


def model2vec_of(path: Path) -> Any:
    """The static model's table as a model of model2vec; None where that is not installed."""
    try:
        from model2vec import StaticModel
    except ImportError:
        return None
    torch_model = TorchModel(path, 1)
    return StaticModel(torch_model.w["embedding.weight"].numpy(), torch_model.tokenizer)


def seconds(work: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def embed(embedder: Embedder, texts: list[str]) -> None:
    """As ``mlb embed -f`` does it."""
    for _ in embedder.embed_chunks(texts[i : i + 4096] for i in range(0, len(texts), 4096)):
        pass


Times = dict[str, dict[str, list[float]]]  # work -> engine -> seconds


def measure_models(folder: Path, n_threads: int, n_texts: int, rounds: int) -> Times:
    """All but the search."""
    from krafla_cli.embed.embedder import open_embedder

    times: Times = {}
    for kind, n in (("transformer", n_texts), ("static", 8 * n_texts)):
        path, texts = folder / f"{kind}.bin", make_texts(n + SINGLES)
        torch_model = TorchModel(path, n_threads)
        distilled = model2vec_of(path) if kind == "static" else None
        open_embedder(path, n_threads).embed(texts[:64])  # kernels, caches, clocks
        torch_model.embed(texts[:64])
        for _ in range(rounds):
            embedder = open_embedder(path, n_threads)
            engines: dict[str, Callable[[list[str]], Any]] = {
                "mlb": partial(embed, embedder),
                "torch": torch_model.embed,
            }
            if distilled is not None:
                engines["model2vec"] = partial(distilled.encode, use_multiprocessing=False)
            for engine, run in engines.items():
                add(times, f"{kind}: {n} texts", engine, seconds(run, texts[:n]))
                for text in texts[n:]:
                    add(times, f"{kind}: one text", engine, seconds(run, [text]))
            add(times, f"{kind}: load", "mlb", seconds(open_embedder, path, n_threads))
            add(times, f"{kind}: load", "torch", seconds(TorchModel, path, n_threads))
    return times


def add(times: Times, work: str, engine: str, value: float) -> None:
    times.setdefault(work, {}).setdefault(engine, []).append(value)


def measure_search(n_threads: int, n_rows: int, rounds: int) -> Times:
    """Searches of float32 and int8 rows."""
    import numpy as np

    from krafla_cli.embed.index import quantized
    from krafla_cli.embed.search import Searcher, top_rows
    from krafla_cli.formats.index_folder import INDEX_VERSION, IndexFolder, Manifest

    times: Times = {}
    for dims in (128, 384):
        rng = np.random.default_rng(3)
        rows = rng.standard_normal((n_rows, dims), dtype=np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        parts = [quantized(rows[i : i + 10000]) for i in range(0, n_rows, 10000)]
        codes, scales = (np.concatenate(part) for part in zip(*parts, strict=True))
        for dtype, vectors in (("float32", rows), ("int8", codes)):
            manifest = Manifest(INDEX_VERSION, "m", "1.0.0", dims, 0, False, "0" * 64, "", dtype, n_rows)
            index = IndexFolder(Path(), manifest, vectors, scales, np.zeros(n_rows + 1, np.int64), memoryview(b""))
            searcher, work = Searcher(index, n_threads), f"search {n_rows} x {dims}, {dtype}"

            def search(query: Any, searcher: Searcher = searcher) -> Any:
                return top_rows(searcher.scores(query), 10)

            def numpy_search(query: Any, rows: Any = rows) -> Any:
                scores = rows @ query
                best = np.argpartition(-scores, 10)[:10]
                return best[np.argsort(-scores[best])]

            for query in rng.standard_normal((2 + 3 * rounds, dims), dtype=np.float32):
                add(times, work, "mlb", seconds(search, query))
                if dtype == "float32":
                    add(times, work, "numpy", seconds(numpy_search, query))
    return times


def show(times: Times) -> None:
    for work, engines in times.items():
        n = int(work.split()[1]) if work.endswith("texts") else 1
        shown = []
        for engine, values in engines.items():
            middle, best = statistics.median(values), min(values)
            figures = (
                f"{n / middle:.0f}/s (best {n / best:.0f})"
                if n > 1
                else f"{1e3 * middle:.2f} ms (best {1e3 * best:.2f})"
            )
            ratio = f", {middle / statistics.median(engines['mlb']):.2f} x mlb's time" if engine != "mlb" else ""
            shown.append(f"{engine} {figures}{ratio}")
        print(f"{work:34} {'; '.join(shown)}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.out.mkdir(exist_ok=True)
    if options.worker:
        times = measure_models(options.out, options.worker, options.texts, options.rounds) if options.texts else {}
        if options.rows:
            times |= measure_search(options.worker, options.rows, options.rounds)
        (options.out / f"bench-embed-{options.worker}.json").write_text(json.dumps(times))
        show(times)
        return
    for kind, n_layers in (("transformer", N_LAYERS), ("static", 0)):
        write_model(options.out / f"{kind}.bin", n_layers)
    for n_threads in options.threads.split(","):
        print(f"\nLEMB, {n_threads} threads:", flush=True)
        # Libraries read these when they are imported: a process for each number of threads.
        numbers = {"RAYON_NUM_THREADS": n_threads, "OPENBLAS_NUM_THREADS": n_threads, "OMP_NUM_THREADS": n_threads}
        command = [sys.executable, __file__, "--worker", n_threads, "--rounds", str(options.rounds)]
        command += ["--texts", str(options.texts), "--rows", str(options.rows), "-o", str(options.out)]
        subprocess.run(command, env={**os.environ, **numbers}, check=True)


if __name__ == "__main__":
    main()
