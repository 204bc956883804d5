# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU: checks and benchmarks of the kernels, run by `tools/run_gpu_suite.py`."""
