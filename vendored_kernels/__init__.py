# SPDX-License-Identifier: Apache-2.0
"""GPU kernels in CuTe DSL and what compiles, stores and loads them.

A self-contained tree: it imports nothing of the package around it. Only `compile.py` and the `sm90` kernel modules need
the DSL; `registry.py` and `launch.py` load and run finished objects without it.
"""
