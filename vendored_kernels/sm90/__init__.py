# SPDX-License-Identifier: Apache-2.0
"""The Hopper (sm_90a) kernel: NVFP4 weights decoded in registers, f16 tokens, one persistent launch per layer."""
