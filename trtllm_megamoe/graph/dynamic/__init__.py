# SPDX-License-Identifier: Apache-2.0
"""Dynamic methods of the readiness checker: run a step, list its syncs, capture it, compare replays bit for bit.

Each has a CUDA form and a rehearsal form that finds the same faults in a step on the CPU, from the operations it does.
"""
