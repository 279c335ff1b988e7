"""The config of a GGUF file: its metadata in the words of a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from krafla_cli.convert.config import MAX_LAYERS, ModelConfig
from krafla_cli.errors import FormatError, UnsupportedError
from krafla_cli.formats.gguf import GgufFile
from krafla_cli.formats.gguf_names import ARCHITECTURES, ATTN_FACTOR_KEY, LLAMA3_KEY, ROPE_FREQS, Architecture
from krafla_cli.formats.text import printable
from krafla_cli.rope import Llama3, llama3_of_divisors

Raw = dict[str, Any]

# Sizes of the one model of each kind that llama.cpp gives another attention scale: dim / heads, not the head size.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")


def architecture_of(model: GgufFile) -> Architecture:
    """The architecture. Raises UnsupportedError for one that is not known, and for a part of a split model."""
    n_parts = model.get("split.count", int) or 1
    if n_parts > 1:
        raise UnsupportedError(
            f"{model.title}: one of {n_parts} parts of a split model; join them first (llama-gguf-split --merge)"
        )
    name = model.require("general.architecture", str)
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedError(
            f'{model.title}: architecture "{printable(name)}" is not supported; supported: {", ".join(ARCHITECTURES)}'
        )
    return found


def gguf_config(model: GgufFile) -> ModelConfig:
    """The config. Raises FormatError (missing or wrong metadata), UnsupportedError (what the .mlb cannot hold)."""
    architecture = architecture_of(model)
    values = _Values(model, architecture.name)
    raw = _common(model, values, architecture) | _rope(model, values)
    raw |= _extra(architecture.name)(values, raw)
    ids = ("bos", "eos", "padding")
    names = {"padding": "pad_token_id"}
    found = {names.get(k, f"{k}_token_id"): model.get(f"tokenizer.ggml.{k}_token_id", int) for k in ids}
    return ModelConfig(raw | {k: v for k, v in found.items() if v is not None}, model.title)


class _Values:
    """Metadata of one architecture: ``values("block_count")`` is llama.block_count."""

    def __init__(self, model: GgufFile, prefix: str) -> None:
        self.model = model
        self.prefix = prefix

    def integer(self, key: str) -> int:
        value = self.optional_integer(key)
        if value is None:
            raise FormatError(f"{self.model.title}: metadata {self.prefix}.{key} is missing")
        return value

    def n_layers(self) -> int:
        """block_count, small enough to make lists of that length."""
        n = self.integer("block_count")
        if not 0 < n <= MAX_LAYERS:
            raise FormatError(f"{self.model.title}: {self.prefix}.block_count is {n}, must be 1 to {MAX_LAYERS}")
        return n

    def optional_integer(self, key: str) -> int | None:
        """A whole number; a list that gives every layer the same one counts as that number."""
        entry = self.model.metadata.get(f"{self.prefix}.{key}")
        if entry is not None and isinstance(entry.value, np.ndarray) and entry.value.size:
            if (entry.value != entry.value[0]).any():
                raise UnsupportedError(f"{self.model.title}: {self.prefix}.{key} differs between layers")
            return int(entry.value[0])
        return self.model.get(f"{self.prefix}.{key}", int)

    def optional_number(self, key: str) -> float | None:
        return self.model.get(f"{self.prefix}.{key}", float)

    def unsupported(self, text: str) -> UnsupportedError:
        return UnsupportedError(f"{self.model.title}: {text}")


def _common(model: GgufFile, values: _Values, architecture: Architecture) -> Raw:
    dim, n_heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head_dim = _head_dim(values)
    value_dim = values.optional_integer("attention.value_length") or head_dim
    if value_dim != head_dim:
        raise values.unsupported(f"value heads of {value_dim} and key heads of {head_dim}: the format has one size")
    experts = values.optional_integer("expert_count")
    return {
        "model_type": architecture.model_type,
        "hidden_size": dim,
        "num_hidden_layers": values.n_layers(),
        "intermediate_size": values.integer("feed_forward_length"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": values.optional_integer("attention.head_count_kv") or n_heads,
        "head_dim": head_dim,
        "max_position_embeddings": values.integer("context_length"),
        "rms_norm_eps": model.require(f"{architecture.name}.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": architecture.tensors["wcls"] not in model.tensors,
        **({"num_local_experts": experts} if experts else {}),
    }


# ---------------------------------------------------------------------------------------------------------------------
# RoPE


def _rope(model: GgufFile, values: _Values) -> Raw:
    """RoPE of the layers of full attention, in the spelling that transformers of every version reads."""
    theta, head_dim = values.optional_number("rope.freq_base"), _head_dim(values)
    rotated = values.optional_integer("rope.dimension_count") or head_dim
    raw: Raw = {"rope_theta": 10000.0 if theta is None else theta, "rope_scaling": None}
    if rotated != head_dim:
        raw["partial_rotary_factor"] = (rotated + 0.25) / head_dim  # whole again when multiplied and rounded down
    longrope = next((n for n in _LONGROPE if n in model.tensors), None)
    if longrope is not None:
        raise values.unsupported(f"{longrope}: RoPE scheme longrope is not supported")
    if ROPE_FREQS in model.tensors:
        return raw | {"rope_scaling": _llama3(model, values, raw["rope_theta"], rotated)}
    return raw | {"rope_scaling": _scaling(values)}


def _head_dim(values: _Values) -> int:
    length = values.optional_integer("attention.key_length")
    return length or _width_by_heads(values)


def _width_by_heads(values: _Values) -> int:
    dim, n_heads = values.integer("embedding_length"), values.integer("attention.head_count")
    if not 1 <= n_heads <= dim:
        raise FormatError(
            f"{values.model.title}: {values.prefix}.attention.head_count is {n_heads}, must be 1 to {dim}, the width"
        )
    return dim // n_heads


def _scaling(values: _Values) -> Raw | None:
    scheme = values.model.get(f"{values.prefix}.rope.scaling.type", str)
    factor = values.optional_number("rope.scaling.factor") or values.optional_number("rope.scale_linear") or 0.0
    if scheme == "none" or (scheme in (None, "linear") and factor in (0.0, 1.0)):
        return None
    if scheme in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if scheme != "yarn":
        raise values.unsupported(f'RoPE scheme "{printable(str(scheme))}" is not supported; supported: linear, yarn')
    return _yarn(values, factor)


def _yarn(values: _Values, factor: float) -> Raw:
    """YaRN as llama.cpp computes it: 0.1 ln(factor) + 1 (or the mscale ratio), times attn_factor where given."""
    if factor <= 0:
        raise FormatError(f"{values.model.title}: {values.prefix}.rope.scaling.factor must be > 0 with yarn")
    ext = values.optional_number("rope.scaling.yarn_ext_factor")
    if ext is not None and ext != 1.0:
        raise values.unsupported(f"rope.scaling.yarn_ext_factor is {ext:g}: the format holds no partial extrapolation")
    original = values.optional_integer("rope.scaling.original_context_length")
    params: Raw = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or values.integer("context_length"),
    }
    for key in ("beta_fast", "beta_slow"):
        beta = values.optional_number(f"rope.scaling.yarn_{key}")
        params |= {key: beta} if beta is not None else {}
    log_mul, given = (
        values.optional_number("rope.scaling.yarn_log_multiplier"),
        values.optional_number("rope.scaling.attn_factor"),
    )
    if log_mul:
        params |= {"mscale": 1.0, "mscale_all_dim": log_mul}
    if given is not None and given != 1.0:
        divisor = _mscale(factor, log_mul) if log_mul else 1.0
        if divisor <= 0:
            raise FormatError(f"{values.model.title}: {values.prefix}.rope.scaling.yarn_log_multiplier is {log_mul:g}")
        params["attention_factor"] = given * _mscale(factor) / divisor
    noted = values.model.get(ATTN_FACTOR_KEY, float)
    if noted is not None and math.isclose(noted, params.get("attention_factor", _mscale(factor)), rel_tol=1e-6):
        params["attention_factor"] = noted
    stated = values.optional_number("rope.scaling.yarn_attn_factor")
    if stated is not None and not math.isclose(stated, params.get("attention_factor", _mscale(factor)), rel_tol=1e-6):
        raise values.unsupported(f"rope.scaling.yarn_attn_factor {stated:g} contradicts what readers compute")
    return params


def _mscale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _llama3(model: GgufFile, values: _Values, theta: float, rotated: int) -> Raw | None:
    """The parameters behind the factors of rope_freqs.weight, checked to give them back."""
    info = model.tensors[ROPE_FREQS]
    if info.kind.name != "F32" or info.shape != (rotated // 2,):
        raise FormatError(
            f"{model.title}: {ROPE_FREQS} is {info.kind.name} {list(info.shape)}, must be F32 [{rotated // 2}]"
        )
    factors = model.raw(ROPE_FREQS).view("<f4").astype(np.float64)
    if (factors == 1).all():
        return None
    found = llama3_of_divisors(factors, theta, rotated, _hints(model))
    if found is None:
        raise values.unsupported(f"{ROPE_FREQS}: its factors are not those of llama3 scaling; the format has no other")
    return {
        "rope_type": "llama3",
        "factor": found.factor,
        "low_freq_factor": found.low,
        "high_freq_factor": found.high,
        "original_max_position_embeddings": round(found.original),
    }


def _hints(model: GgufFile) -> list[Llama3]:
    """The parameters that `mlb export` notes down; they are believed only where they give the factors of the file."""
    entry = model.metadata.get(LLAMA3_KEY)
    if entry is None or not isinstance(entry.value, np.ndarray) or len(entry.value) != 4:
        return []
    return [Llama3(*(float(v) for v in entry.value))]


# ---------------------------------------------------------------------------------------------------------------------
# What only some architectures have


def _extra(name: str) -> Callable[[_Values, Raw], Raw]:
    """A function from the metadata, and the config so far, to what is added to it."""
    return {
        "llama": _llama,
        "qwen2": _no_window,
        "qwen3": _no_window,
        "qwen35": _qwen35,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "smollm3": _smollm3,
        "phi3": _phi3,
        "glm4": _glm4,
        "seed_oss": _seed_oss,
    }.get(name, lambda _values, _raw: {})


def _llama(values: _Values, _raw: Raw) -> Raw:
    """Mistral's files are called llama too; a window makes them out."""
    window = values.optional_integer("attention.sliding_window")
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _no_window(values: _Values, _raw: Raw) -> Raw:
    window = values.optional_integer("attention.sliding_window")
    if window and window < values.integer("context_length"):
        raise values.unsupported(f"attention.sliding_window {window} has no meaning for {values.prefix}")
    return {}


