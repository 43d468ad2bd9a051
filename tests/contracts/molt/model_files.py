# SPDX-License-Identifier: Apache-2.0
"""A model directory and a data set that the command line takes for real ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig


def write_model(directory: Path) -> Path:
    """Write a tiny Qwen3-MoE: config, tokenizer, and a file of weights."""
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=8,
    ).save_pretrained(directory)
    words = {word: number for number, word in enumerate(("<unk>", "<eos>", "user", "assistant", "one", "two"))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(directory)
    save_file({"model.embed_tokens.weight": torch.zeros(8, 16)}, directory / "model.safetensors")
    return directory


def write_data(file: Path) -> Path:
    """Write 16 samples with the keys of the report's command."""
    line = json.dumps({"prompt": [{"role": "user", "content": "one"}], "response": "two"})
    file.write_text("\n".join([line] * 16) + "\n", encoding="utf-8")
    return file
