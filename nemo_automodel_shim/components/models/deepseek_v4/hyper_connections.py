# SPDX-License-Identifier: Apache-2.0
"""Initial values of DeepSeek-V4's hyper-connection mixers and compressor norms.

``DeepseekV4ForCausalLM.initialize_weights`` of 0.5.0 leaves them as the memory was. The scheme is the one of the
Hugging Face implementation (``DeepseekV4PreTrainedModel._init_weights``): normal weight, zero base, unit scale.
"""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def init_hyper_connections(
    model: nn.Module,
    mixer_types: tuple[type[nn.Module], ...],
    compressor_types: tuple[type[nn.Module], ...],
    init_std: float,
) -> None:
    """Initialise in place every mixer and every compressor norm of ``model``.

    Args:
        model: The module to search.
        mixer_types: Classes whose own parameters are named ``[hc_]fn``, ``[hc_]base`` and ``[hc_]scale``.
        compressor_types: Classes with a norm named ``kv_norm``.
        init_std: Standard deviation of the mixers' weight.
    """
    for module in model.modules():
        if isinstance(module, mixer_types):
            for name, param in module.named_parameters(recurse=False):
                if name.endswith("fn"):
                    nn.init.normal_(param, mean=0.0, std=init_std)
                else:
                    nn.init.constant_(param, 0.0 if name.endswith("base") else 1.0)
        elif isinstance(module, compressor_types):
            module.kv_norm.reset_parameters()
