# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine: one persistent launch per forward on one Hopper GPU."""
