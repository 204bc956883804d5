# SPDX-License-Identifier: Apache-2.0
"""Stand-in for tests; see tests/helpers/fake_host."""

__version__ = "0.0.0+standin"
