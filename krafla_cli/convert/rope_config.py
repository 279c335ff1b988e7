"""RoPE settings of config.json, old (rope_theta, rope_scaling) and new (rope_parameters, flat or per layer type)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import NoneType
from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.formats.json_file import shown_json
from krafla_cli.formats.mlb import ROPE_LINEAR, ROPE_LLAMA3, ROPE_PLAIN, ROPE_YARN
from krafla_cli.formats.text import printable
from krafla_cli.rope import yarn_bounds

_MAX_ROTATIONS = 2**31
FULL, SLIDING = "full_attention", "sliding_attention"
_NO_SCALING = ("default", "mrope", None)  # mrope: three position streams, all the same for text


def rope_fields(config: ModelConfig, head_dim: int, sliding_differ: bool = False) -> dict[str, Any]:
    """The header's RoPE fields for the layers of full attention; in most families (not ``sliding_differ``) for all.

    Raises FormatError (a value is missing or wrong), UnsupportedError (a scheme that the format does not hold).
    """
    if not sliding_differ:
        _check_one_rope(config)
    params = rope_params(config, FULL)
    rot_dim = rotated_dim(config, params, head_dim)
    fields = {"rope_theta": theta_of(config, params), "rot_dim": rot_dim if rot_dim != head_dim else 0}
    scheme = rope_scheme(config, params)
    if scheme in _NO_SCALING:
        return fields | {"rope_type": ROPE_PLAIN}
    builders = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
    if scheme not in builders:
        raise config.unsupported(
            f'RoPE scheme "{printable(str(scheme))}" is not supported; supported: default, linear, llama3, yarn'
        )
    return fields | builders[scheme](config, params, rot_dim, fields["rope_theta"])


def local_theta(config: ModelConfig, default: float) -> float:
    """RoPE base of sliding layers that have their own; the format has no scaling for them. Raises UnsupportedError."""
    params = rope_params(config, SLIDING) if is_nested(config) else {}
    scheme = rope_scheme(config, params)
    if scheme not in _NO_SCALING:
        raise config.unsupported(f'RoPE scheme "{printable(str(scheme))}" on sliding layers is not supported')
    value = params.get("rope_theta")
    if value is not None:
        return config.checked_number("rope_theta", value)
    local = config.optional_number("rope_local_base_freq")
    return default if local is None else local


def is_nested(config: ModelConfig) -> bool:
    """Whether rope_parameters holds one object per layer type."""
    return any(isinstance(v, dict) for v in config.section("rope_parameters").values())


def rope_params(config: ModelConfig, layer_type: str) -> Mapping[str, Any]:
    """The RoPE parameters of ``layer_type``: rope_parameters (new), where missing rope_scaling (old)."""
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    params = new or old
    if any(isinstance(v, dict) for v in params.values()):
        nested = params.get(layer_type)
        if not isinstance(nested, dict):
            raise config.error("rope_parameters", f"has no entry for {layer_type}")
        params = nested
    if new and layer_type == FULL:
        _check_same(config, params, old)
    return params


def _check_same(config: ModelConfig, params: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """rope_scaling beside rope_parameters: readers differ in which one counts, so they must say the same."""
    renamed = {"rope_type" if key == "type" else key: value for key, value in old.items()}
    known = {"rope_type": rope_scheme(config, params), **params}
    wrong = next((key for key, value in renamed.items() if known.get(key) != value), None)
    if wrong is not None:
        raise config.error(
            "rope_scaling", f"and rope_parameters are both given and differ in {printable(wrong)}; remove the wrong one"
        )


def _check_one_rope(config: ModelConfig) -> None:
    """Layer types with RoPE parameters of their own, in a family whose layers all have the same."""
    entries = {k: v for k, v in config.section("rope_parameters").items() if isinstance(v, dict)}
    wrong = next((key for key, value in entries.items() if value != entries.get(FULL, value)), None)
    if wrong is not None:
        raise config.unsupported(
            f"rope_parameters of {printable(wrong)} and {FULL} differ: this family has one RoPE for all layers"
        )


def rope_scheme(config: ModelConfig, params: Mapping[str, Any]) -> str | None:
    """The value of rope_type or type; both may be given if they agree. A factor alone names no scheme."""
    new, old = params.get("rope_type"), params.get("type")
    for key, value in (("rope_type", new), ("type", old)):
        if not isinstance(value, (str, NoneType)):
            raise config.error("rope_scaling", f"has {key} {shown_json(value)}, which is no name")
    # Some tools rewrote "mrope" to "default" under the new key and left the old one.
    if new is not None and old is not None and new != old and not {new, old} <= set(_NO_SCALING):
        raise config.error("rope_scaling", f"has rope_type {printable(str(new))} and type {printable(str(old))}")
    if new is None and old is None and params.get("factor") is not None:
        raise config.error("rope_scaling", f"has factor {shown_json(params['factor'])} and no rope_type")
    return new if new is not None else old


def theta_of(config: ModelConfig, params: Mapping[str, Any]) -> float:
    """The base: from the parameters, else from the old top-level key (or the family's default)."""
    value = params.get("rope_theta")
    if value is None:
        return config.number("rope_theta")
    return config.checked_number("rope_theta", value)


def rotated_dim(config: ModelConfig, params: Mapping[str, Any], head_dim: int) -> int:
    """Dimensions of a head that are rotated: head_dim x partial_rotary_factor, rounded down."""
    value = params.get("partial_rotary_factor")
    if value is None:
        value = config.get("partial_rotary_factor")
    if value is None:
        return head_dim
    factor = config.checked_number("partial_rotary_factor", value)
    if not 0 < factor <= 1:
        raise config.error("partial_rotary_factor", f"must be above 0 and at most 1, is {factor:g}")
    return int(head_dim * factor)


def _value(config: ModelConfig, params: Mapping[str, Any], key: str) -> float:
    if params.get(key) is None:
        raise config.error("rope_scaling", f"of this type needs {key}")
    return config.checked_positive(key, params[key])


def _original_context(config: ModelConfig, params: Mapping[str, Any]) -> int:
    value = config.get("original_max_position_embeddings")
    if value is None:
        value = params.get("original_max_position_embeddings")
    if value is None:
        return config.integer("max_position_embeddings")
    return config.checked_integer("original_max_position_embeddings", value)


def _linear(config: ModelConfig, params: Mapping[str, Any], _rot_dim: int, _theta: float) -> dict[str, Any]:
    return {"rope_type": ROPE_LINEAR, "rope_factor": _value(config, params, "factor")}


def _llama3(config: ModelConfig, params: Mapping[str, Any], _rot_dim: int, _theta: float) -> dict[str, Any]:
    return {
        "rope_type": ROPE_LLAMA3,
        "rope_factor": _value(config, params, "factor"),
        "rope_low_freq_factor": _value(config, params, "low_freq_factor"),
        "rope_high_freq_factor": _value(config, params, "high_freq_factor"),
        "rope_orig_max_seq": _original_context(config, params),
    }


def _yarn(config: ModelConfig, params: Mapping[str, Any], rot_dim: int, theta: float) -> dict[str, Any]:
    original = _original_context(config, params)
    if params.get("factor") is None:
        factor = config.integer("max_position_embeddings") / original
    else:
        factor = _value(config, params, "factor")
    beta_fast = config.checked_positive("beta_fast", params.get("beta_fast") or 32)
    beta_slow = config.checked_positive("beta_slow", params.get("beta_slow") or 1)
    if max(beta_fast, beta_slow) > _MAX_ROTATIONS:
        raise config.error("rope_scaling", f"has beta_fast {beta_fast:g} and beta_slow {beta_slow:g}: above 2^31")
    if theta <= 1:
        raise config.error("rope_theta", f"must be above 1 with RoPE scheme yarn, is {theta:g}")
    _check_truncate(config, params, yarn_bounds(rot_dim, theta, original, beta_fast, beta_slow))
    return {
        "rope_type": ROPE_YARN,
        "rope_factor": factor,
        "rope_low_freq_factor": beta_fast,
        "rope_high_freq_factor": beta_slow,
        "rope_orig_max_seq": original,
        "rope_attn_factor": _yarn_attention_factor(config, params, factor),
    }


def _check_truncate(config: ModelConfig, params: Mapping[str, Any], bounds: tuple[float, float]) -> None:
    """The format always rounds the bounds; ``truncate: false`` is the same only where both are whole already."""
    truncate = params.get("truncate", True)
    if truncate not in (None, False, True):
        raise config.error("rope_scaling", f"has truncate {shown_json(truncate)}, which is neither true nor false")
    if not truncate and any(b != int(b) for b in bounds):
        low, high = bounds
        raise config.unsupported(
            f"RoPE scheme yarn with truncate false is not supported: its bounds {low:.4g} and {high:.4g} are not whole"
        )


def _yarn_attention_factor(config: ModelConfig, params: Mapping[str, Any], factor: float) -> float:
    """The factor on cos and sin as transformers computes it: given, or by mscale, or 0.1 ln(factor) + 1."""
    if params.get("attention_factor") is not None:
        return _value(config, params, "attention_factor")
    if params.get("mscale") and params.get("mscale_all_dim"):
        mscale, all_dim = _value(config, params, "mscale"), _value(config, params, "mscale_all_dim")
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
