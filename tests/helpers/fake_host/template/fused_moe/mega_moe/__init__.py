# SPDX-License-Identifier: Apache-2.0
from .mega_moe_cute_dsl import MegaMoECuteDsl as MegaMoECuteDsl
