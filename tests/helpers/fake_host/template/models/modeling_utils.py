# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tensorrt_llm._torch.model_config import QuantConfig as QuantConfig
