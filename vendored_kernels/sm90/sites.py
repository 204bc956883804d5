# SPDX-License-Identifier: Apache-2.0
"""Wait sites and fault steps of every kernel (`common/sites.py`), where Hopper's host code looks for them. No DSL."""

from ..common.sites import *  # noqa: F403
