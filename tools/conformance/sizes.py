"""Small sizes for configurations: by the names of their fields, with exceptions for a few types."""

from collections.abc import Callable
from typing import Any

VOCAB_SIZE = 128
FIRST_TOKEN = 24  # prompts have no token below: configurations give these a meaning (padding, images, ..)
DEPTH, SIDE_DEPTH = 6, 2  # least layers of a language model; layers of a vision or audio tower
WINDOW = 8  # shorter than prompts and generated tokens

# The first pattern that matches a whole field name gives its size, unless the default is smaller. ``depth`` is the
# requested number of layers.
SIZES: tuple[tuple[str, int | str], ...] = (
    (r"num_hidden_layers|n_layers?|num_layers|depth|(num_)?(en|de)coder_layers|num_blocks|layers", "depth"),
    (r"type_vocab_size|n_group|num_expert_group|(mamba_)?n_?groups|index_topk_blocks|index_kpool", 2),
    (r".*vocab_size.*", VOCAB_SIZE),
    (r".*(key_value|kv)_heads|num_query_groups|linear_num_(key_)?heads", 2),
    (
        r".*n_heads|.*num_heads|.*attention_heads|n_head|linear_num_value_heads|index_(topk|block_size)|indexer_budget",
        4,
    ),
    (r"qk_rope_head_dim|rotary_dim|(mamba_d|ssm)_state(_size)?|state_size", 8),
    (r"qk_head_dim", 24),
    (r".*head_dim|d_head|dim_head|mamba_d_head|mamba_headdim|kv_channels|.*head_size|.*_rank|.*lowrank", 16),
    (r"moe_.*intermediate_size|.*expert.*(intermediate|hidden|ffn).*_size|expert_dim", 32),
    (r".*intermediate_size.*|.*ffn_(dim|hidden_size)|n_inner|dff|dim_ff|d_inner|feed_forward_size|ff_dim", 96),
    (r"(moe_)?num_shared_experts|n_shared_experts|topk_group", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|num_selected_experts|expert_topk", 2),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|zero_expert_num|num_routed_experts|ffn_num_experts", 8),
    (
        r".*sliding_window|(.*_)?window_size|local_attention(_window_len)?|.*chunk_(size|length)|block_multiple_of",
        WINDOW,
    ),
    (r"floor_scale|log_scaling_n_floor", WINDOW),  # positions from which on queries are scaled
    (r"num_buckets|relative_max_distance", WINDOW),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|.*max_position.*|model_max_length|context_length", 128),
    (r"max_(source|target)_positions|rel_extent|max_sequence_length|seq_length", 128),
    (r"hidden_size_per_layer_input|vocab_size_per_layer_input", 16),
    (r".*hidden_size|d_model|n_embd|n_embed|emb_dim|.*embedding_size|embedding_dim|word_embed_proj_dim|hidden_dim", 64),
    (r".*embed_dim|dim|lru_width|output_dim|projection_dim|projector_hidden_dim|.*out_hidden_size", 64),
    (r".*(out|in)put_dim|projector_dim|adapter_(in|out)_dim|adapter_input_size", 64),
    (r"base_channels", 32),  # channels are normalised in 32 groups
    (r"image_size|num_mel_bins|feature_size", 16),
    (r"patch_size|spatial_patch_size", 4),
)

# Settings besides sizes, for configurations that have such a field and no adjustment of it.
SETTINGS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": True}
SETTINGS["is_decoder"] = True  # makes BERT and similar types causal

# Sizes that some configurations leave unset, though the model needs them.
UNSET: dict[str, int] = {"head_dim": 16, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2}


def _repeat(*kinds: object) -> Callable[[int], list[object]]:
    """Return a function of the depth that repeats `kinds`."""
    return lambda depth: [kinds[index % len(kinds)] for index in range(depth)]


SLIDING = _repeat("sliding_attention", "full_attention")
WINDOWS = {"layer_types": SLIDING, "sliding_window": WINDOW}
# Shared weights need several hybrid layers to be shared by.
HYBRID = {"layers_block_type": _repeat("linear_attention", "linear_attention", "hybrid")}

