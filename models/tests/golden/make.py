#!/usr/bin/env python3
"""Makes the folders beside it with Hugging Face transformers (5.17.0) and PyTorch on a CPU: structures that the
checkpoints of the repository's tests/golden lack. Sizes are small, weights random from a seed, float32.

    python make.py [folder ...]        # all of them without an argument; MOEBIUS_GOLDEN_OUT: another place

A folder has config.json and model.safetensors as `save_pretrained` writes them (config.json of some with keys as in
published folders, from which the model is then loaded again), and golden.safetensors: input_ids
[2, S] I64, logits [2, S, V], loss (mean cross-entropy of the next token), and gradients of the loss `whole_grad.<name>`
of some parameters outside the experts in some folders.
"""
import importlib
import json
import os
import pathlib
import shutil
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file

V, H = 61, 32
SIZES = dict(vocab_size=V, hidden_size=H, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=None, bos_token_id=1, eos_token_id=2)
LATENT = dict(kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4,
              intermediate_size=40, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
              num_experts_per_tok=2, first_k_dense_replace=1)
QWEN3 = dict(intermediate_size=40, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
             norm_topk_prob=True, head_dim=16)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
             moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
             head_dim=16, num_hidden_layers=3,
             layer_types=["linear_attention", "full_attention", "linear_attention"])
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=32)
MIXTRAL = dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
GROUPS = dict(q_lora_rank=16, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5)

ONE = dict(QWEN3, num_hidden_layers=1)
# Folders with gradients: of what has operations of its own.
GRADIENTS = ["mixtral_window", "phimoe_longrope", "olmoe_clip", "deepseek_v3_yarn", "gpt_oss_long", "llama4_chunked",
             "hunyuan_v1_moe_alpha", "qwen3_next_delta", "qwen3_5_moe_delta"]

# folder: what to change in config.json as it is saved, None to leave a key out. The golden is of the model that
# transformers then loads.
PUBLISHED = {
    "qwen3_moe_rope_scaling": dict(rope_parameters=None, rope_theta=2e4, rope_scaling=dict(
        type="yarn", factor=8.0, original_max_position_embeddings=32)),
    "deepseek_v3_rope_scaling": dict(rope_parameters=None, rope_theta=2e4, rope_scaling=dict(
        type="yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1, mscale=1.0,
        mscale_all_dim=1.0)),
    "deepseek_v3_absent": dict(routed_scaling_factor=None, first_k_dense_replace=None, n_group=None, topk_group=None,
                               norm_topk_prob=None, rope_interleave=None),
    "glm4_moe_absent": dict(first_k_dense_replace=None, n_group=None, topk_group=None, norm_topk_prob=None,
                            routed_scaling_factor=None, rope_parameters=None, rope_theta=1e4,
                            partial_rotary_factor=0.5),
    "gpt_oss_plain": dict(sliding_window=None),
    "qwen3_moe_original": dict(original_max_position_embeddings=16),
}

