# SPDX-License-Identifier: Apache-2.0
"""Choosing kernel configurations (tactics, tables, the collective tuner) and knowing when a launch is safe (fences)."""
