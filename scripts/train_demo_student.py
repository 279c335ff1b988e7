"""Trains the demo student: a small English and Turkish sentence embedding model with ternary weights.

    python scripts/train_demo_student.py -o tests/data/student

Needs some minutes on one CPU core. Sentences and their paraphrases come from sentence_grammar.py. The student is
trained through its quantizers (straight-through gradients), with a contrastive loss at each Matryoshka width. The
script prints how often the nearest of some hundred held-out sentences is the paraphrase (recall@1), beside the
untrained student.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sentence_grammar import LANGUAGES, Meaning, near_miss, paraphrase, random_meaning
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD_ID = CONTROL_TOKENS.index("[PAD]")
LETTERS = "abcçdefgğhıijklmnoöpqrsştuüvwxyzâîûABCÇDEFGĞHIİJKLMNOÖPQRSŞTUÜVWXYZ0123456789"
EPS = 1e-5  # of every layer norm, and the floor under every scale


@dataclass(frozen=True)
class StudentConfig:
    """The shape of a student, as config.json holds it."""

    vocab_size: int = 3000
    d_model: int = 64
    n_layers: int = 2
    n_heads: int = 4
    ffn_dim: int = 256
    output_dim: int = 128
    max_seq_len: int = 64
    matryoshka_dims: tuple[int, ...] = (32, 64)


@dataclass(frozen=True)
class Recipe:
    """How the student is trained and tested. A family is a meaning with its near misses: one slot differs."""

    steps: int = 1600
    warmup_steps: int = 100
    families_per_batch: int = 24
    family_size: int = 4
    learning_rate: float = 4e-3
    temperature: float = 0.05
    tokenizer_meanings: int = 20_000
    held_out_families: int = 100
    seed: int = 20240
    held_out_seed: int = 7


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded` with the gradient of `x`; exact, since the difference of the two is."""
    return x + (rounded - x).detach()


class BitLinear(nn.Linear):
    """A linear layer with int8 activations and ternary weights (section 6.3 of the LEMB specification)."""

    def forward(self, x: Tensor) -> Tensor:
        x_norm = functional.layer_norm(x, x.shape[-1:], eps=EPS)
        x_scale = 128.0 / x_norm.abs().amax(-1, keepdim=True).clamp(min=EPS)
        scale = 1.0 / self.weight.detach().abs().median().clamp(min=EPS)
        x_codes = straight_through(x_norm * x_scale, (x_norm * x_scale).round().clamp(-128, 127))
        codes = straight_through(self.weight * scale, (self.weight * scale).round().clamp(-1, 1))
        # The bias is added before the scales are taken out again.
        return functional.linear(x_codes, codes, self.bias) / (scale * x_scale)


class Attention(nn.Module):
    """Attention over the tokens of a sentence, without positions."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.q = BitLinear(config.d_model, config.d_model, bias=False)
        self.k = BitLinear(config.d_model, config.d_model, bias=False)
        self.v = BitLinear(config.d_model, config.d_model, bias=False)
        self.out = BitLinear(config.d_model, config.d_model)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        """x: [sentences, tokens, d_model]; is_token: [sentences, tokens], false for padding."""
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=is_token[:, None, None, :])
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """Two ternary layers with the exact GELU in between."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.up = BitLinear(config.d_model, config.ffn_dim)
        self.down = BitLinear(config.ffn_dim, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each behind a layer norm and added to its input."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.d_model, eps=EPS)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.d_model, eps=EPS)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x), is_token)
        out: Tensor = x + self.ffn(self.ln2(x))
        return out


class Student(nn.Module):
    """The model; the names of its parameters are the tensor names of the checkpoint."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.final_ln = nn.LayerNorm(config.d_model, eps=EPS)
        self.projection = nn.Linear(config.d_model, config.output_dim)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [sentences, tokens], padded with PAD_ID -> [sentences, output_dim], not normalized."""
        is_token = ids != PAD_ID
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, is_token)
        weight = is_token[..., None] / is_token.sum(1)[:, None, None]
        out: Tensor = self.projection((self.final_ln(x) * weight).sum(1))
        return out


def train_tokenizer(config: StudentConfig, recipe: Recipe) -> Tokenizer:
    """A cased WordPiece tokenizer (lower-casing Turkish needs rules of its own) that knows every letter."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocab_size, special_tokens=CONTROL_TOKENS, show_progress=False
    )
    rng = random.Random(recipe.seed)
    meanings = (random_meaning(rng) for _ in range(recipe.tokenizer_meanings))
    sentences = [paraphrase(meaning, language, rng) for meaning in meanings for language in LANGUAGES]
    tokenizer.train_from_iterator(sentences + [2 * letter for letter in LETTERS], trainer)
    cls, sep = (CONTROL_TOKENS.index(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    return tokenizer


def encode(tokenizer: Tokenizer, sentences: list[str]) -> Tensor:
    """Ids of the sentences, [sentences, tokens of the longest], padded with PAD_ID."""
    rows = [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(sentences)]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)


def family(size: int, rng: random.Random) -> list[Meaning]:
    """A random meaning and its near misses, all different."""
    members = [random_meaning(rng)]
    while len(members) < size:
        member = near_miss(members[0], rng)
        if member not in members:
            members.append(member)
    return members


def batches(tokenizer: Tokenizer, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs of id matrices: row i of both says the same, each in a language of its own."""
    rng = random.Random(recipe.seed + 1)
    while True:
        meanings = [m for _ in range(recipe.families_per_batch) for m in family(recipe.family_size, rng)]
        sides = [[paraphrase(m, rng.choice(LANGUAGES), rng) for m in meanings] for _ in range(2)]
        yield encode(tokenizer, sides[0]), encode(tokenizer, sides[1])


