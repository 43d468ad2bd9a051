# SPDX-License-Identifier: Apache-2.0
"""The configurations that the gather contracts run; each world of ranks runs all that fit it."""

from __future__ import annotations

import os

import torch

from tests.contracts.automodel.gather_ranks import Case
from tests.contracts.automodel.upstream import MOE_OPTIONS
from tests.support import launch


# An option that a release does not have is left out; the gate of 0.4.0 takes "sqrtsoftplus" for "sigmoid".
def _case(name: str, experts: str = "torch", layout: str = "uneven", groups: int = 1, **options: object) -> Case:
    known = tuple((option, value) for option, value in options.items() if option in MOE_OPTIONS)
    return Case(name, experts, layout, groups, known)


# Score function, top-k normalisation, shared experts, biases, activation and layout, so that each value of one meets
# both expert paths and, among the others, each value at least once. "torch" is the loop, "torch_mm" the grouped GEMM.
CASES = [
    _case("softmax-loop"),
    _case("softmax-gemm", "torch_mm", norm_topk_prob=False),
    _case("softmax-after-topk-loop", softmax_before_topk=False, norm_topk_prob=False, n_shared_experts=1),
    _case("softmax-after-topk-gemm", "torch_mm", softmax_before_topk=False, router_bias=True),
    _case("sigmoid-loop", score_func="sigmoid", norm_topk_prob=False, expert_bias=True),
    _case("sigmoid-gemm", "torch_mm", score_func="sigmoid", n_shared_experts=2, shared_expert_gate=True),
    _case("sqrtsoftplus-loop", score_func="sqrtsoftplus", route_scale=1.5, n_shared_experts=1),
    _case("sqrtsoftplus-gemm", "torch_mm", score_func="sqrtsoftplus", norm_topk_prob=False, swiglu_limit=7.0),
    _case("softmax-with-bias-loop", score_func="softmax_with_bias", force_e_score_correction_bias=True),
    _case("sigmoid-with-bias-gemm", "torch_mm", score_func="sigmoid_with_bias", force_e_score_correction_bias=True),
    _case("gpt-oss-gemm", "torch_mm", expert_bias=True, router_bias=True, expert_activation="quick_geglu"),
    _case("relu2-loop", expert_activation="relu2", score_func="sigmoid"),
    _case("latent-loop", moe_latent_size=8, n_shared_experts=1),
    _case("empty-rank-loop", layout="empty-rank"),
    _case("empty-rank-gemm", "torch_mm", layout="empty-rank", score_func="sqrtsoftplus", expert_bias=True),
    _case("idle-experts-loop", layout="idle-experts", norm_topk_prob=False),
    _case("idle-experts-gemm", "torch_mm", layout="idle-experts", score_func="sigmoid", n_shared_experts=1),
]
TWO_GROUPS = [
    _case("two-groups-loop", groups=2),
    _case("two-groups-gemm", "torch_mm", groups=2, score_func="sigmoid", norm_topk_prob=False),
]
BF16 = [Case(f"bf16-{experts}", experts, dtype=torch.bfloat16) for experts in ("torch", "torch_mm")]

# Expert paths of the releases that need what a CPU has not: Transformer Engine, grouped_gemm, DeepEP, UCCL, Blackwell.
NOT_RUN = ["te", "gmm", "torch_mm_mxfp8", "dispatcher deepep", "dispatcher hybridep", "dispatcher uccl_ep"]


def cases_for(world_size: int) -> list[Case]:
    """What a world of this many ranks runs."""
    if world_size == 1:
        return [case for case in [*CASES, *BF16] if case.layout != "empty-rank"]
    if world_size >= 8:  # to be quick: every second one, and every layout
        return [case for number, case in enumerate(CASES) if number % 2 or case.layout != "uneven"] + BF16 + TWO_GROUPS
    return [*CASES, *BF16, *(TWO_GROUPS if world_size % 2 == 0 and world_size > 2 else [])]


def degrees(*wanted: int) -> list[int]:
    """EP degrees to run: those wanted, or fewer (``$GATHER_DEGREES``); under torchrun that of the launch."""
    if launch.current is not None:
        return [launch.current.world_size]
    few = [int(size) for size in os.environ.get("GATHER_DEGREES", "").split(",") if size]
    # Where none of them is wanted, all are.
    return [size for size in wanted if size in few] or list(wanted)
