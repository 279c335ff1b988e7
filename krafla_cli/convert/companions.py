"""What lies beside the weights of a Hugging Face folder: chat template, stop ids, sampling defaults, special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.sources.folder import file_in
from krafla_cli.errors import FileError, FormatError, os_reason
from krafla_cli.formats.json_file import read_json_object
from krafla_cli.formats.sidecar import is_sampling_value
from krafla_cli.formats.text import printable

if TYPE_CHECKING:
    import tokenizers

_MAX_BYTES = 64 << 20
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Companions:
    """The documents of a folder that are not weights; empty where the file does not exist."""

    generation: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    chat_template: str | None


def read_companions(folder: Path) -> Companions:
    """generation_config.json, tokenizer_config.json, and the chat template. Raises FileError, FormatError."""
    tokenizer = _optional_json(folder, "tokenizer_config.json")
    return Companions(_optional_json(folder, "generation_config.json"), tokenizer, _chat_template(folder, tokenizer))


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    path = file_in(folder, name)
    return read_json_object(path, _MAX_BYTES) if path.exists() else {}


def _chat_template(folder: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """chat_template.jinja goes before the template inside tokenizer_config.json, as in transformers."""
    path = file_in(folder, "chat_template.jinja")
    if path.exists():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = os_reason(error) if isinstance(error, OSError) else "not UTF-8"
            raise FileError(f"cannot read {printable(str(path))}: {reason}") from error
    template = tokenizer.get("chat_template")
    if template is None:
        template = _optional_json(folder, "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise FormatError(f"{printable(str(folder))}: tokenizer_config.json: chat_template must be text")
    return template


def special_tokens(companions: Companions) -> dict[str, str]:
    """The texts of bos_token, eos_token, pad_token and unk_token, where the tokenizer has them."""
    found = {name: _token_text(companions.tokenizer.get(name)) for name in _SPECIAL}
    return {name: text for name, text in found.items() if text is not None}


def _token_text(value: Any) -> str | None:
    """A token is written as its text, or as an object that holds it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def stop_ids(
    config: ModelConfig, companions: Companions, tokenizer: tokenizers.Tokenizer | None, vocab: int
) -> tuple[int, ...]:
    """The union of what config, generation config and tokenizer end a text with, ascending; ids below ``vocab``."""
    ids = stated_stop_ids(config, companions)
    eos = special_tokens(companions).get("eos_token")
    if eos is not None and tokenizer is not None:
        ids.update(_ids(tokenizer.token_to_id(eos)))
    return tuple(sorted(i for i in ids if 0 <= i < vocab))


def stated_stop_ids(config: ModelConfig, companions: Companions) -> set[int]:
    """What config and generation config say; ids that the model does not have too."""
    return {*_ids(config.get("eos_token_id")), *_ids(companions.generation.get("eos_token_id"))}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def sampling(companions: Companions) -> dict[str, float]:
    """Sampling defaults of the generation config; with do_sample false the model is meant to be run greedily."""
    generation = companions.generation
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    stated = _stated_sampling(generation)
    return {k: float(v) for k, v in stated.items() if is_sampling_value(k, v)}


def unusable_sampling(companions: Companions) -> dict[str, float]:
    """What the generation config states and no sampler can do: a negative temperature, top_k -1 for none."""
    return {k: v for k, v in _stated_sampling(companions.generation).items() if not is_sampling_value(k, v)}


def _stated_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    found = {k: generation.get(k) for k in _SAMPLING}
    return {k: v for k, v in found.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