def contrastive_loss(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding row i of `b` for row i of `a`, and the other way round."""
    scores = functional.normalize(a, dim=-1) @ functional.normalize(b, dim=-1).T / temperature
    target = torch.arange(len(a))
    return (functional.cross_entropy(scores, target) + functional.cross_entropy(scores.T, target)) / 2


def widths(config: StudentConfig) -> list[int]:
    """The Matryoshka widths, and the full one."""
    return sorted({*config.matryoshka_dims, config.output_dim})


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def train(student: Student, config: StudentConfig, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Trains the student in place."""
    from tqdm import tqdm

    optimizer = torch.optim.AdamW(student.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, recipe))
    pairs = batches(tokenizer, recipe)
    for _ in (bar := tqdm(range(recipe.steps), unit="step", disable=None)):
        a, b = (student(ids) for ids in next(pairs))
        losses = [contrastive_loss(a[:, :width], b[:, :width], recipe.temperature) for width in widths(config)]
        loss = torch.stack(losses).mean()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")


def recall_at_1(queries: Tensor, answers: Tensor) -> float:
    """Share of the rows of `queries` whose nearest row of `answers`, by cosine, is the one with the same number."""
    nearest = (functional.normalize(queries, dim=-1) @ functional.normalize(answers, dim=-1).T).argmax(1)
    return (nearest == torch.arange(len(queries))).float().mean().item()


Embed = Callable[[list[str]], Tensor]


def held_out_recall(embed: Embed, recipe: Recipe, dims: list[int]) -> dict[str, list[float]]:
    """Recall@1 at each width, for paraphrases in the same language and across; keys "en-en", "en-tr", "tr-tr"."""
    rng = random.Random(recipe.held_out_seed)
    meanings = [m for _ in range(recipe.held_out_families) for m in family(recipe.family_size, rng)]
    recalls = {}
    for pair in ("en-en", "en-tr", "tr-tr"):
        a, b = (embed([paraphrase(m, language, rng) for m in meanings]) for language in pair.split("-"))
        recalls[pair] = [recall_at_1(a[:, :width], b[:, :width]) for width in dims]
    return recalls


def embedder(student: Student, tokenizer: Tokenizer) -> Embed:
    """Texts -> [texts, output_dim]."""

    def embed(texts: list[str]) -> Tensor:
        with torch.no_grad():
            out: Tensor = student(encode(tokenizer, texts))
        return out

    return embed


def save_checkpoint(folder: Path, student: Student, config: StudentConfig, tokenizer: Tokenizer) -> None:
    """Writes config.json, model.safetensors (float16) and tokenizer.json."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
    weights = {name: tensor.to(torch.float16).contiguous() for name, tensor in student.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))


def load_student(folder: Path) -> Student:
    """The student of a folder that `save_checkpoint` wrote."""
    from safetensors.torch import load_file

    student = Student(StudentConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8"))))
    student.load_state_dict(load_file(folder / "model.safetensors"))
    return student.eval()


def report(folder: Path, untrained: dict[str, list[float]], tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Reads the checkpoint back and prints its recall beside that of the untrained student."""
    dims = widths(StudentConfig())
    trained = held_out_recall(embedder(load_student(folder), tokenizer), recipe, dims)
    n_sentences = recipe.held_out_families * recipe.family_size
    print(f"bytes {sum(path.stat().st_size for path in folder.iterdir()):,}")
    print(f"recall@1 of the paraphrase among {n_sentences} held-out sentences, untrained -> trained")
    print("languages " + "".join(f"{f'{width} dims':>18}" for width in dims))
    for pair, recalls in trained.items():
        columns = [f"{before:.3f} -> {after:.3f}" for before, after in zip(untrained[pair], recalls, strict=True)]
        print(f"{pair:10}" + "".join(f"{column:>18}" for column in columns))


def main() -> int:
    """Trains, saves, measures."""
    parser = argparse.ArgumentParser(description="Trains the demo student (English and Turkish sentence embeddings).")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--force", action="store_true", help="write into a folder that has files already")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    args = parser.parse_args()
    if args.output.exists() and any(args.output.iterdir()) and not args.force:
        parser.error(f"{args.output} has files already; --force overwrites them")

    torch.set_num_threads(args.threads)
    recipe, config = Recipe(), StudentConfig()
    tokenizer = train_tokenizer(config, recipe)
    torch.manual_seed(recipe.seed)
    student = Student(config)
    untrained = held_out_recall(embedder(student, tokenizer), recipe, widths(config))
    train(student, config, tokenizer, recipe)
    save_checkpoint(args.output, student, config, tokenizer)
    report(args.output, untrained, tokenizer, recipe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
