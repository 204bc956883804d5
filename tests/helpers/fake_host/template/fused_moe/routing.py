# SPDX-License-Identifier: Apache-2.0
"""One of the host's routing methods; its file was not read, the name and meaning are from its tests' description."""

from __future__ import annotations

import torch


class RenormalizeMoeRoutingMethod:
    def __init__(self, top_k):
        self.top_k = top_k

    def apply(self, router_logits, input_ids=None):
        values, ids = torch.topk(router_logits.float(), self.top_k, dim=-1)
        return ids.to(torch.int32), torch.softmax(values, dim=-1)
