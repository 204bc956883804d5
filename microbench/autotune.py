# SPDX-License-Identifier: Apache-2.0
"""`--autotune`: tune before timing, in the order in which a serving engine does (R41).

General warm-up on the serving workspace, then the tuner's launches on a workspace of their own, which is gone before
the first timed forward. One fence book judges both; that it stays consistent is checked, not hoped for. Called by the
runner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeVerificationError
from trtllm_megamoe.layer import MegaMoELayer, build_workspace
from trtllm_megamoe.symmetric.workspace import Workspace
from trtllm_megamoe.tuning.fences import Workspace as Side
from trtllm_megamoe.tuning.runner import LayerRunner, Timer, time_replays
from trtllm_megamoe.tuning.tactic import Tactic, TacticSpace
from trtllm_megamoe.tuning.tuner import TunedBucket, tune
from trtllm_megamoe.tuning.workload import random_step

logger = logging.getLogger(__name__)


class ScratchLayer:
    """A layer on a profiling workspace, every launch of which the serving workspace's book must admit.

    Args:
        serving: The workspace that serves; its book is asked, its memory is never touched.
        config: As the serving layer's.
        load: Loads weights into a layer.

    Collective: construction, :meth:`forward` and :meth:`close`.
    """

    def __init__(self, serving: Workspace, config: MegaMoeConfig, load: Callable[[MegaMoELayer], None]) -> None:
        self._book = serving.fences
        self._workspace = build_workspace(config, serving.comm)
        self._layer = MegaMoELayer(config, serving.comm, workspace=self._workspace)
        load(self._layer)
        shared = self._workspace.shared
        self._sides = (
            Side("profiling local", self._workspace.local.data_ptr(), self._workspace.local),
            Side("profiling scratch", shared.own.data_ptr(), shared),
        )
        self._book.begin_fence(*self._sides)
        self._book.finish_fence(*self._sides)  # building the workspace has put both sides to their start on all ranks
        self._book.begin_tuning(self._sides[1])

    def pin_tactic(self, bucket: int, tactic: Tactic) -> None:
        """See :meth:`MegaMoELayer.pin_tactic`."""
        self._layer.pin_tactic(bucket, tactic)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        max_tokens_over_ranks: int | None = None,
    ) -> torch.Tensor:
        """A profiling launch.

        Raises:
            MegaMoeVerificationError: The book would fence the pair anew, although its sides are in step.
        """
        if not self._book.admit(*self._sides, is_profiling=True):
            raise MegaMoeVerificationError("the profiling workspaces were forgotten while they were in use")
        return self._layer.forward(x, topk_ids, topk_weights, max_tokens_over_ranks)

    def raise_if_failed(self) -> None:
        """See :meth:`MegaMoELayer.raise_if_failed`."""
        self._layer.raise_if_failed()

    def close(self) -> None:
        """End the tuning and give the scratch back."""
        self._book.end_tuning()
        for side in self._sides:
            self._book.forget(side)
        del self._sides
        self._layer.close()
        self._workspace.close()


def autotune(
    serving: Workspace,
    layers: Sequence[MegaMoELayer],
    load: Callable[[MegaMoELayer], None],
    space: TacticSpace,
    buckets: Sequence[int],
    comm: Communicator,
    timeout_s: float,
    timer: Timer = time_replays,
) -> dict[int, TunedBucket]:
    """Warm up, tune, release, and pin what was found.

    Args:
        serving: The workspace that all of `layers` share.
        layers: Loaded; all of them get the tactics.
        load: Loads a layer of the same configuration.
        space: Their legal tactics.
        buckets: Those that will be timed.

    Returns:
        The outcome of each bucket, the same on every rank.

    Raises:
        MegaMoeVerificationError: The pairs of workspaces that may be launched are not the ones before the tuning.

    Collective: yes.
    """
    for layer in layers:
        layer.prepare()
    pairs = serving.fences.num_pairs
    _require_released(serving, pairs, "after the general warm-up")
    config = layers[0].config

    def make_step(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return random_step(config, num_tokens, comm.rank, layers[0].device)

    with LayerRunner(lambda: ScratchLayer(serving, config, load), make_step, comm, timeout_s, timer) as runner:
        outcomes = tune(space, buckets, runner, comm, timeout_s)
    if layers[0].device.type == "cuda":
        torch.cuda.empty_cache()
    _require_released(serving, pairs, "after the tuning")
    for tuned in outcomes:
        for layer in layers:
            layer.pin_tactic(tuned.bucket, tuned.tactic)
    return {tuned.bucket: tuned for tuned in outcomes}


def _require_released(serving: Workspace, pairs: int, when: str) -> None:
    """The serving pair is in step and stands alone: no tuning is open and no pair of the scratch is left."""
    serving.require_launchable()
    book = serving.fences
    if book.is_tuning or book.num_pairs != pairs:
        raise MegaMoeVerificationError(
            f"{when} the fence book holds {book.num_pairs} pairs, expected {pairs}, and tuning is "
            f"{'open' if book.is_tuning else 'closed'}; nothing was timed"
        )
    logger.info("%s: %d launchable pair(s), no tuning open", when, pairs)
