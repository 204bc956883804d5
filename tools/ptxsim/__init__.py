# SPDX-License-Identifier: Apache-2.0
"""A functional PTX interpreter: runs a compiled kernel's PTX on the CPU and says where it relies on luck.

    from tools.ptxsim import GlobalMemory, TensorMap, parse_file, run_launch

It models lanes with divergence, mbarriers, named and cluster barriers, bulk and TMA copies, wgmma with register A,
tcgen05 (TMEM, block-scaled FP4 MMA, scale copies, commits), flags with scopes, several CTAs, clusters and virtual
ranks, random interleaving and late asynchronous work. order.py checks every access against a happens-before model.

It does not model time, the machine code behind the PTX, the order of a warp's lanes among themselves, wgmma.fence, or
the inner rounding of tensor cores. A program that passes can still be wrong on hardware; one that fails is wrong or
uses something that the interpreter does not know.
"""

from .errors import BarrierError, DeadlockError, OrderError, SimError, UnsupportedInstruction
from .machine import TensorMap
from .memory import GlobalMemory
from .parse import Program, parse, parse_file
from .run import RunReport, run_launch

__all__ = [
    "BarrierError",
    "DeadlockError",
    "GlobalMemory",
    "OrderError",
    "Program",
    "RunReport",
    "SimError",
    "TensorMap",
    "UnsupportedInstruction",
    "parse",
    "parse_file",
    "run_launch",
]
