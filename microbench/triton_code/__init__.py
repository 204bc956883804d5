# SPDX-License-Identifier: Apache-2.0
"""Small Triton kernels of the benchmark. Only these files import triton, and only who runs on a GPU imports them."""
