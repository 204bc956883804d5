# SPDX-License-Identifier: Apache-2.0
"""Engines that execute one layer; one sub-package each."""
