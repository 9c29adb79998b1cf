"""A tiny config for every model type of the installed mlx-lm, and what each one must be given.

Values go by the name of a field of ``ModelArgs``; families differ only where the table says so.
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx_lm.models

VOCAB_SIZE = 320
WINDOW = 12
NUM_LAYERS = 4

_WINDOW_TYPES = ("sliding_attention", "full_attention") * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_FIELDS: Mapping[str, Any] = {
    # Sizes, under every name that they go by.
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), NUM_LAYERS),
    "num_transformer_layers": NUM_LAYERS,
    **dict.fromkeys(("intermediate_size", "n_inner", "ff_intermediate_size", "block_ff_dim"), 96),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size", "intermediate_size_mlp"), 96),
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    "num_attention_groups": 2,
    **dict.fromkeys(("head_dim", "kv_channels", "hidden_size_per_head"), 16),
    **dict.fromkeys(("vocab_size", "num_vocab"), VOCAB_SIZE),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1e-5),
    **dict.fromkeys(("layernorm_epsilon", "norm_epsilon"), 1e-5),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length"), 4096),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), 10000.0),
    "rotary_dim": 8,
    "rotary_pct": 0.5,
    "partial_rotary_factor": 0.5,
    # Windows shorter than any prompt that is tried.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    "window_size": WINDOW,
    "sliding_window_pattern": 2,
    "layer_types": _WINDOW_TYPES,
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    "moe_top_k": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_expert_dim"), 48),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "decoder_sparse_step"), 1),
    "mlp_only_layers": (),
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    # Attention over a compressed K and V.
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    # States.
    **dict.fromkeys(("conv_kernel", "linear_conv_kernel_dim", "conv1d_width"), 4),
    **dict.fromkeys(("mamba_d_conv", "short_conv_kernel_size"), 4),
    "conv_L_cache": 3,
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    "time_step_rank": 4,
    "time_step_limit": (0.0, 1.0),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "group_norm_size": 2,
    # Switches and factors that have no default.
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "conv_bias"), False),
    **dict.fromkeys(("mamba_proj_bias", "bias", "use_cla", "tie_word_embeddings"), False),
    **dict.fromkeys(("use_conv_bias", "use_qk_norm", "qk_norm", "post_norm", "norm_head"), True),
    **dict.fromkeys(("logits_scaling", "attention_multiplier", "embedding_multiplier"), 1.0),
    **dict.fromkeys(
        ("residual_multiplier", "scale_depth", "scale_emb", "query_pre_attn_scalar"), 1
    ),
    "dim_model_base": 64,
    "rope_scaling": None,
}

_TEXT_OF: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Models that wrap the text part of another type."""

_YARN = {
    **_ROPE,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_LINEAR_TYPES = ("linear_attention", "full_attention") * 2
_MAMBA_TYPES = ("mamba", "attention") * 2
_LFM: Mapping[str, Any] = {
    "layer_types": ("conv", "full_attention") * 2,
    "full_attn_idxs": (1, 3),
    "block_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "use_expert_bias": True,
}
_KIMI_LINEAR: Mapping[str, Any] = {
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    }
}
_LONGCAT: Mapping[str, Any] = {
    "num_layers": 2,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_PROPORTIONAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "baichuan_m1": {"sliding_window_layers": (1, 3), "conv_window": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "greedy"},
    "deepseek_v41": {
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": (False, True) * 2},
    "gemma3n": {
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": (0.5, 0.0, 0.0, 0.0),
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
    },
    "glm_moe_dsa": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": _ROPE,
    },
    "granitemoehybrid": {"layer_types": _MAMBA_TYPES},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "cla_share_factor": 2,
        "use_cla": True,
        "rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {**_KIMI_LINEAR, "activation_situ_linear_beta": 1.0},
    "kimi_linear": _KIMI_LINEAR,
    "lfm2": _LFM,
    "lfm2_moe": _LFM,
    "lille-130m": {"block_size": 4096},
    "llama4": {
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"no_rope_layers": (1, 1, 0, 1)},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {
        **_LONGCAT,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mellum": {"rope_parameters": _PROPORTIONAL},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": (0, 1, 0, 1),
        "moe_layer_freq": (0, 1, 1, 1),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm3": {
        "rope_scaling": {
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        }
    },
    "minimax_m3_vl": {
        "moe_layer_freq": (0, 1, 1, 1),
        "layer_types": ("full_attention", "sparse_attention") * 2,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "ministral3": {"rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN, "qk_head_dim": 16},
    "muse_spark": {
        "post_norm_eps": 1e-5,
        "rope_parameters": _ROPE,
        "layer_rope_theta": (10000.0, 0.0) * 2,
        "final_logit_softcapping": 30.0,
        "output_multiplier": 1.0,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": (
            *({"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},) * 3,
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
        )
    },
    "nemotron_h": {"layer_types": None, "hybrid_override_pattern": ("M", "*", "M", "-")},
    "olmo_hybrid": {"layer_types": _LINEAR_TYPES, "linear_allow_neg_eigval": True},
    "openelm": {
        "ffn_dim_divisor": 8,
        "num_query_heads": (4,) * NUM_LAYERS,
        "num_kv_heads": (2,) * NUM_LAYERS,
        "ffn_multipliers": (1.0,) * NUM_LAYERS,
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0},
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {"hidden_size": 128},
    "recurrent_gemma": {"block_types": ("recurrent", "attention"), "logits_soft_cap": 30.0},
    "rwkv7": dict.fromkeys(
        ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 16
    ),
    "spark2_5": {"rope_parameters": _PROPORTIONAL},
}


def model_types() -> tuple[str, ...]:
    """Names of the modules of mlx-lm that define a model, whether or not they can be imported."""
    found: list[str] = []
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        spec = importlib.util.find_spec(f"{mlx_lm.models.__name__}.{info.name}")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        if "\nclass Model(" in source and "ModelArgs" in source:
            found.append(info.name)
    return tuple(sorted(found))


def zoo_config(model_type: str) -> dict[str, Any]:
    """A config.json's content for a tiny model of a type.

    Raises:
        ImportError: The module can't be imported here.
    """
    try:
        module = importlib.import_module(f"mlx_lm.models.{model_type}")
    except SystemExit as error:
        raise ImportError(f"mlx_lm.models.{model_type} ends the process") from error
    return {"model_type": model_type, **_config(module, model_type)}


def _config(module: ModuleType, model_type: str) -> dict[str, Any]:
    overrides = dict(_OVERRIDES.get(model_type, {}))
    if model_type in _TEXT_OF:
        text = zoo_config(_TEXT_OF[model_type])
        text = text.get("text_config", text) | overrides
        return {"text_config": text, "vocab_size": VOCAB_SIZE} | dict(_WRAPPERS.get(model_type, {}))
    text_args = next((getattr(module, n) for n in _TEXT_ARGS if hasattr(module, n)), None)
    if text_args is not None:
        return {"text_config": {**_fields(text_args, overrides), "model_type": model_type}}
    return _fields(module.ModelArgs, overrides)


_WRAPPERS: Mapping[str, Mapping[str, Any]] = {
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.1.self_attn.q_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 0,
            }
        ],
    }
}
_TEXT_ARGS = ("TextArgs", "TextModelArgs", "TextConfig")


def _fields(args: type, overrides: Mapping[str, Any]) -> dict[str, Any]:
    names = inspect.signature(args).parameters
    values = {k: v for k, v in {**_FIELDS, **overrides}.items() if k in names or k in overrides}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
