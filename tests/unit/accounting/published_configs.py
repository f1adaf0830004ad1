"""The config.json of published models, with the keys that determine their sizes."""

from typing import Any


def _config(
    model_type: str, width: int, layers: int, heads: int, inner: int, vocab: int, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        **others,
    }


def _llama(*sizes: int, **others: Any) -> dict[str, Any]:
    return _config("llama", *sizes, **others)


def _qwen(generation: str, *sizes: int, key_heads: int, **others: Any) -> dict[str, Any]:
    return _config(f"qwen{generation}", *sizes, num_key_value_heads=key_heads, **others)


def _gemma(kind: str, *sizes: int, key_heads: int, head: int) -> dict[str, Any]:
    return _config(kind, *sizes, num_key_value_heads=key_heads, head_dim=head)


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 50_257, "n_positions": 1024, **sizes}


def _falcon(width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "falcon", "vocab_size": 65_024, **sizes, **others}


_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 8, "bias": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 2 7B": _llama(4096, 32, 32, 11_008, 32_000),
    "Llama 3 8B": _llama(4096, 32, 32, 14_336, 128_256, num_key_value_heads=8),
    "Llama 3.1 405B": _llama(16_384, 126, 128, 53_248, 128_256, num_key_value_heads=8),
    "Llama 3.2 1B": _llama(
        2048, 16, 32, 8192, 128_256, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True
    ),
    "Mistral 7B": _config("mistral", 4096, 32, 32, 14_336, 32_000, num_key_value_heads=8),
    "Mistral Nemo 12B": _config(
        "mistral", 5120, 40, 32, 14_336, 131_072, num_key_value_heads=8, head_dim=128
    ),
    "Qwen2 0.5B": _qwen("2", 896, 24, 14, 4864, 151_936, key_heads=2, tie_word_embeddings=True),
    "Qwen2 7B": _qwen("2", 3584, 28, 28, 18_944, 152_064, key_heads=4),
    "Qwen2 72B": _qwen("2", 8192, 80, 64, 29_568, 152_064, key_heads=8),
    "Qwen3 0.6B": _qwen("3", 1024, 28, 16, 3072, 151_936, key_heads=8, tie_word_embeddings=True),
    "Qwen3 8B": _qwen("3", 4096, 36, 32, 12_288, 151_936, key_heads=8),
    "Qwen3 32B": _qwen("3", 5120, 64, 64, 25_600, 151_936, key_heads=8),
    "Gemma 2 2B": _gemma("gemma2", 2304, 26, 8, 9216, 256_000, key_heads=4, head=256),
    "Gemma 2 27B": _gemma("gemma2", 4608, 46, 32, 36_864, 256_000, key_heads=16, head=128),
    "Gemma 3 1B": _gemma("gemma3_text", 1152, 26, 4, 6912, 262_144, key_heads=1, head=256),
    "Gemma 3 4B": _gemma("gemma3_text", 2560, 34, 8, 10_240, 262_208, key_heads=4, head=256),
    "Phi 3 mini": _config("phi3", 3072, 32, 32, 8192, 32_064),
    "Phi 3 medium": _config("phi3", 5120, 40, 40, 17_920, 32_064, num_key_value_heads=10),
    "OLMo 2 7B": _config("olmo2", 4096, 32, 32, 11_008, 100_352),
    "OLMo 2 32B": _config("olmo2", 5120, 64, 40, 27_648, 100_352, num_key_value_heads=8),
    "GPT-2": _gpt2(768, 12, 12),
    "GPT-2 XL": _gpt2(1600, 48, 25),
    "Pythia 1.4B": _config("gpt_neox", 2048, 24, 16, 8192, 50_304),
    "GPT-NeoX 20B": _config("gpt_neox", 6144, 44, 64, 24_576, 50_432),
    "Falcon RW 1B": _falcon(
        2048, 24, 32, alibi=True, bias=True, multi_query=False, parallel_attn=False
    ),
    "Falcon 7B": _falcon(4544, 32, 71),
    "Falcon 40B": _falcon(8192, 60, 128, **_FALCON_40B),
    "Falcon 2 11B": _falcon(4096, 60, 32, num_ln_in_parallel_attn=1, **_FALCON_40B),
    "Mixtral 8x7B": _config(
        *("mixtral", 4096, 32, 32, 14_336, 32_000), num_key_value_heads=8, num_local_experts=8
    )
    | {"num_experts_per_tok": 2},
    "Mixtral 8x22B": _config(
        *("mixtral", 6144, 56, 48, 16_384, 32_768), num_key_value_heads=8, num_local_experts=8
    )
    | {"num_experts_per_tok": 2},
    "Qwen3 30B A3B": _qwen(
        *("3_moe", 2048, 48, 32, 6144, 151_936), key_heads=4, head_dim=128, num_experts=128
    )
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "Qwen3 with dense blocks": _qwen(
        *("3_moe", 1024, 12, 16, 3000, 151_936), key_heads=4, head_dim=64, num_experts=16
    )
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 700, "decoder_sparse_step": 2}
    | {"mlp_only_layers": [0, 1]},
    "DeepSeek V2 Lite": _config("deepseek_v2", 2048, 27, 16, 10_944, 102_400, **_LATENT)
    | {"q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2}
    | {"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    "DeepSeek V2": _config("deepseek_v2", 5120, 60, 128, 12_288, 102_400, **_LATENT)
    | {"q_lora_rank": 1536, "n_routed_experts": 160, "n_shared_experts": 2}
    | {"num_experts_per_tok": 6, "moe_intermediate_size": 1536, "first_k_dense_replace": 1},
    "DeepSeek V3": _config("deepseek_v3", 7168, 61, 128, 18_432, 129_280, **_LATENT)
    | {"q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3},
    "GPT-OSS 20B": _config(
        *("gpt_oss", 2880, 24, 64, 2880, 201_088), num_key_value_heads=8, num_local_experts=32
    )
    | {"num_experts_per_tok": 4, "head_dim": 64},
    "GPT-OSS 120B": _config(
        *("gpt_oss", 2880, 36, 64, 2880, 201_088), num_key_value_heads=8, num_local_experts=128
    )
    | {"num_experts_per_tok": 4, "head_dim": 64},
}
