# SPDX-License-Identifier: Apache-2.0
"""Which tactic each bucket of a layer runs: the one that tuning found, or the heuristic's. Measures nothing.

Called once per layer, at construction, where all ranks are present; and by the `compile` command, alone. The rules are
those of :mod:`trtllm_megamoe.tuning.table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trtllm_megamoe
from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.envs import TACTICS
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels.family import FAMILIES
from trtllm_megamoe.kernels.hopper import ARCH
from trtllm_megamoe.tuning.table import ResolvedTactic, TuningEnvironment, resolve_tactics
from trtllm_megamoe.tuning.tactic import TacticSpace
from vendored_kernels import registry

NO_GPU = "none"
"""GPU name of an environment without one: it differs softly from every table's."""


def table_path() -> Path | None:
    """The user's tactic table, or None."""
    value = TACTICS.get()
    return Path(value) if value else None


def tuning_target(
    config: MegaMoeConfig, mode: ActivationMode, ep_size: int, num_sms: int, arch: str = ARCH
) -> tuple[TacticSpace, dict[str, Any]]:
    """The tactics of a layer, and what identifies it in a table: all that is compiled in, and the number of ranks.

    Raises:
        MegaMoeConfigError: The kernel does not support the layer; the text names the rule.
    """
    family = FAMILIES[arch]
    spec = family.layer_spec(config, ep_size, mode)
    return family.tactic_space(spec, num_sms), {**asdict(spec), "ep_size": ep_size}


def environment(gpu_name: str, num_sms: int, arch: str = ARCH) -> TuningEnvironment:
    """This process's side of a comparison with a table."""
    return TuningEnvironment(
        kernel=FAMILIES[arch].kernel_name,
        arch=arch,
        gpu_name=gpu_name,
        num_sms=num_sms,
        dsl_version=registry.DSL_VERSION,
        kernel_sources=registry.source_digest(arch),
        package_version=trtllm_megamoe.__version__,
    )


Selection = Mapping[ActivationMode, Mapping[int, ResolvedTactic]]
"""By activation mode and bucket."""


def select_tactics(
    config: MegaMoeConfig,
    buckets: Sequence[int],
    here: TuningEnvironment,
    comm: Communicator,
    *,
    ep_size: int | None = None,
    path: Path | None = None,
) -> Selection:
    """Tactics of every mode the layer can come to run: both while its activations are `auto`.

    Args:
        here: See :func:`environment`.
        ep_size: Ranks of the layer, where they are not those of `comm`.
        path: The table; None takes `TRTLLM_MEGAMOE_TACTICS`, and heuristics where that is unset.

    Returns:
        The same on every rank.

    Raises:
        MegaMoeConfigError: The kernel does not support the layer, or the table cannot be read; on every rank.
        MegaMoeRankDivergenceError: Ranks differ in buckets or in what the heuristic says.

    Collective: yes.
    """
    ranks = comm.size if ep_size is None else ep_size
    path = path if path is not None else table_path()
    modes = FAMILIES[here.arch].modes if config.activation_mode is None else (config.activation_mode,)
    selection = {}
    for mode in modes:
        space, facts = tuning_target(config, mode, ranks, here.num_sms, here.arch)
        selection[mode] = resolve_tactics(space, buckets, facts, here, path, comm, config.timeout_s)
    return selection