# Settings of single types that their sizes by name cannot have.
ADJUSTMENTS: dict[str, dict[str, Any]] = {
    # heads x head dim = expand x hidden size
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [2, 5]},
    "falcon_h1": {"mamba_n_heads": 16, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8},
    # the same, and the default has no kinds of layers
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": _repeat("linear_attention", "full_attention")},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, **HYBRID},  # attention is twice as wide
    "zamba2": HYBRID,
    "longcat_flash": {"head_dim": 8},  # head_dim is that of rotary positions
    "xlstm": {"qk_dim_factor": 1.0},  # widths of heads are rounded up to 64 values in all
    "xmod": {"default_language": "en_XX"},  # a language has to be chosen
    # the default has one kind of layers, the code has two; the default has no rotary parameters for them
    "cohere_compass_text": {
        **WINDOWS,
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": 1e4} for kind in ("full", "sliding")
        },
    },
    # layers that share a KV cache need one of their kind before them
    "gemma3n_text": {
        "layer_types": SLIDING,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "activation_sparsity_pattern": lambda depth: [0.5] * 2 + [0.0] * (depth - 2),
    },
    # kinds of layers are told as patterns and how often
    "gpt_neo": {"attention_types": lambda depth: [[["global", "local"], depth // 2]]},
    # the default has one kind of layers (lfm2_moe: none), released checkpoints have two
    "lfm2": {"layer_types": _repeat("conv", "conv", "full_attention")},
    "lfm2_moe": {"layer_types": _repeat("conv", "conv", "full_attention")},
    "laguna": {"layer_types": SLIDING},
    # the default has one kind of layers (dots1: no shared experts), the code has two
    "mellum": WINDOWS,
    "ministral": WINDOWS,
    **{kind: WINDOWS | {"use_sliding_window": True} for kind in ("qwen2", "qwen2_moe", "qwen3", "smollm3")},
    "dots1": WINDOWS | {"use_sliding_window": True, "n_shared_experts": 1},
    "zaya": {"layer_types": _repeat("hybrid", "hybrid_sliding"), "sliding_window": WINDOW},
    # the default has an indexer in each layer, others share one
    "glm_moe_dsa": {"indexer_types": _repeat("full", "shared")},
    # the default has no sparse layers, released checkpoints do
    "minimax_m3_vl_text": {"layer_types": _repeat("full_attention", "minimax_m3_sparse"), "index_n_heads": 2},
    # rates of compression are a dictionary; the default lacks a kind of layers
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": WINDOW},
        "layer_types": _repeat("heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"),
    },
    # the default has an indexer, and keys and values, in each layer, others share them
    "mistral_large4_text": {
        "indexer_types": lambda depth: ["full"] * 4 + ["shared", "full"] * (depth // 2 - 2),
        "kv_source_layers": lambda depth: [0, 1, 2, 3] + [2] * (depth - 4),
    },
    "minimax": {"block_size": WINDOW},  # blocks of linear attention are no longer than windows
    # the default has no experts, released checkpoints do
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    # depth is the length of a list; axial positions have fixed sizes
    "reformer": {"attn_layers": _repeat("local", "lsh"), "axial_pos_embds": False},
    # the default has no sizes for its indexer and a vocabulary of 20 million n-grams
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "ple_layer_ids": [2], "ple_embed_dim": 64, "heads_per_ngram": 2},
        **{"ngram_vocab_size_base": 64, "split_ngram_parts": 2},
    },
    # the default attention has no rotary base, as released ones have
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "dots3_note_text": {"head_dim": 32},  # head dim = rotary + plain dims in sliding layers
    "emu3": {"vocabulary_map": {"<|extra_200|>": 3, "<image>": 4}},  # images need names in the vocabulary
    "deepseek_ocr2_text": {"mlp_layer_types": _repeat("dense", "sparse")},  # the default has no kinds of layers
    # experts of text and of images have sizes of their own
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 16]},
    # the default has no layers that images go to
    "granite4_vision": {"deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2"},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},  # the default names layers of a deep tower
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},  # the default is refused by itself
    "hrm_text": {"num_hidden_layers": 2},  # each of its layers runs several times, and roundings grow
    "blt": {"encoder_hash_byte_group_vocab": 64},  # hash tables of half a million rows
}
