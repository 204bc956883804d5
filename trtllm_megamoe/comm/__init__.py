# SPDX-License-Identifier: Apache-2.0
"""Ranks and their shared memory: threads, MPI."""
