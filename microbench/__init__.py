# SPDX-License-Identifier: Apache-2.0
"""Standalone MPI benchmark of the layer."""
