# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: the layer and its protocol executed by torch on host memory (design D8)."""
