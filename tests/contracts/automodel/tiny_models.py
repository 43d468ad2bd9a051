# SPDX-License-Identifier: Apache-2.0
"""Models of the release that have an indexer, small enough for a CPU."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config
from nemo_automodel.components.models.deepseek_v4.layers import DeepseekV4Indexer
from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4ForCausalLM
from nemo_automodel.components.models.deepseek_v32.config import DeepseekV32Config
from nemo_automodel.components.models.deepseek_v32.layers import DeepseekV32Indexer
from nemo_automodel.components.models.deepseek_v32.model import DeepseekV32ForCausalLM
from nemo_automodel.components.models.glm_moe_dsa.model import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from torch import nn

from tests.contracts.automodel.upstream import cpu_backend

VOCABULARY = 256
# What multi-head latent attention with an indexer in each of two layers needs, in FP32.
_MLA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def build_deepseek_v4(**options: object) -> DeepseekV4ForCausalLM:
    """Four layers, one of which (layer 2) has an indexer and one (layer 3) a 128-token compressor, in BF16."""
    config = DeepseekV4Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "head_dim": 32,
            "qk_rope_head_dim": 16,
            "q_lora_rank": 32,
            "o_lora_rank": 32,
            "o_groups": 2,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "compress_ratios": [0, 0, 4, 128],
            "sliding_window": 32,
            "num_hash_layers": 0,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 4,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk": 8,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": 512,
            "torch_dtype": "bfloat16",
            **options,
        }
    )
    return DeepseekV4ForCausalLM(config, backend=cpu_backend())


def logits_of(output: object) -> torch.Tensor:
    """Logits of shape [batch, sequence, vocabulary]; before 0.5.0 the model returned them bare."""
    return getattr(output, "logits", output)


def build_deepseek_v32(**options: object) -> DeepseekV32ForCausalLM:
    """Two layers with an indexer each, in FP32."""
    return DeepseekV32ForCausalLM(DeepseekV32Config(**{**_MLA, "qk_head_dim": 16, **options}), backend=cpu_backend())


def build_glm_moe_dsa(**options: object) -> GlmMoeDsaForCausalLM:
    """Two layers with an indexer each, in FP32."""
    layers = {"mlp_layer_types": ["dense", "sparse"], "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**_MLA, **layers, **options}), backend=cpu_backend())


def seed_parameters(model: nn.Module, seed: int) -> None:
    """Give every parameter a seeded value.

    0.5.0's own initialisation leaves the hyper-connections as the memory was, and the loss with them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim >= 2:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.02)
            else:
                param.fill_(0.0 if name.endswith(("base", "sinks_param.weight")) else 1.0)


# The modules of these models that hand out indices only.
INDEXERS: tuple[type[nn.Module], ...] = (DeepseekV4Indexer, DeepseekV32Indexer)
if importlib.util.find_spec("nemo_automodel.components.models.glm_moe_dsa.layers"):
    # Until 0.5.0, GLM has that of DeepSeek-V3.2.
    INDEXERS += (importlib.import_module("nemo_automodel.components.models.glm_moe_dsa.layers").GlmMoeDsaIndexer,)


def indexer_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of every indexer module, by fully qualified name."""
    return {
        name: param
        for prefix, module in model.named_modules()
        if isinstance(module, INDEXERS)
        for name, param in module.named_parameters(prefix=prefix)
    }
