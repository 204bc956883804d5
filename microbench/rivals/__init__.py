# SPDX-License-Identifier: Apache-2.0
"""Public implementations of an expert MLP that the layer is timed beside, each behind the same calls.

`base` has the weights, the rows and the check that all of them share; `catalog` lists them. A rival gets rows that are
sorted by expert already: the gather and the top-k sum, which the layer includes, are left out.
"""
