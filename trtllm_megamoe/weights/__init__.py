# SPDX-License-Identifier: Apache-2.0
"""Checkpoint reading, the weight specification, packing and the loading lifecycle."""
