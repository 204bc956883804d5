# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: keys, the store, and archives that move them between machines."""
