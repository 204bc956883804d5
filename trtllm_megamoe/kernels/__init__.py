# SPDX-License-Identifier: Apache-2.0
"""The only door to `vendored_kernels`: which kernels a layer needs, how their objects are built, found and loaded."""
