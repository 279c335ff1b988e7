"""The registry of model families; each is one small file beside this one."""

from __future__ import annotations

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families import (
    gemma,
    glm,
    interleaved,
    llama,
    mistral,
    phi3,
    qwen,
    qwen3_5,
    seed_oss,
    smollm3,
)
from krafla_cli.convert.families.base import Family
from krafla_cli.convert.families.refused import REFUSED
from krafla_cli.errors import UnsupportedError
from krafla_cli.formats.text import printable

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.MISTRAL,
    mistral.MINISTRAL,
    mistral.MINISTRAL3,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen3_5.FAMILY,
    gemma.GEMMA2,
    gemma.GEMMA3,
    smollm3.FAMILY,
    phi3.FAMILY,
    glm.GLM,
    glm.GLM4,
    seed_oss.FAMILY,
    interleaved.HELIUM,
    interleaved.ERNIE,
)
_GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def family_of(config: ModelConfig) -> Family:
    """The family of a checkpoint, by the model_type of its text part. Raises UnsupportedError that says what is."""
    outer = config.raw.get("model_type")
    model_type = config.text.get("model_type") or outer
    if isinstance(outer, str) and outer in REFUSED:  # whatever language model is inside
        model_type = outer
    family = next((f for f in FAMILIES if model_type in f.model_types), None)
    if family is None:
        known = ", ".join(t for f in FAMILIES for t in f.model_types)
        if model_type is None:
            raise UnsupportedError(
                f"{config.where}: model_type is missing; a student for `mlb pack-embed` has none, a language model has"
            )
        reason = REFUSED.get(model_type) if isinstance(model_type, str) else None
        because = f": {reason}" if reason else ""
        raise UnsupportedError(
            f'{config.where}: model_type "{printable(str(model_type))}" is not supported{because}; supported: {known}'
        )
    _check_architecture(config)
    _check_experts(config)
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


def _check_experts(config: ModelConfig) -> None:
    for key in _EXPERT_KEYS:
        value = config.get(key)
        if isinstance(value, int) and value > 1:
            raise config.unsupported(f"{key} is {value}: the format holds no mixture of experts")