# folder: (module, configuration class, model class, tokens S, configuration)
FOLDERS = {
    "mixtral_window": ("mixtral", "MixtralConfig", "MixtralForCausalLM", 150, dict(MIXTRAL, sliding_window=21)),
    "qwen2_moe_window": ("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", 40,
                         dict(intermediate_size=40, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                              num_experts=4, num_experts_per_tok=2, use_sliding_window=True, sliding_window=7,
                              max_window_layers=2)),
    "qwen3_moe_linear_tied": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 40,
                              dict(QWEN3, tie_word_embeddings=True, attention_bias=True, use_sliding_window=True,
                                   sliding_window=9,
                                   rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "qwen3_moe_dynamic": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 40,
                          dict(ONE, max_position_embeddings=16,
                               rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0))),
    "qwen3_moe_yarn": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 40, dict(ONE, rope_parameters=YARN)),
    "qwen3_moe_llama3": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 40,
                         dict(ONE, rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0,
                                                          low_freq_factor=1.0, high_freq_factor=4.0,
                                                          original_max_position_embeddings=32))),
    "qwen3_moe_longrope": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 40,
                           dict(ONE, rope_parameters=dict(
                               rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=16,
                               short_factor=[1.0 + 0.1 * i for i in range(8)],
                               long_factor=[1.5 + 0.5 * i for i in range(8)]))),
    "phimoe_longrope": ("phimoe", "PhimoeConfig", "PhimoeForCausalLM", 24,
                        dict(MIXTRAL, attention_bias=True, lm_head_bias=True, sliding_window=11,
                             rope_parameters=dict(
                                 rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=32,
                                 short_factor=[1.0 + 0.2 * i for i in range(4)],
                                 long_factor=[1.5 + 0.5 * i for i in range(4)],
                                 short_mscale=1.1, long_mscale=1.3))),
    "olmoe_clip": ("olmoe", "OlmoeConfig", "OlmoeForCausalLM", 24,
                   dict(intermediate_size=16, num_experts=4, num_experts_per_tok=2, clip_qkv=0.7)),
    "granitemoeshared": ("granitemoeshared", "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", 24,
                         dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
                              shared_intermediate_size=24, embedding_multiplier=3.0, residual_multiplier=0.5,
                              attention_multiplier=0.2, logits_scaling=2.0, tie_word_embeddings=True)),
    "deepseek_v2_yarn": ("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", 40,
                         dict(LATENT, q_lora_rank=None, topk_method="greedy", attention_bias=True,
                              rope_parameters=dict(YARN, mscale=0.707, mscale_all_dim=0.707))),
    "deepseek_v3_yarn": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", 80,
                         dict(LATENT, **GROUPS, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0))),
    "deepseek_v3_halves": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", 24,
                           dict(LATENT, **GROUPS, rope_interleave=False, attention_bias=True)),
    "gpt_oss_long": ("gpt_oss", "GptOssConfig", "GptOssForCausalLM", 150,
                     dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, head_dim=8,
                          sliding_window=13)),
    "glm4_moe_plain": ("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM", 24,
                       dict(intermediate_size=40, moe_intermediate_size=16, n_routed_experts=4,
                            num_experts_per_tok=2, head_dim=16)),
    "minimax_m2_part": ("minimax_m2", "MiniMaxM2Config", "MiniMaxM2ForCausalLM", 24,
                        dict(MIXTRAL, head_dim=16,
                             rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "llama4_chunked": ("llama4", "Llama4TextConfig", "Llama4ForCausalLM", 150,
                       dict(intermediate_size=16, intermediate_size_mlp=40, num_local_experts=4,
                            num_experts_per_tok=1, interleave_moe_layer_step=2, head_dim=8, num_hidden_layers=4,
                            attention_chunk_size=12, no_rope_layer_interval=2, floor_scale=16, attn_scale=0.3,
                            rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
                                                 high_freq_factor=4.0, original_max_position_embeddings=32))),
    "ernie4_5_moe_bias": ("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", 24,
                          dict(intermediate_size=40, moe_intermediate_size=16, moe_num_experts=4, moe_k=2,
                               moe_num_shared_experts=2, moe_layer_start_index=1, tie_word_embeddings=True,
                               use_bias=True)),
    "hunyuan_v1_moe_alpha": ("hunyuan_v1_moe", "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", 24,
                             dict(intermediate_size=16, num_experts=4, moe_topk=2, head_dim=16,
                                  rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, alpha=100.0,
                                                       factor=1.0))),
    "qwen3_next_delta": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", 150,
                         dict(DELTA, intermediate_size=40, norm_topk_prob=True, mlp_only_layers=[0])),
    "qwen3_5_moe_delta": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", 80, DELTA),
    "deepseek_v2_bias": ("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", 24,
                         dict(LATENT, q_lora_rank=16, topk_method="greedy", mlp_bias=True)),
    "phimoe_longrope_beyond": ("phimoe", "PhimoeConfig", "PhimoeForCausalLM", 24,
                               dict(MIXTRAL, rope_parameters=dict(
                                   rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=12,
                                   short_factor=[1.0 + 0.2 * i for i in range(4)],
                                   long_factor=[1.5 + 0.5 * i for i in range(4)],
                                   short_mscale=1.1, long_mscale=1.3))),
    "phimoe_yarn": ("phimoe", "PhimoeConfig", "PhimoeForCausalLM", 24,
                    dict(MIXTRAL, rope_parameters=dict(
                        rope_type="yarn", rope_theta=1e4, original_max_position_embeddings=12, factor=4.0,
                        short_mscale=1.1, long_mscale=1.3))),
    "gpt_oss_plain": ("gpt_oss", "GptOssConfig", "GptOssForCausalLM", 150,
                      dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, head_dim=8,
                           attention_bias=False, layer_types=["full_attention", "sliding_attention"])),
    "granitemoe_bias": ("granitemoe", "GraniteMoeConfig", "GraniteMoeForCausalLM", 24,
                        dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, attention_bias=True)),
    "llama4_plain": ("llama4", "Llama4TextConfig", "Llama4ForCausalLM", 24,
                     dict(intermediate_size=16, intermediate_size_mlp=40, num_local_experts=4, num_experts_per_tok=2,
                          moe_layers=[0, 2], head_dim=8, num_hidden_layers=3, attention_chunk_size=12,
                          no_rope_layers=[0, 1, 1], use_qk_norm=False, attn_temperature_tuning=False, floor_scale=8,
                          attention_bias=True)),
    "hunyuan_v1_moe_lists": ("hunyuan_v1_moe", "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", 24,
                             dict(intermediate_size=16, num_experts=4, moe_topk=[2, 3], head_dim=16,
                                  attention_bias=True)),
    "olmoe_bias": ("olmoe", "OlmoeConfig", "OlmoeForCausalLM", 24,
                   dict(intermediate_size=16, num_experts=4, num_experts_per_tok=2, attention_bias=True,
                        norm_topk_prob=True)),
    "qwen2_moe_plain": ("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", 24,
                        dict(intermediate_size=40, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                             num_experts=4, num_experts_per_tok=2, qkv_bias=False, norm_topk_prob=True,
                             mlp_only_layers=[0], layer_types=["full_attention", "full_attention"])),
    "qwen3_moe_rope_scaling": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 40, ONE),
    "deepseek_v3_rope_scaling": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", 40,
                                 dict(LATENT, **GROUPS)),
    "deepseek_v3_absent": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", 12,
                           dict(LATENT, q_lora_rank=16, num_hidden_layers=4, n_routed_experts=16, n_group=8,
                                topk_group=4, first_k_dense_replace=3, routed_scaling_factor=2.5,
                                moe_intermediate_size=8)),
    "glm4_moe_absent": ("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM", 12,
                        dict(intermediate_size=40, moe_intermediate_size=16, n_routed_experts=4,
                             num_experts_per_tok=2, head_dim=16, use_qk_norm=True, attention_bias=True)),
    "qwen3_moe_original": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 40, dict(ONE, rope_parameters=YARN)),
    "dbrx_plain": ("dbrx", "DbrxConfig", "DbrxForCausalLM", 24,
                   dict(d_model=H, n_heads=4, n_layers=2, max_seq_len=64, attn_config=dict(kv_n_heads=2, clip_qkv=2.0, rope_theta=2e4),
                        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2,
                                        moe_normalize_expert_weights=None),
                        rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
    "dbrx_norm": ("dbrx", "DbrxConfig", "DbrxForCausalLM", 24,
                  dict(d_model=H, n_heads=4, n_layers=1, max_seq_len=64, attn_config=dict(kv_n_heads=4, clip_qkv=0.7, rope_theta=2e4),
                       ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2,
                                       moe_normalize_expert_weights=2.0))),
}


