# SPDX-License-Identifier: Apache-2.0
"""Static method of the readiness checker: an `ast` scan that imports nothing of the code it reads."""
