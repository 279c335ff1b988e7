"""The registry of model families; each is one small file beside this one."""

from __future__ import annotations

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families import llama, qwen
from krafla_cli.convert.families.base import Family
from krafla_cli.errors import UnsupportedError
from krafla_cli.formats.text import printable

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen.QWEN2, qwen.QWEN3)
_GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def family_of(config: ModelConfig) -> Family:
    """The family of a checkpoint, by the model_type of its text part. Raises UnsupportedError that lists all."""
    model_type = config.text.get("model_type") or config.raw.get("model_type")
    family = next((f for f in FAMILIES if model_type in f.model_types), None)
    if family is None:
        known = ", ".join(t for f in FAMILIES for t in f.model_types)
        raise UnsupportedError(
            f'{config.where}: model_type "{printable(str(model_type))}" is not supported; supported: {known}'
        )
    _check_architecture(config)
    return family


def _check_architecture(config: ModelConfig) -> None:
    """A classifier or an encoder of a known family has other outputs than next-token logits."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return
    if not any(isinstance(n, str) and n.endswith(_GENERATIVE) for n in names):
        raise config.unsupported(
            f"architecture {printable(', '.join(map(str, names)))} does not generate text; "
            f"supported: {', '.join('*' + g for g in _GENERATIVE)}"
        )
