"""config.json: every case that other tools got wrong, the refusals, and a golden header per family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families import FAMILIES, family_of
from krafla_cli.convert.families.base import Family
from krafla_cli.convert.pipeline import convert
from krafla_cli.errors import FormatError, MlbError, UnsupportedError
from krafla_cli.formats.mlb import LAYOUT
from tests.helpers.checkpoints import CHECKPOINTS

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
GEMMA2 = LLAMA | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}
SMOLLM3 = LLAMA | {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
FULL, SLIDING = "full_attention", "sliding_attention"


def fields(raw: dict[str, Any]) -> dict[str, Any]:
    config = ModelConfig(raw, "config.json")
    family = family_of(config)
    return family.header(config.with_defaults(family.defaults))


def refusal(raw: dict[str, Any], error: type[MlbError] = UnsupportedError) -> str:
    with pytest.raises(error) as raised:
        fields(raw)
    return str(raised.value)


# --- head size, RoPE base


def test_head_dim_is_not_dim_over_heads() -> None:
    assert fields(QWEN3 | {"num_attention_heads": 4, "head_dim": 32})["head_dim"] == 32
    assert fields(QWEN3 | {"num_attention_heads": 4, "head_dim": 16})["head_dim"] == 0  # dim / n_heads


@pytest.mark.parametrize(
    "place",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 5e5}}},
        {"rope_scaling": {"rope_type": "default"}, "rope_theta": 5e5},
    ],
)
def test_rope_base_wherever_it_is(place: dict[str, Any]) -> None:
    raw = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    assert fields(raw | place)["rope_theta"] == 5e5


def test_rope_parameters_go_before_the_old_key() -> None:
    assert fields(LLAMA | {"rope_parameters": {"rope_theta": 2.5e5}})["rope_theta"] == 2.5e5


@pytest.mark.parametrize(
    ("new", "old", "differs"),
    [
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}, {"type": "linear", "factor": 4.0}, None),
        ({"rope_type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}, None),
        ({"rope_type": "default", "rope_theta": 5e5}, {"type": "linear", "factor": 4.0}, "rope_type"),
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 8.0}, "factor"),
        ({FULL: {"rope_theta": 5e5}}, {"rope_theta": 1e4}, "rope_theta"),
    ],
)
def test_rope_scaling_beside_rope_parameters(new: dict[str, Any], old: dict[str, Any], differs: str | None) -> None:
    """transformers takes the old key where both are given, this tool the new one: they must not differ."""
    raw = LLAMA | {"rope_parameters": new, "rope_scaling": old}
    if differs is None:
        assert fields(raw)["rope_factor"] == 4.0
    else:
        text = refusal(raw, FormatError)
        assert text == (
            f"config.json: rope_scaling and rope_parameters are both given and differ in {differs}; "
            "remove the wrong one"
        )


def test_rope_of_each_layer_type_where_a_family_has_one() -> None:
    both = {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e6}}
    assert fields(QWEN3 | {"rope_parameters": both})["rope_theta"] == 1e6
    text = refusal(QWEN3 | {"rope_parameters": both | {SLIDING: {"rope_theta": 1e4}}})
    assert text == (
        "config.json: rope_parameters of sliding_attention and full_attention differ: this family has one RoPE for all "
        "layers"
    )


@pytest.mark.parametrize(("extra", "base"), [({}, 1e3), ({"rope_local_base_freq": 77.0}, 1e3)])
def test_local_rope_base_of_gemma3(extra: dict[str, Any], base: float) -> None:
    raw = GEMMA2 | {"model_type": "gemma3_text", "rope_parameters": {FULL: {}, SLIDING: {"rope_theta": 1e3}}}
    assert fields(raw | extra)["rope_local_theta"] == base
    assert fields(raw | extra | {"rope_parameters": None})["rope_local_theta"] == (77.0 if extra else 1e4)


def test_a_factor_without_a_scheme() -> None:
    text = refusal(LLAMA | {"rope_scaling": {"factor": 4.0}}, FormatError)
    assert text == "config.json: rope_scaling has factor 4.0 and no rope_type"


@pytest.mark.parametrize("scheme", ["yarn", "su", "longrope", "linear"])
def test_phi3_has_longrope_under_every_name(scheme: str) -> None:
    """transformers takes "yarn" and "su" of a Phi-3 for longrope."""
    scaling = {"type": scheme, "factor": 4.0, "original_max_position_embeddings": 64}
    assert "not supported" in refusal(LLAMA | {"model_type": "phi3", "rope_scaling": scaling})


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
def test_partial_rotation_where_transformers_ignores_it(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": model_type, "partial_rotary_factor": 0.5}))
    with pytest.raises(
        UnsupportedError, match=f"partial_rotary_factor: transformers ignores it in family {model_type}"
    ):
        convert(tmp_path, tmp_path / "m.mlb")


def test_llama3_scaling() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    got = fields(LLAMA | {"rope_scaling": scaling})
    assert [got[k] for k in ("rope_type", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor")] == [
        1,
        8,
        1,
        4,
    ]
    assert got["rope_orig_max_seq"] == 64


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_scaling_by_either_key(key: str) -> None:
    got = fields(LLAMA | {"rope_scaling": {key: "linear", "factor": 4.0}})
    assert (got["rope_type"], got["rope_factor"]) == (2, 4.0)


def test_both_keys_must_agree() -> None:
    both = {"type": "linear", "rope_type": "linear", "factor": 4.0}
    assert fields(LLAMA | {"rope_scaling": both})["rope_type"] == 2
    text = refusal(LLAMA | {"rope_scaling": both | {"rope_type": "yarn"}}, FormatError)
    assert text == "config.json: rope_scaling has rope_type yarn and type linear"
    mrope = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 2, 3]}
    assert fields(LLAMA | {"rope_scaling": mrope})["rope_type"] == 0


@pytest.mark.parametrize("scheme", ["longrope", "dynamic", "su", "ntk\x1b[2J"])
def test_unknown_scheme_is_refused_by_name(scheme: str) -> None:
    text = refusal(LLAMA | {"rope_scaling": {"rope_type": scheme, "factor": 2.0}})
    name = scheme.replace("\x1b", "\\x1b")
    assert text == f'config.json: RoPE scheme "{name}" is not supported; supported: default, linear, llama3, yarn'


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_missing_scaling_value(missing: str) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    text = refusal(LLAMA | {"rope_scaling": {k: v for k, v in scaling.items() if k != missing}}, FormatError)
    assert text == f"config.json: rope_scaling of this type needs {missing}"


@pytest.mark.parametrize(
    ("extra", "factor"),
    [
        ({}, 0.1 * 1.3862943611198906 + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"attention_factor": 1.25, "mscale": 0.707, "mscale_all_dim": 1.0}, 1.25),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * 1.3862943611198906 + 1) / (0.1 * 1.3862943611198906 + 1)),
        ({"mscale": 0.707}, 0.1 * 1.3862943611198906 + 1),
    ],
)
def test_yarn_attention_factor(extra: dict[str, float], factor: float) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    got = fields(LLAMA | {"rope_scaling": yarn | extra})
    assert got["rope_attn_factor"] == pytest.approx(factor, rel=1e-12)
    assert [got[k] for k in ("rope_low_freq_factor", "rope_high_freq_factor", "rope_orig_max_seq")] == [32, 1, 64]


def test_yarn_without_truncation() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for value in (False, None, 0):  # all false to transformers
        assert "truncate false is not supported" in refusal(LLAMA | {"rope_scaling": yarn | {"truncate": value}})
    text = refusal(LLAMA | {"rope_scaling": yarn | {"truncate": "no"}}, FormatError)
    assert text == 'config.json: rope_scaling has truncate "no", which is neither true nor false'


# --- layers


def test_no_rope_layers_means_rope_where_it_is_one() -> None:
    assert fields(SMOLLM3 | {"no_rope_layers": [1, 0, 1]})["flags"] == bytes([0, 4, 0])
    assert fields(SMOLLM3 | {"no_rope_layer_interval": 2})["flags"] == bytes([0, 4, 0])
    assert fields(SMOLLM3 | {"num_hidden_layers": 4})["flags"] == bytes([0, 0, 0, 4])
    assert "flags" not in fields(SMOLLM3 | {"no_rope_layers": [1, 1, 1]})


@pytest.mark.parametrize(
    ("extra", "window", "flags"),
    [
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1}, 0, None),
        ({"sliding_window": 9}, 0, None),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, 9, [0, 1, 1]),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, 9, None),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, 0, None),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL, FULL]}, 9, [1, 0, 0]),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, 0, None),
    ],
)
def test_qwen_windows(extra: dict[str, Any], window: int, flags: list[int] | None) -> None:
    got = fields(QWEN3 | extra)
    assert got.get("sliding_window", 0) == window
    assert got.get("flags") == (bytes(flags) if flags else None)


@pytest.mark.parametrize(("window", "stored"), [(9, 9), (None, 0), (..., 4096)])
def test_mistral_window(window: Any, stored: int) -> None:
    raw = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    raw |= {} if window is ... else {"sliding_window": window}
    assert fields(raw).get("sliding_window", 0) == stored


@pytest.mark.parametrize("model_type", ["mistral", "ministral"])
def test_layer_types_of_mistral(model_type: str) -> None:
    """A "mistral" with layer_types (Ministral 8B) is a Ministral."""
    raw = LLAMA | {"model_type": model_type, "layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 9}
    assert (fields(raw)["sliding_window"], fields(raw)["flags"]) == (9, bytes([0, 1, 1]))
    assert "sliding_window" not in fields(raw | {"layer_types": [FULL] * 3})
    assert fields(raw | {"layer_types": None}).get("flags") is None


def test_ministral3_has_its_window_on_every_layer() -> None:
    raw = LLAMA | {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": 0.0}, "sliding_window": 9}
    assert fields(raw | {"layer_types": [SLIDING] * 3})["sliding_window"] == 9
    text = refusal(raw | {"layer_types": [FULL, SLIDING, SLIDING]}, FormatError)
    assert text == "config.json: layer_types names full layers, but the window of this family is on all"


@pytest.mark.parametrize(
    "raw",
    [
        QWEN3 | {"sliding_window": 9},
        SMOLLM3 | {"sliding_window": 9},
        SMOLLM3 | {"use_sliding_window": True, "sliding_window": None},
        LLAMA | {"model_type": "mistral", "sliding_window": None},
        LLAMA | {"model_type": "ministral", "sliding_window": None},
    ],
)
def test_sliding_layers_without_a_window(raw: dict[str, Any]) -> None:
    text = refusal(raw | {"layer_types": [FULL, SLIDING, FULL]}, FormatError)
    assert text == "config.json: layer_types names sliding layers, but the window is off"


def test_layer_list_of_wrong_length_or_kind() -> None:
    text = refusal(QWEN3 | {"layer_types": [FULL]}, FormatError)
    assert text == "config.json: layer_types must list 3 layers, has 1 entries"
    assert 'layer_types: "chunked_attention" is not supported' in refusal(
        QWEN3 | {"layer_types": ["chunked_attention"] * 3}
    )


# --- Gemma


def test_gemma_scales_and_caps_come_from_their_own_fields() -> None:
    got = fields(
        GEMMA2 | {"query_pre_attn_scalar": 100, "attn_logit_softcapping": None, "final_logit_softcapping": 7.0}
    )
    assert (got["attn_scale"], got["attn_softcap"], got["final_softcap"], got["embed_scale"]) == (0.1, 0.0, 7.0, 8.0)
    got = fields(GEMMA2)
    assert (got["attn_scale"], got["attn_softcap"], got["final_softcap"]) == (0.0625, 50.0, 30.0)


def test_gemma3_caps_no_scores() -> None:
    """transformers reads the key and ignores it."""
    raw = GEMMA2 | {"model_type": "gemma3_text"}
    assert fields(raw | {"attn_logit_softcapping": None, "final_logit_softcapping": 7.0})["final_softcap"] == 7.0
    assert "attn_logit_softcapping is 5: Gemma 3 caps no attention scores" in refusal(
        raw | {"attn_logit_softcapping": 5.0}
    )
    inside = {"model_type": "gemma3", "text_config": raw | {"attn_logit_softcapping": None}}
    assert fields(inside)["final_softcap"] == 0.0
    inside["text_config"]["final_logit_softcapping"] = 7.0
    assert "final_logit_softcapping is 7: transformers ignores it in image-text models" in refusal(inside)


def test_gemma3_image_text_config() -> None:
    text = {k: v for k, v in GEMMA2.items() if k not in ("rope_theta", "tie_word_embeddings", "architectures")}
    raw = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text | {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "vision_config": {"hidden_size": 1152},
    }
    got = fields(raw)
    assert (got["rope_theta"], got["rope_local_theta"], got["rope_type"], got["rope_factor"]) == (1e6, 1e4, 2, 8.0)
    assert (got["shared_classifier"], got["flags"], got["dim"]) == (1, bytes([3, 3, 3]), 64)


def test_tie_flag_only_in_the_text_part() -> None:
    raw = {"model_type": "gemma3", "text_config": GEMMA2 | {"model_type": "gemma3_text", "tie_word_embeddings": False}}
    assert fields(raw)["shared_classifier"] == 0
    assert fields(raw | {"tie_word_embeddings": True})["shared_classifier"] == 1


def test_qwen3_5_layers_and_rotation() -> None:
    raw = LLAMA | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 5}
    got = fields(raw | {"head_dim": 16})
    assert got["flags"] == bytes([8, 8, 8, 0, 8])
    assert got["rot_dim"] == 4  # a quarter, although the config does not say so
    assert [got[k] for k in ("lin_k_heads", "lin_v_heads", "lin_k_dim", "lin_v_dim", "lin_conv")] == [
        16,
        32,
        128,
        128,
        4,
    ]


# --- refusals, all before a weight is read


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (LLAMA | {"model_type": "mixtral"}, 'model_type "mixtral" is not supported: it is a mixture of experts'),
        (LLAMA | {"model_type": "clip"}, 'model_type "clip" is not supported: it is a vision model'),
        ({"model_type": "paligemma", "text_config": GEMMA2}, "in its prompts every position attends to all others"),
        (LLAMA | {"model_type": "olmo2"}, "its blocks have no norm before attention and FFN"),
        (LLAMA | {"model_type": "arcee"}, "its FFN has no gate"),
        (LLAMA | {"model_type": "ministral3"}, "llama_4_scaling_beta is 0.1"),
        (LLAMA | {"model_type": "wat\x07"}, 'model_type "wat\\x07" is not supported; supported: llama, mistral'),
        (
            {k: v for k, v in LLAMA.items() if k != "model_type"},
            "model_type is missing; a student for `mlb pack-embed`",
        ),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts is 8: the format holds no mixture of experts"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias is true: the format holds no biases of the FFN"),
        (LLAMA | {"attention_bias": True}, "attention_bias is true: the format holds no bias of the attention output"),
        (LLAMA | {"hidden_act": []}, "hidden_act: [] is not supported"),
        (LLAMA | {"hidden_act": "relu"}, 'hidden_act: "relu" is not supported; supported: silu'),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "does not generate text"),
    ],
)
def test_refused(raw: dict[str, Any], text: str) -> None:
    assert text in refusal(raw)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("hidden_size", "64", 'must be a whole number of at least 1, is "64"'),
        ("hidden_size", 64.5, "must be a whole number of at least 1, is 64.5"),
        ("hidden_size", True, "must be a whole number of at least 1, is true"),
        ("num_hidden_layers", 0, "must be a whole number of at least 1, is 0"),
        ("num_hidden_layers", 1 << 40, "must be at most 65536, is 1099511627776"),
        ("rms_norm_eps", None, "is missing"),
        ("rope_theta", "1e4", 'must be a finite number, is "1e4"'),
        ("num_attention_heads", 7, "is 7, does not divide hidden_size 64"),
        ("mlp_bias", "yes", 'must be true or false, is "yes"'),
        ("rope_scaling", [1], "must be an object, is [1]"),
    ],
)
def test_wrong_values(key: str, value: Any, text: str) -> None:
    assert refusal(LLAMA | {key: value}, FormatError) == f"config.json: {key} {text}"


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantized_checkpoint_is_refused_before_its_weights(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedError, match=f'{key}: the checkpoint is quantized already \\("gptq"\\)'):
        convert(tmp_path, tmp_path / "m.mlb")
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


# --- the registry


def test_model_types_are_unique() -> None:
    types = [t for f in FAMILIES for t in f.model_types]
    assert len(types) == len(set(types))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_defaults_are_those_of_transformers(family: Family) -> None:
    config = transformers.CONFIG_MAPPING[family.model_types[0]](
        rope_parameters=None if family.name != "ministral3" else {}
    )
    for key, value in family.defaults.items():
        if key in ("rope_theta", "partial_rotary_factor"):
            params = config.rope_parameters
            params = params.get(FULL, params)
            assert params[key] == value, key
        elif key not in ("sliding_window", "sliding_window_pattern", "full_attention_interval"):
            assert getattr(config, key) == value, key


def test_every_family_has_a_checkpoint_in_the_tests() -> None:
    tested = {family_of(ModelConfig(c.make_config().to_dict(), "")).name for c in CHECKPOINTS.values()}
    assert tested == {f.name for f in FAMILIES}


GOLDEN = {
    "llama3": "40 03 08 02 60 65 0200 10000 1e-06 head_dim=16 rope_factor=8 rope_high_freq_factor=4 "
    "rope_low_freq_factor=1 rope_orig_max_seq=64 rope_type=1",
    "gemma3": "40 03 08 02 60 65 0200 100000 1e-06 act=1 attn_scale=0.204124145 embed_scale=8 flags=030003 head_dim=16 "
    "layer_flags=1 post_norms=1 qk_norm=1 rope_factor=8 rope_local_theta=1000 rope_type=2 shared_classifier=1 "
    "sliding_window=9",
    "qwen3_5": "40 03 08 02 60 65 0200 10000 1e-06 attn_gate=1 flags=080800 head_dim=16 layer_flags=1 lin_conv=4 "
    "lin_k_dim=8 lin_k_heads=2 lin_v_dim=16 lin_v_heads=4 qk_norm=1 rot_dim=4",
    "qwen2": "40 03 08 02 60 65 0200 10000 1e-06 qkv_bias=1",
    "glm4": "40 03 08 02 60 65 0200 10000 1e-06 head_dim=16 post_norms=1 rot_dim=8",
    "helium": "40 03 08 02 60 65 0200 100000 1e-06",
    "mistral": "40 03 08 02 60 65 0200 10000 1e-06 head_dim=16 sliding_window=9",
    "ministral": "40 03 08 02 60 65 0200 10000 1e-06 flags=010001 head_dim=16 layer_flags=1 sliding_window=9",
    "ministral3": "40 03 08 02 60 65 0200 10000 1e-06 head_dim=16 rope_attn_factor=1.06482163 rope_factor=4 "
    "rope_high_freq_factor=1 rope_low_freq_factor=32 rope_orig_max_seq=64 rope_type=3",
    "qwen3": "40 03 08 02 60 65 0200 10000 1e-06 head_dim=16 qk_norm=1 shared_classifier=1",
    "gemma2": "40 03 08 02 60 65 0200 10000 1e-06 act=1 attn_scale=0.301511345 attn_softcap=5 embed_scale=8 "
    "final_softcap=3 flags=010001 head_dim=16 layer_flags=1 post_norms=1 shared_classifier=1 sliding_window=9",
    "smollm3": "40 03 08 02 60 65 0200 2e+06 1e-06 flags=000400 head_dim=16 layer_flags=1 shared_classifier=1",
    "phi3": "40 03 08 02 60 65 0200 10000 1e-06 sliding_window=9",
    "glm": "40 03 08 02 60 65 0200 10000 1e-06 head_dim=16 qkv_bias=1 rot_dim=8",
    "seed_oss": "40 03 08 02 60 65 0200 10000 1e-06 head_dim=16 qkv_bias=1",
    "ernie4_5": "40 03 08 02 60 65 0200 500000 1e-06 head_dim=16 shared_classifier=1",
}


def test_every_family_has_a_golden_header() -> None:
    assert {family_of(ModelConfig(CHECKPOINTS[n].make_config().to_dict(), "")).name for n in GOLDEN} == {
        f.name for f in FAMILIES
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_header(name: str) -> None:
    raw = CHECKPOINTS[name].make_config().to_dict()
    got = fields(raw)
    sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")
    shown = [f"{got.pop(k):02x}" for k in sizes] + [f"{raw['vocab_size']:02x}", f"{got.pop('max_seq'):04x}"]
    shown += [f"{got.pop('rope_theta'):g}", f"{got.pop('norm_eps'):g}"]
    rest = {k: v.hex() if isinstance(v, bytes) else f"{v:.9g}" for k, v in got.items() if v}
    assert " ".join(shown + [f"{k}={rest[k]}" for k in sorted(rest)]) == GOLDEN[name]
    assert set(rest) - {"flags"} <= {f.name for f in LAYOUT.fields}
