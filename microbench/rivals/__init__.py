# SPDX-License-Identifier: Apache-2.0
"""Public implementations of an expert MLP that the layer is timed beside, each behind the same three calls.

A rival gets rows that are already sorted by expert: gather and top-k sum, which the layer includes, are left out.
"""
