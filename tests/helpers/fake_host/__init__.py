# SPDX-License-Identifier: Apache-2.0
"""A stand-in for tensorrt_llm, generated from tests/data/trtllm_api_contract.json (see generate.py)."""