def build(name):
    module, config_class, model_class, tokens, settings = FOLDERS[name]
    module = importlib.import_module(f"transformers.models.{module}")
    torch.manual_seed(1 + list(FOLDERS).index(name))
    sizes = dict(vocab_size=V) if module.__name__.endswith("dbrx") else SIZES
    config = getattr(module, config_class)(**{**sizes, **settings})
    config._attn_implementation = "eager"
    model = getattr(module, model_class)(config).eval().float()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "A_log" in key:
                # Weak decays: with strong ones the reference's differences of sums cancel in float32.
                p.uniform_(-4.0, -1.0)
            elif "correction_bias" in key:
                p.normal_(0, 0.05)
            elif p.dim() == 1:
                # Norms around what they begin with, biases and sinks around 0.
                p.add_(torch.randn_like(p) * 0.3)
            elif "embed" in key or "wte" in key:
                p.normal_(0, 1)
            else:
                p.normal_(0, 1.5 * p.shape[-1] ** -0.5)
        for key, b in model.named_buffers():
            if "correction_bias" in key:
                b.normal_(0, 0.05)
    out = pathlib.Path(os.environ.get("MOEBIUS_GOLDEN_OUT", pathlib.Path(__file__).parent)) / name
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    for extra in out.glob("generation_config.json"):
        extra.unlink()
    if name in PUBLISHED:
        saved = json.loads((out / "config.json").read_text())
        saved = {key: value for key, value in (saved | PUBLISHED[name]).items() if value is not None}
        (out / "config.json").write_text(json.dumps(saved, indent=2) + "\n")
        model = getattr(module, model_class).from_pretrained(out, attn_implementation="eager").eval()
    ids = torch.randint(0, V, (2, tokens))
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1))
    loss.backward()
    golden = dict(input_ids=ids, logits=logits.detach().contiguous(), loss=loss.detach())
    on_disk = load_file(out / "model.safetensors")
    for key, p in model.named_parameters():
        outside = not any(word in key for word in ("expert", "router", "block_sparse_moe", ".gate.", "shared_m", "embed", "lm_head"))
        if name in GRADIENTS and outside and key in on_disk and p.grad is not None:
            golden[f"whole_grad.{key}"] = p.grad.contiguous()
    save_file(golden, out / "golden.safetensors")
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"{name:24} loss {loss.item():.4f} {sum(k.startswith('whole') for k in golden)} gradients {size >> 10} KiB")


for name in sys.argv[1:] or FOLDERS:
    build(name)
