# SPDX-License-Identifier: Apache-2.0
"""The correctness suite that any user can run: inputs, cases and checks, the same on every GPU and on the CPU.

`inputs`, `cases` and `checks` are also what the developers' GPU suite uses; nothing here knows a kernel's arguments.
"""