def _qwen35(values: _Values, raw: Raw) -> Raw:
    """The sizes of linear attention, by the names of state-space models; layers that predict more tokens come last."""
    interval = values.optional_integer("full_attention_interval") or 4
    n_heads = values.integer("ssm.time_step_rank")
    inner = values.integer("ssm.inner_size")
    if n_heads < 1 or inner % n_heads:
        raise FormatError(
            f"{values.model.title}: qwen35.ssm.inner_size is {inner}, no multiple of ssm.time_step_rank, {n_heads}"
        )
    return {
        "num_hidden_layers": raw["num_hidden_layers"] - (values.optional_integer("nextn_predict_layers") or 0),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0),
        "full_attention_interval": interval,
        "linear_num_key_heads": values.integer("ssm.group_count"),
        "linear_num_value_heads": n_heads,
        "linear_key_head_dim": values.integer("ssm.state_size"),
        "linear_value_head_dim": inner // n_heads,
        "linear_conv_kernel_dim": values.integer("ssm.conv_kernel"),
    }


def _smollm3(values: _Values, raw: Raw) -> Raw:
    return _no_window(values, raw) | {"no_rope_layer_interval": 4}


def _phi3(values: _Values, _raw: Raw) -> Raw:
    return {"sliding_window": values.optional_integer("attention.sliding_window") or None}


