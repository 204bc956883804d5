# SPDX-License-Identifier: Apache-2.0
"""Faults: sneaky reads."""
import copy
import logging
import warnings

import numpy as np
import torch
from einops import rearrange, repeat
from torch import Tensor

logger = logging.getLogger(__name__)


# snippet: builtin_min_of_two
def step(x: Tensor, cap: Tensor) -> Tensor:
    return x * min(x.amax(), cap)  # expect: GR701


# snippet: builtin_sum_over_tensor
def step(counts: Tensor) -> Tensor:
    return sum(counts)  # expect: GR701


# snippet: builtin_any_over_comparisons
def step(tokens: Tensor, stops: list[int]) -> bool:
    return any(tokens == stop for stop in stops)  # expect: GR701


# snippet: fstring_of_loss
def step(x: Tensor) -> str:
    message = f"step norm {x.norm():.3f}"  # expect: GR702
    return message


# snippet: print_left_behind
def step(topk_ids: Tensor) -> Tensor:
    print("routing", topk_ids)  # expect: GR702
    return topk_ids


# snippet: percent_format
def step(x: Tensor) -> str:
    return "max %s" % x.max()  # expect: GR702


# snippet: lazy_log_argument
class Layer:
    def __init__(self):
        self.logger = logging.getLogger("layer")

    def forward(self, x: Tensor) -> Tensor:
        self.logger.info("mean %s", x.mean())  # expect: GR703
        return x


# snippet: fstring_inside_log
def step(x: Tensor) -> Tensor:
    logger.debug(f"range {x.min()}")  # expect: GR703
    return x


# snippet: warning_with_tensor
def step(x: Tensor) -> Tensor:
    warnings.warn(str(x.sum()))  # expect: GR703
    return x


# snippet: assert_finite
def step(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()  # expect: GR704
    return x


# snippet: einops_axis_from_tensor
def step(x: Tensor, groups: Tensor) -> Tensor:
    return repeat(x, "h -> g h", g=groups.max())  # expect: GR705


# snippet: einops_axis_by_int
def step(x: Tensor, batch: Tensor) -> Tensor:
    return rearrange(x, "(b t) h -> b t h", b=int(batch.max()))  # expect: GR705


# snippet: index_by_item
def step(table: Tensor, slot: Tensor) -> Tensor:
    return table[slot.item()]  # expect: GR706


# snippet: module_list_by_tensor
def step(x: Tensor, experts: list[Tensor], choice: Tensor) -> Tensor:
    return x @ experts[choice]  # expect: GR706


# snippet: store_at_argmax
def step(x: Tensor, scores: Tensor) -> Tensor:
    x[scores.argmax()] = 0.0  # expect: GR706
    return x


# snippet: allclose_guard
def step(x: Tensor, y: Tensor) -> Tensor:
    if torch.allclose(x, y):  # expect: GR707
        return x
    return y


# snippet: numpy_function
def step(x: Tensor) -> Tensor:
    return x * np.max(x)  # expect: GR707


# snippet: checked_inverse
def step(x: Tensor) -> Tensor:
    return torch.linalg.inv(x)  # expect: GR707


# snippet: deepcopy_of_state
def step(state: Tensor) -> Tensor:
    return copy.deepcopy(state)  # expect: GR707


# snippet: comment_without_reason
def step(x: Tensor) -> Tensor:
    return x * x.max().item()  # graph-ok:  # expect: GR001, GR101


# snippet: comment_for_unknown_rule
def step(x: Tensor) -> Tensor:
    return x + 1  # graph-ok[GR999]: no such rule  # expect: GR001


# snippet: stale_comment
def step(x: Tensor) -> Tensor:
    # graph-ok[GR101]: the length was read here once  # expect: GR002
    return x + 1


# snippet: assert_function
def step(x: Tensor) -> Tensor:
    torch._assert((x >= 0).all(), "negative")  # expect: GR704
    return x
