"""Trains the demo checkpoint: a Qwen3-shaped language model of about a million parameters that tells animal stories.

    python scripts/train_demo.py -o tests/data/demo

Needs the development extras (transformers) and some minutes on one CPU core. The texts come from the grammar in
story_grammar.py, which also gives the exact probability of each held-out text, and with it the perplexity that no model
can beat; the script prints that bound beside the model's perplexity. The result has the Hugging Face layout.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from story_grammar import END_OF_TEXT, STORY_GRAMMAR, TURN_END, TURN_START

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

CONTROL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(len(CONTROL_TOKENS))

# The pre-tokenizer regex of Qwen2, 2.5 and 3.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

TOKENIZER_SETTINGS: dict[str, Any] = {
    "add_bos_token": False,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": TURN_END,
    "pad_token": END_OF_TEXT,
    "tokenizer_class": "PreTrainedTokenizerFast",
}

GENERATION_SETTINGS: dict[str, Any] = {
    "do_sample": True,
    "eos_token_id": [TURN_END_ID, END_OF_TEXT_ID],
    "pad_token_id": END_OF_TEXT_ID,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.95,
}


@dataclass(frozen=True)
class Recipe:
    """Sizes of the model and of its training.

    Rows grow during training, (tokens, share of the steps): a model learns to copy names within some hundred steps
    where they are a few tokens apart, and then does it over a long text too; with long rows alone, it takes far longer.
    """

    vocab_size: int = 1024
    tokenizer_texts: int = 6000
    context: int = 512
    row_stages: tuple[tuple[int, float], ...] = ((48, 0.3), (128, 0.3), (512, 0.4))
    batch_tokens: int = 2048
    steps: int = 500
    warmup_steps: int = 20
    matrix_learning_rate: float = 0.02
    other_learning_rate: float = 0.004
    weight_decay: float = 0.1
    held_out_texts: int = 200
    seed: int = 20240
    held_out_seed: int = 7


@dataclass(frozen=True)
class Perplexity:
    """Per predicted token: the model's perplexity and the grammar's, which is the lowest that any model can reach."""

    model: float
    bound: float

    @property
    def ratio(self) -> float:
        """How many times the bound the model's perplexity is."""
        return self.model / self.bound


def train_tokenizer(recipe: Recipe) -> Tokenizer:
    """A byte-level BPE tokenizer in the pipeline of Qwen3: NFC, split by regex, bytes, merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(recipe.seed)
    tokenizer.train_from_iterator((STORY_GRAMMAR.generate(rng, "text") for _ in range(recipe.tokenizer_texts)), trainer)
    return tokenizer


def model_config(recipe: Recipe, vocab_size: int) -> Any:
    """A Qwen3Config of about a million parameters, whose head size is not hidden_size / heads."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=END_OF_TEXT_ID,
        use_cache=True,
    )


def training_rows(row_tokens: int, rng: random.Random, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Endless rows of `row_tokens + 1` ids: a row begins with a text, and further ones follow until it is full."""
    while True:
        row: list[int] = []
        while len(row) <= row_tokens:
            row += tokenizer.encode(STORY_GRAMMAR.generate(rng, "text") + END_OF_TEXT).ids
        yield row[: row_tokens + 1]


def training_batches(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """One matrix of ids for each step, [rows, tokens + 1]."""
    import torch

    rng = random.Random(recipe.seed + 1)
    for row_tokens, share in recipe.row_stages:
        rows = training_rows(row_tokens, rng, tokenizer)
        for _ in range(round(share * recipe.steps)):
            yield torch.tensor([next(rows) for _ in range(recipe.batch_tokens // row_tokens)])


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def make_optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    import torch
    from muon import Muon

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    return [
        Muon(matrices, lr=recipe.matrix_learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.other_learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train_model(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    """A trained Qwen3ForCausalLM, float32."""
    import torch
    from torch.optim.lr_scheduler import LambdaLR
    from tqdm import tqdm
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    model: Any = Qwen3ForCausalLM(model_config(recipe, tokenizer.get_vocab_size()))
    optimizers = make_optimizers(model, recipe)
    schedules = [LambdaLR(optimizer, lambda step: learning_rate_factor(step, recipe)) for optimizer in optimizers]
    bar = tqdm(training_batches(recipe, tokenizer), total=recipe.steps, unit="step", disable=None)
    for ids in bar:
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval()


def held_out_texts(n_texts: int, seed: int) -> list[str]:
    """Conversations drawn with a seed of their own."""
    rng = random.Random(seed)
    return [STORY_GRAMMAR.generate(rng, "conversation") for _ in range(n_texts)]


def measure_perplexity(model: Any, tokenizer: Tokenizer, texts: list[str]) -> Perplexity:
    """Perplexity of the model on `texts`, each with its end-of-text token, and the grammar's on the same tokens.

    Conversations all begin with the same token, so the model, which predicts every token but that one, and the
    grammar account for the same choices.
    """
    import torch

    n_tokens, model_nats = 0, 0.0
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text + END_OF_TEXT).ids])
        with torch.no_grad():
            logits = model(input_ids=ids[:, :-1]).logits.float()
        model_nats += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        n_tokens += ids.shape[1] - 1
    grammar_nats = -sum(STORY_GRAMMAR.log_probability(text, "conversation") for text in texts)
    return Perplexity(model=math.exp(model_nats / n_tokens), bound=math.exp(grammar_nats / n_tokens))


def save_checkpoint(folder: Path, model: Any, tokenizer: Tokenizer) -> None:
    """Writes the folder in the Hugging Face layout, weights in bfloat16."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    context = model.config.max_position_embeddings
    write_json(folder / "tokenizer_config.json", TOKENIZER_SETTINGS | {"model_max_length": context})
    write_json(folder / "generation_config.json", GENERATION_SETTINGS)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes indented JSON with keys in order."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def report(folder: Path, tokenizer: Tokenizer, recipe: Recipe) -> Perplexity:
    """Reads the checkpoint back and prints what it reaches on held-out texts."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = held_out_texts(recipe.held_out_texts, recipe.held_out_seed)
    perplexity = measure_perplexity(model, tokenizer, texts)
    n_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"parameters          {sum(p.numel() for p in model.parameters()):,}")
    print(f"bytes               {n_bytes:,}")
    print(f"perplexity          {perplexity.model:.4f} on {len(texts)} held-out conversations")
    print(f"bound               {perplexity.bound:.4f} (the grammar's own)")
    print(f"ratio               {perplexity.ratio:.4f}")
    return perplexity


def main() -> int:
    """Trains, saves, measures; exit code 1 where the perplexity is above 1.3 times the bound."""
    parser = argparse.ArgumentParser(description="Trains the demo checkpoint (a small Qwen3-shaped storyteller).")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--force", action="store_true", help="write into a folder that has files already")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    args = parser.parse_args()
    if args.output.exists() and any(args.output.iterdir()) and not args.force:
        parser.error(f"{args.output} has files already; --force overwrites them")

    import torch

    torch.set_num_threads(args.threads)
    recipe = Recipe()
    tokenizer = train_tokenizer(recipe)
    save_checkpoint(args.output, train_model(recipe, tokenizer), tokenizer)
    return 0 if report(args.output, tokenizer, recipe).ratio <= 1.3 else 1


if __name__ == "__main__":
    sys.exit(main())
