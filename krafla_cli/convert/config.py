"""config.json as the families read it: one text part, old and new spellings, defaults, typed values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from krafla_cli.errors import FormatError, UnsupportedError
from krafla_cli.formats.json_file import read_json_object, shown_json
from krafla_cli.formats.text import printable

_MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 65536
_MAX_INTEGER = 2**53  # exact as a float; no size of a model comes near


class ModelConfig:
    """A checkpoint's config. Image-text checkpoints keep the language model's values in ``text_config``.

    A value is looked up in the text part, then at the top level, then in ``defaults`` (what the transformers class
    assumes for a key that is missing; saved configs leave out what equals it). Errors name the file and the key.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        text = raw.get("text_config")
        self.raw = raw
        self.where = where
        self.is_composite = isinstance(text, dict)
        self.text: Mapping[str, Any] = text if isinstance(text, dict) else raw
        self.defaults = defaults or {}

    def with_defaults(self, defaults: Mapping[str, Any]) -> ModelConfig:
        """The same config with the defaults of a family."""
        return ModelConfig(self.raw, self.where, defaults)

    def get(self, key: str) -> Any:
        """The value of ``key``; None where it is null or missing and has no default."""
        for place in (self.text, self.raw, self.defaults):
            if key in place:
                return place[key]
        return None

    def has(self, key: str) -> bool:
        """Whether the file itself (not the defaults) gives ``key`` a value other than null."""
        return self.text.get(key) is not None or self.raw.get(key) is not None

    def error(self, key: str, text: str) -> FormatError:
        """An error about ``key``."""
        return FormatError(f"{self.where}: {key} {text}")

    def unsupported(self, text: str) -> UnsupportedError:
        """A refusal of what the config asks for."""
        return UnsupportedError(f"{self.where}: {text}")

    def integer(self, key: str, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        value = self.get(key)
        if value is None:
            raise self.error(key, "is missing")
        return self.checked_integer(key, value, least)

    def optional_integer(self, key: str, least: int = 1) -> int | None:
        """As :meth:`integer`; None where the value is null or missing."""
        value = self.get(key)
        return None if value is None else self.checked_integer(key, value, least)

    def checked_integer(self, key: str, value: Any, least: int = 1) -> int:
        """``value`` of ``key`` as a whole number."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
        if not is_number or value != int(value) or value < least:
            raise self.error(key, f"must be a whole number of at least {least}, is {shown_json(value)}")
        if value > _MAX_INTEGER:
            raise self.error(key, f"must be at most {_MAX_INTEGER}, is {shown_json(value)}")
        return int(value)

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.optional_number(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def optional_number(self, key: str) -> float | None:
        """As :meth:`number`; None where the value is null or missing."""
        value = self.get(key)
        return None if value is None else self.checked_number(key, value)

    def checked_number(self, key: str, value: Any) -> float:
        """``value`` of ``key`` as a finite number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise self.error(key, f"must be a finite number, is {shown_json(value)}")
        return float(value)

    def checked_positive(self, key: str, value: Any) -> float:
        """``value`` of ``key`` as a finite number above 0."""
        number = self.checked_number(key, value)
        if number <= 0:
            raise self.error(key, f"must be above 0, is {shown_json(value)}")
        return number

    def norm_eps(self) -> float:
        """rms_norm_eps: what is added to a mean square, which no model makes larger than 1."""
        value = self.number("rms_norm_eps")
        if not 0 <= value <= 1:
            raise self.error("rms_norm_eps", f"must be 0 to 1, is {value:g}")
        return value

    def flag(self, key: str) -> bool:
        """A truth value; missing and null mean false."""
        value = self.get(key)
        if value not in (None, False, True, 0, 1):
            raise self.error(key, f"must be true or false, is {shown_json(value)}")
        return bool(value)

    def choice(self, key: str, choices: Mapping[str, Any]) -> Any:
        """The entry of ``choices`` under the value of ``key``; another value is refused by name."""
        value = self.get(key)
        if not isinstance(value, str) or value not in choices:
            names = ", ".join(choices)
            raise self.unsupported(f"{key}: {shown_json(value)} is not supported; supported: {names}")
        return choices[value]

    def n_layers(self) -> int:
        """num_hidden_layers, small enough to make lists of that length."""
        n = self.integer("num_hidden_layers")
        if n > MAX_LAYERS:
            raise self.error("num_hidden_layers", f"must be at most {MAX_LAYERS}, is {n}")
        return n

    def layer_list(self, key: str, n_layers: int, kinds: tuple[Any, ...]) -> list[Any] | None:
        """A list with one of ``kinds`` for each layer; None where null or missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < n_layers:
            found = f"{len(value)} entries" if isinstance(value, list) else shown_json(value)
            raise self.error(key, f"must list {n_layers} layers, has {found}")
        wrong = next((v for v in value[:n_layers] if v not in kinds), None)
        if wrong is not None:
            known = ", ".join(str(k) for k in kinds)
            raise self.unsupported(f"{key}: {shown_json(wrong)} is not supported; supported: {known}")
        return value[:n_layers]

    def section(self, key: str) -> dict[str, Any]:
        """A nested object; empty where null or missing."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {shown_json(value)}")
        return value

    def tied(self) -> bool:
        """Whether the classifier shares the embedding's weights: the top level decides, then the text part."""
        for place in (self.raw, self.text, self.defaults):
            value = place.get("tie_word_embeddings")
            if value is not None:
                if not isinstance(value, bool):
                    raise self.error("tie_word_embeddings", f"must be true or false, is {shown_json(value)}")
                return value
        return False


def read_config(folder: Path) -> ModelConfig:
    """config.json of a checkpoint folder. Raises FileError or FormatError."""
    path = folder / "config.json"
    return ModelConfig(read_json_object(path, _MAX_CONFIG_BYTES), printable(str(path)))


def refuse_quantized(config: ModelConfig) -> None:
    """Refuses a checkpoint that is quantized already: its tensors are not the weights. Raises UnsupportedError."""
    for key in ("quantization_config", "compression_config"):
        section = config.get(key)
        if section is not None:
            method = section.get("quant_method", "unknown") if isinstance(section, dict) else "unknown"
            raise config.unsupported(
                f'{key}: the checkpoint is quantized already ("{printable(str(method))}"); convert the original one in '
                "F32, F16 or BF16"
            )