def _glm4(values: _Values, raw: Raw) -> Raw:
    biases = "blk.0.attn_q.bias" in values.model.tensors
    return {"attention_bias": biases, "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}


def _seed_oss(values: _Values, _raw: Raw) -> Raw:
    return {"attention_bias": "blk.0.attn_q.bias" in values.model.tensors}


def _gemma_scale(values: _Values) -> float:
    """query_pre_attn_scalar: the head size, but for the 27B models dim / heads; GGUF does not state it."""
    if values.n_layers() == _SCALED_BY_WIDTH[values.prefix]:
        return _width_by_heads(values)
    return _head_dim(values)


def _gemma2(values: _Values, raw: Raw) -> Raw:
    attention = values.optional_number("attn_logit_softcapping")
    final = values.optional_number("final_logit_softcapping")
    n_layers = values.n_layers()
    local = values.optional_number("rope.freq_base_swa")
    if local is not None and local != raw["rope_theta"]:
        raise values.unsupported("rope.freq_base_swa differs from rope.freq_base, which Gemma 2 does not have")
    return {
        "query_pre_attn_scalar": _gemma_scale(values),
        "attn_logit_softcapping": 50.0 if attention is None else attention,
        "final_logit_softcapping": 30.0 if final is None else final,
        "sliding_window": values.optional_integer("attention.sliding_window") or 4096,
        "layer_types": _layer_types(values, n_layers, 2),
    }


def _gemma3(values: _Values, _raw: Raw) -> Raw:
    n_layers = values.n_layers()
    window = values.optional_integer("attention.sliding_window")
    local = values.optional_number("rope.freq_base_swa")
    types = _layer_types(values, n_layers, 6) if window else ["full_attention"] * n_layers
    return {
        "query_pre_attn_scalar": _gemma_scale(values),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": values.optional_number("final_logit_softcapping") or None,
        "sliding_window": window or None,
        "layer_types": types,
        "rope_local_base_freq": 10000.0 if local is None else local,
    }


def _layer_types(values: _Values, n_layers: int, pattern: int) -> list[str]:
    """attention.sliding_window_pattern: a flag for each layer, or a number n: all but each n-th are local."""
    entry = values.model.metadata.get(f"{values.prefix}.attention.sliding_window_pattern")
    if entry is not None and isinstance(entry.value, np.ndarray):
        if len(entry.value) != n_layers:
            text = f"sliding_window_pattern has {len(entry.value)} entries for {n_layers} layers"
            raise FormatError(f"{values.model.title}: {values.prefix}.attention.{text}")
        local = [bool(v) for v in entry.value]
    else:
        number = values.optional_integer("attention.sliding_window_pattern")
        n = pattern if number is None else number
        local = [n == 0 or i % n < n - 1 for i in range(n_layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in local]
