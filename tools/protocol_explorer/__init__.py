# SPDX-License-Identifier: Apache-2.0
"""Explores every interleaving of the layer's protocol on a model: `python -m tools.protocol_explorer`, see
docs/protocol.md.

scenario (who sends what, where it lands) -> protocol (each role's steps, named like the kernel's) -> machine (executes
steps on one memory) -> explore (all interleavings, or one random schedule) -> study (what is run and reported).
variants lists what can be taken away, families what is explored, report prints. Pure Python; imports nothing of the
product, so that it is a second reading of it.
"""
