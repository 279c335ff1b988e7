"""The committed demo checkpoint: what is in the folder, and that it is as good as scripts/train_demo.py says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import train_demo
import transformers
from safetensors import safe_open
from story_grammar import exchange, turn
from tokenizers import Tokenizer

DEMO = Path(__file__).parents[1] / "data" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEMO / name).read_text(encoding="utf-8"))
    return content


def test_folder_holds_a_hugging_face_checkpoint_under_4_mb() -> None:
    assert {path.name for path in DEMO.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 4_000_000


def test_sizes_fit_the_model_format() -> None:
    config = read_json("config.json")
    q_dim = config["num_attention_heads"] * config["head_dim"]
    assert config["model_type"] == "qwen3"
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert [size % 32 for size in (config["hidden_size"], config["intermediate_size"], q_dim)] == [0, 0, 0]


def test_weights_are_finite_bfloat16_and_about_a_million() -> None:
    n_weights = 0
    with safe_open(DEMO / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            tensor = file.get_tensor(name)
            assert str(tensor.dtype) == "torch.bfloat16"
            assert tensor.isfinite().all()
            n_weights += tensor.numel()
    assert 800_000 < n_weights < 1_300_000


def test_tokenizer_and_model_agree_on_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"]
    assert read_json("generation_config.json")["eos_token_id"] == [
        tokenizer.token_to_id("<|im_end|>"),
        tokenizer.token_to_id("<|endoftext|>"),
    ]


def test_tokenizer_decodes_what_it_encodes(tokenizer: Tokenizer) -> None:
    text = "Tell me a story!\n\n  naïve 日本 🦊 12345 \t'LL"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_chat_template_writes_the_texts_that_the_model_was_trained_on() -> None:
    transformers = pytest.importorskip("transformers")
    messages = [
        {"role": "system", "content": "You are a friendly storyteller."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello!"},
    ]
    rendered = transformers.AutoTokenizer.from_pretrained(DEMO).apply_chat_template(messages, tokenize=False)
    assert rendered == turn("system", "You are a friendly storyteller.") + exchange("Hi!", "Hello!")


def test_perplexity_is_within_1_3_of_the_grammars_own(model: Any, tokenizer: Tokenizer) -> None:
    perplexity = train_demo.measure_perplexity(model, tokenizer, train_demo.held_out_texts(12, seed=11))
    assert 1.1 < perplexity.bound < 1.4
    assert 1.0 < perplexity.ratio < 1.3


def test_a_story_about_a_fox_is_about_a_fox_and_ends(model: Any, tokenizer: Tokenizer) -> None:
    prompt = turn("user", "Tell me a story about a fox.") + "<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=300)[0].tolist()
    story = tokenizer.decode(out[ids.shape[1] :])
    assert out[-1] == tokenizer.token_to_id("<|im_end|>")
    assert " fox " in story
    assert story.count("\n\n") == 2
