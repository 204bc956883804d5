# SPDX-License-Identifier: Apache-2.0
"""`MegaMoELayer`: the framework-neutral layer. Validates everything, then hands clean tensors to an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from types import TracebackType

import torch

import trtllm_megamoe
from trtllm_megamoe.agreement import require_rank_identical, succeed_or_fail_together
from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.comm import Communicator, single
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.contract import require_eligible
from trtllm_megamoe.engines.base import Engine, SaturationReport
from trtllm_megamoe.engines.registry import EngineChoice, build_engine, choose_engine, engine_device
from trtllm_megamoe.errors import (
    MegaMoeCapacityError,
    MegaMoeConfigError,
    MegaMoeError,
    MegaMoeStateError,
)
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels.prepared import LaunchChoice
from trtllm_megamoe.regions import Geometry, RegionTable
from trtllm_megamoe.symmetric.workspace import Workspace
from trtllm_megamoe.tuning.tactic import Tactic
from trtllm_megamoe.weights.calibration import ActivationObserver, InputScales
from trtllm_megamoe.weights.loader import load_one
from trtllm_megamoe.weights.scales import LayerScales
from trtllm_megamoe.weights.spec import LayerShape, ModuleSpec
from trtllm_megamoe.weights.store import WeightStore

logger = logging.getLogger(__name__)


class MegaMoELayer:
    """The routed experts of one MoE layer on one expert-parallel rank.

    Construct, `load_weights`, then call `forward` once per step on EVERY rank, also with zero tokens.

    Args:
        config: Shape, formats and engine; must be equal on all ranks, which is checked here once.
        comm: This rank's communicator (see `trtllm_megamoe.comm`); None means one rank.
        layer: Model layer index, for error texts and for loading several layers under one window.
        workspace: Scratch from :func:`build_workspace` that layers of the same shape use one after another; this layer
            neither owns nor closes it. None: the layer allocates its own.
        dynamic_eplb: A load balancer will exchange experts between slots at run time (:meth:`slot_tensors`); a reload
            is then refused.

    Attributes:
        weights: This rank's :class:`~trtllm_megamoe.weights.store.WeightStore`. Give the stores of several layers to a
            :class:`~trtllm_megamoe.weights.loader.WeightLoader` to stream or reload a whole model.

    Raises:
        MegaMoeConfigError: The layer is not eligible; every reason is named. Nothing was allocated.
        MegaMoeUnavailableError: The requested engine cannot run on this machine.
        MegaMoeRankDivergenceError: Ranks disagree; the same text on all of them.
        MegaMoeStateError: The given workspace is closed, or a launch on it failed.

    Collective: construction and forward, in the same order on all ranks. Graph-safe: forward, on the CUDA engine, once
    weights are loaded; no on the CPU engine.
    Source: docs/architecture.md, requirements R1-R7.
    """

    def __init__(
        self,
        config: MegaMoeConfig,
        comm: Communicator | None = None,
        *,
        layer: int | None = None,
        workspace: Workspace | None = None,
        dynamic_eplb: bool = False,
    ) -> None:
        if comm is None:
            comm = workspace.comm if workspace is not None else single()
        self.config = config
        self.ep_rank, self.ep_size = comm.rank, comm.size
        self._comm = comm
        self.ladder = BucketLadder.for_cap(config.max_tokens_per_rank)
        self._owns_workspace = workspace is None
        if workspace is None:
            choice, self._workspace = _build_workspace(config, comm)
        else:
            choice = _choose(config, comm)
            workspace.require_fits(Geometry.from_config(config, comm.size, choice.pool_layout), comm, choice.name)
            _agree(config, choice, comm, workspace.generation)
            self._workspace = workspace
        self.table = self._workspace.table
        self._engine = build_engine(choice, config, self.ladder, self._workspace)
        num_local = self.table.geometry.num_local_experts
        shape = LayerShape(config.hidden_size, config.intermediate_size, config.num_experts, config.top_k)
        self.weights = WeightStore(
            ModuleSpec(shape, comm.rank * num_local, num_local),
            layout=self._engine.layout,
            device=self._engine.device,
            mode=config.activation_mode or self._engine.auto_mode,
            layer=layer,
            dynamic_eplb=dynamic_eplb,
        )
        self.weights.on_commit(self._engine.bind)
        logger.info("rank %d/%d: engine %s (%s)", self.ep_rank, self.ep_size, choice.name, choice.reason)

    @property
    def engine_name(self) -> str:
        """Name of the engine that runs this layer."""
        return self._engine.name

    @property
    def engine(self) -> Engine:
        """What executes this layer's launches; for checks and measurements, no part of a forward needs it."""
        return self._engine

    @property
    def device(self) -> torch.device:
        """Where forward expects its inputs and leaves its output."""
        return self._engine.device

    @property
    def activation_mode(self) -> ActivationMode:
        """Activation mode in use; known once weights are loaded."""
        mode = self.weights.activation_mode
        if mode is None:
            raise MegaMoeStateError(f"rank {self.ep_rank}: the activation mode is known after load_weights")
        return mode

    @property
    def saturation(self) -> SaturationReport | None:
        """Activation blocks of this rank that exceeded their static scale since the last load; None: not counted."""
        return self._engine.saturation()

    @property
    def last_bucket(self) -> int | None:
        """Bucket of the latest launch, tokens per rank; None before the first."""
        return self._engine.last_bucket

    def launch_choice(self, bucket: int) -> LaunchChoice | None:
        """Kernel, object and tactic of a bucket; None before weights are loaded, and on the CPU engine."""
        return self._engine.launch_choice(bucket)

    def pin_tactic(self, bucket: int, tactic: Tactic) -> None:
        """Run one bucket of the ladder with this tactic instead of the table's or the heuristic's.

        For measuring; a graph that was captured before keeps its own.

        Raises:
            MegaMoeConfigError: No such bucket, or a tactic that is not legal for the layer; names the rule.
            MegaMoeStateError: No weights are loaded.
            MegaMoeUnavailableError: The engine has no tactics, or the kernel is neither stored nor compiled here.

        Collective: no, but every rank must pin the same before the next forward. Source: requirement R30.
        """
        if bucket not in self.ladder.rungs:
            raise MegaMoeConfigError(
                f"rank {self.ep_rank}: {bucket} is no bucket of this layer; allowed: {self.ladder.rungs}"
            )
        self._engine.pin_tactic(bucket, tactic)

    def load_weights(self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load this rank's experts of one layer, or reload them: addresses stay, and captured graphs see the new ones.

        Args:
            weights: Named checkpoint tensors of one layer (names as in the file or `{e}.w1.weight` style). Experts of
                other ranks are skipped, but all E experts' gate and up `input_scale` are read (requirement R27).

        Raises:
            MegaMoeWeightError: Anything missing, extra, mis-shaped, mis-typed or degenerate, all faults in one error,
                or activation mode `nvfp4` without input scales. The earlier weights stay in use.

        Collective: no.
        """
        load_one(self.weights, weights, rank=self.ep_rank)

    def slot_tensors(self, weights: WeightStore | None = None) -> dict[str, torch.Tensor]:
        """All that a launch reads of each expert, by name, for a load balancer that moves experts (R25).

        Args:
            weights: A loaded store of this layer's layout that holds other experts; None: the live tensors of this
                layer's slots. Writing a row of those puts that expert into the slot.

        Raises:
            MegaMoeStateError: No weights are loaded.
        """
        self.weights.require_ready()
        return self._engine.slot_tensors(self.weights if weights is None else weights)

    def adopt_slot_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read the live slot tensors where somebody has moved them to, same names, types and sizes.

        Collective: no. Graph-safe: call it before the first capture.
        """
        self.weights.require_ready()
        self._engine.adopt_slot_tensors(tensors)

    def prepare(self) -> None:
        """Launch every bucket once without tokens, so that no later step and no graph capture meets a first time.

        Raises:
            MegaMoeStateError: No weights are loaded.
            MegaMoeTimeoutError, MegaMoeAbortedError: As for :meth:`forward`.

        Collective: yes, every rank. Graph-safe: no, call it before the capture. Source: pitfall B44.
        """
        self.weights.require_ready()
        started = time.perf_counter()
        top_k, device = self.config.top_k, self.device
        x = torch.empty(0, self.config.hidden_size, dtype=torch.bfloat16, device=device)
        topk_ids = torch.empty(0, top_k, dtype=torch.int64, device=device)
        topk_weights = torch.empty(0, top_k, dtype=torch.float32, device=device)
        for bucket in self.ladder.rungs:
            self._engine.forward(x, topk_ids, topk_weights, bucket)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.raise_if_failed()
        seconds = time.perf_counter() - started
        logger.info("rank %d: %d buckets prepared in %.2f s", self.ep_rank, len(self.ladder.rungs), seconds)

    def calibrate(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, margin: float = 1.0
    ) -> InputScales:
        """Measure this layer's activation scales on a warm-up step and use them: the layer then runs in nvfp4 mode.

        The step runs in bf16 activation mode; fc1 and fc2 inputs are measured apart. a1 is the same on all ranks.

        Args:
            x, topk_ids, topk_weights: As for :meth:`forward`; every expert must get a token on some rank.
            margin: Head room above the largest value seen.

        Returns:
            The scales now in use: a1, and a2 of this rank's experts.

        Raises:
            MegaMoeConfigError: The layer was not built with activations='auto' (its buffers hold one mode only).
            MegaMoeWeightError: A scale would be zero or not finite; on EVERY rank, naming the experts. The scales of
                before stay in use.
            MegaMoeUnavailableError: The engine cannot show its intermediates.

        Collective: yes. Source: requirement R27.
        """
        if self.config.activations != "auto":
            raise MegaMoeConfigError(
                f"rank {self.ep_rank}: calibrate needs a layer built with activations='auto', got "
                f"'{self.config.activations}'"
            )
        self.weights.require_ready()
        before, mode_before = self.weights.scales, self.activation_mode
        observer = ActivationObserver(self.weights.spec.first_expert, self.weights.spec.num_local_experts)
        if mode_before is ActivationMode.NVFP4:
            self.weights.set_input_scales(_input_scales_of(before), ActivationMode.BF16)
        try:
            self._engine.observe(observer)
            try:
                self.forward(x, topk_ids, topk_weights)
            finally:
                self._engine.observe(None)
            amaxes = self._comm.allgather(observer.input_amax, self.config.timeout_s)
            scales = succeed_or_fail_together(
                lambda: observer.input_scales(amaxes, margin), self._comm, self.config.timeout_s
            )
        except MegaMoeError:
            if mode_before is ActivationMode.NVFP4:
                self.weights.set_input_scales(_input_scales_of(before), mode_before)
            raise
        self.weights.set_input_scales(scales, ActivationMode.NVFP4)
        return scales

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        max_tokens_over_ranks: int | None = None,
    ) -> torch.Tensor:
        """Run the layer on this rank's tokens.

        Args:
            x: (T, H) bfloat16 with 0 <= T <= max_tokens_per_rank. Read only.
            topk_ids: (T, K) int32 or int64 global expert ids; an id outside [0, E) masks its route, a repeated id is
                two routes.
            topk_weights: (T, K) float32; those of masked routes are never read.
            max_tokens_over_ranks: Tokens of the fullest rank in this step, an integer the host knows and all ranks pass
                alike; it selects the bucket (:class:`BucketLadder`). None or 0 means unknown: the cap's bucket. The
                result does not depend on it.

        Returns:
            (T, H) bfloat16, freshly allocated; rows without a live route are +0.

        Raises:
            MegaMoeCapacityError: T or max_tokens_over_ranks exceeds max_tokens_per_rank. Nothing was launched.
            MegaMoeConfigError: Wrong shape, dtype or device, or max_tokens_over_ranks below T. Nothing was launched.
            MegaMoeStateError: No weights are loaded.
            MegaMoeTimeoutError: A peer did not do its part within timeout_s; names the peer. Peers are told to stop.
            MegaMoeAbortedError: A peer gave up.

        Collective: yes, every rank, same order, also with T = 0.
        """
        self.weights.require_ready()
        self._validate_inputs(x, topk_ids, topk_weights)
        bucket = self._select_bucket(x.shape[0], max_tokens_over_ranks)
        return self._engine.forward(x.contiguous(), topk_ids, topk_weights, bucket)

    __call__ = forward

    def raise_if_failed(self) -> None:
        """Raise what an earlier launch on this layer's workspace reported, replays of captured graphs included.

        :meth:`forward` looks by itself, but no Python runs in a replay: once a launch has failed, later replays leave
        at once and their results are not valid. A loop of replays calls this where it waits for the device anyway.

        Raises:
            MegaMoeTimeoutError, MegaMoeAbortedError, MegaMoeRankDivergenceError: As for :meth:`forward`, for any launch
                that the device has finished.

        Collective: no. Graph-safe: it reads host memory only; call it outside of captures. Source: requirement R31.
        """
        self._engine.raise_if_failed()

    def close(self) -> None:
        """Give the workspace back if it is the layer's own. Idempotent; with MPI every rank closes."""
        self._engine.close()
        if self._owns_workspace:
            self._workspace.close()

    def __enter__(self) -> MegaMoELayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error peers may be gone; closing is collective under MPI
            self.close()

    def _select_bucket(self, num_tokens: int, hint: object) -> int:
        where = f"rank {self.ep_rank}: forward: max_tokens_over_ranks"
        if hint is not None and not isinstance(hint, int):  # a tensor would wait for the device here
            raise MegaMoeConfigError(f"{where} must be a Python int or None, got {type(hint).__name__}")
        if hint and 0 < hint < num_tokens:
            raise MegaMoeConfigError(
                f"{where} {hint} is below this rank's own {num_tokens} tokens; nothing was launched. Pass the maximum "
                "over all ranks, or None"
            )
        return self.ladder.select(hint)

    def _validate_inputs(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        where, cfg = f"rank {self.ep_rank}: forward: ", self.config
        if x.dim() != 2 or x.shape[1] != cfg.hidden_size:
            raise MegaMoeConfigError(f"{where}x has shape {tuple(x.shape)}, expected (T, {cfg.hidden_size})")
        if x.dtype != torch.bfloat16:
            raise MegaMoeConfigError(f"{where}x has dtype {x.dtype}, expected torch.bfloat16; convert it before")
        num_tokens = x.shape[0]
        if num_tokens > cfg.max_tokens_per_rank:
            raise MegaMoeCapacityError(
                f"{where}{num_tokens} tokens exceed max_tokens_per_rank {cfg.max_tokens_per_rank}; "
                "nothing was launched. Split the chunk or build the layer with a larger bound"
            )
        expected = (num_tokens, cfg.top_k)
        for name, tensor, dtypes in (
            ("topk_ids", topk_ids, (torch.int32, torch.int64)),
            ("topk_weights", topk_weights, (torch.float32,)),
        ):
            if tuple(tensor.shape) != expected:
                raise MegaMoeConfigError(f"{where}{name} has shape {tuple(tensor.shape)}, expected {expected}")
            if tensor.dtype not in dtypes:
                allowed = " or ".join(str(d) for d in dtypes)
                raise MegaMoeConfigError(f"{where}{name} has dtype {tensor.dtype}, expected {allowed}")
        if any(tensor.device != self.device for tensor in (x, topk_ids, topk_weights)):
            devices = {str(tensor.device) for tensor in (x, topk_ids, topk_weights)}
            raise MegaMoeConfigError(
                f"{where}inputs are on {', '.join(sorted(devices))}, engine '{self.engine_name}' expects {self.device}"
            )


def build_workspace(config: MegaMoeConfig, comm: Communicator | None = None) -> Workspace:
    """Allocate, once, the scratch that any number of layers with this configuration's shape use in turns.

    Args:
        config: As for the layers; what fixes its shape is :class:`~trtllm_megamoe.regions.Geometry`.
        comm: This rank's communicator, the very object that the layers get; None means one rank.

    Returns:
        A workspace for `MegaMoELayer(config, workspace=...)`. Close it after the last layer.

    Raises:
        As the construction of :class:`MegaMoELayer`.

    Collective: yes. Source: requirement R53.
    """
    return _build_workspace(config, comm if comm is not None else single())[1]


def _build_workspace(config: MegaMoeConfig, comm: Communicator) -> tuple[EngineChoice, Workspace]:
    choice = _choose(config, comm)
    _agree(config, choice, comm, None)
    table = RegionTable(Geometry.from_config(config, comm.size, choice.pool_layout))
    device = engine_device(choice, comm, config.timeout_s)
    return choice, Workspace(table, comm, device, config.timeout_s)


def _choose(config: MegaMoeConfig, comm: Communicator) -> EngineChoice:
    """This rank's engine for an eligible layer; touches no peer."""
    comm.require_whole_job()
    require_eligible(config, comm.size, f"rank {comm.rank}: this layer")
    return choose_engine(config.engine, comm.size)


def _agree(config: MegaMoeConfig, choice: EngineChoice, comm: Communicator, generation: int | None) -> None:
    """All ranks build the same, on the same workspace. Collective."""
    facts = {
        **config.model_dump(),
        "engine": choice.name,
        "buckets": BucketLadder.for_cap(config.max_tokens_per_rank).rungs,
        "version": trtllm_megamoe.__version__,
        "workspace": generation,
    }
    facts.pop("timeout_s")  # the one field in which ranks may differ
    require_rank_identical(facts, comm, config.timeout_s)


def _input_scales_of(scales: LayerScales) -> InputScales:
    """The activation scales of a layer that has them."""
    assert scales.input_global is not None and scales.down_input_global is not None  # nvfp4 mode has both
    return InputScales(scales.input_global, scales.down_input_global)
