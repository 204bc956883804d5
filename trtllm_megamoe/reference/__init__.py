# SPDX-License-Identifier: Apache-2.0
"""Codecs and the oracle: slow, plain, independent of packing and engines."""
