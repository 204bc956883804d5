# SPDX-License-Identifier: Apache-2.0
"""Parts of the kernels that no architecture owns: pool layout from routing ids, the tile stream's order, wire formats,
bounded waits. Each function says what it needs; none knows a kernel configuration.
"""
