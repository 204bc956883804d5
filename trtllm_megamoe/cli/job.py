# SPDX-License-Identifier: Apache-2.0
"""One run of one layer, in three steps that `run`, its MPI worker and the tests share.

`prepare` reads and judges everything that can be judged before a rank starts; `forward_case` is the collective part and
deals tokens, loads, runs and gathers on every rank; `check_case` compares with the oracle where the result is.
"""

from __future__ import annotations

import math
import time
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from trtllm_megamoe.agreement import succeed_or_fail_together
from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.contract import require_eligible
from trtllm_megamoe.engines.base import SaturationReport
from trtllm_megamoe.engines.registry import choose_engine
from trtllm_megamoe.errors import MegaMoeCapacityError, MegaMoeConfigError, MegaMoeWeightError
from trtllm_megamoe.formats import ActivationMode, ScorePlacement
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.reference.metrics import cosine, mismatch_report, rel_l2
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward
from trtllm_megamoe.selftest.checks import tolerance_of
from trtllm_megamoe.weights.audit import MissingInputScale
from trtllm_megamoe.weights.calibration import InputScales
from trtllm_megamoe.weights.checkpoint import Checkpoint, StoredTensor

WAIT_S = 600.0
"""Longest wait for a peer: on a machine with fewer cores than ranks a peer may load for minutes."""

_INPUT_NAMES = ("x", "topk_ids", "topk_weights")
_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ID_DTYPES = (torch.int32, torch.int64)


class RunCase(BaseModel):
    """What to run; plain data, so that it travels to MPI ranks as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: Path
    layer: int
    input: Path
    ep_size: PositiveInt
    config: MegaMoeConfig
    calibrate: bool = False
    """Measure the activation scales on the input itself before the run (the checkpoint has none)."""


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What the router and the attention hand to the layer: x (T, H) bf16, topk_ids (T, K), topk_weights (T, K) fp32."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """T, over all ranks."""
        return int(self.x.shape[0])


@dataclass(frozen=True, slots=True)
class CalibratedScales:
    """Activation scales measured by the run: a1, and a2 of all E experts."""

    input_global: float
    down_input_global: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What the ranks computed together: `out` (T, H) bf16 in the input's order, and facts of the run."""

    out: torch.Tensor
    engine: str
    transport: str
    activation_mode: ActivationMode
    saturation: SaturationReport | None
    load_s: float
    forward_s: float
    calibrated: CalibratedScales | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """Comparison with the oracle."""

    rel_l2: float
    tolerance_rel_l2: float
    cosine: float
    num_nonfinite: int
    passed: bool


def read_input(path: Path, layer: int) -> LayerInput:
    """Read `x`, `topk_ids` and `topk_weights` of a safetensors file, plain or prefixed `layers.N.`, x rounded to bf16.

    Raises:
        MegaMoeConfigError: Unreadable file, a missing name, or a wrong dtype or shape.
    """
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            tensors = {}
            for name in _INPUT_NAMES:
                stored = next((n for n in (f"layers.{layer}.{name}", name) if n in present), None)
                if stored is None:
                    held = ", ".join(sorted(present)) or "nothing"
                    raise MegaMoeConfigError(f"{path} lacks {name!r} (also under layers.{layer}.); it holds: {held}")
                tensors[name] = file.get_tensor(stored)
    except (OSError, SafetensorError) as err:
        raise MegaMoeConfigError(f"cannot read input {path}: {err}") from None
    x, ids, weights = (tensors[name] for name in _INPUT_NAMES)
    _require_dtype(path, "x", x, _FLOAT_DTYPES)
    _require_dtype(path, "topk_ids", ids, _ID_DTYPES)
    _require_dtype(path, "topk_weights", weights, _FLOAT_DTYPES)
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise MegaMoeConfigError(
            f"{path}: x must be (T, H), topk_ids and topk_weights (T, K) with the same T and K; "
            f"got x {tuple(x.shape)}, topk_ids {tuple(ids.shape)}, topk_weights {tuple(weights.shape)}"
        )
    return LayerInput(x.to(torch.bfloat16), ids, weights.to(torch.float32))


def _require_dtype(path: Path, name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        got = str(tensor.dtype).removeprefix("torch.")
        raise MegaMoeConfigError(f"{path}: {name} has dtype {got}; allowed: {names}")


def deal(num_tokens: int, ep_size: int) -> list[slice]:
    """Contiguous near-even shares of T tokens, one per rank; the first T mod R ranks get one more."""
    share, rest = divmod(num_tokens, ep_size)
    starts = [rank * share + min(rank, rest) for rank in range(ep_size + 1)]
    return [slice(starts[rank], starts[rank + 1]) for rank in range(ep_size)]


def prepare(
    checkpoint: Path,
    layer: int,
    input_path: Path,
    ep_size: int,
    options: Mapping[str, Any],
    on_missing_input_scale: MissingInputScale = MissingInputScale.REFUSE,
) -> tuple[RunCase, LayerInput]:
    """Judge a request and fill in what the checkpoint and the input decide. Runs nothing.

    Args:
        options: Fields of :class:`MegaMoeConfig` that the user set; None means "take the default", which comes from the
            checkpoint's architecture (score placement), its configuration (clamp) or the input (largest share).
        on_missing_input_scale: What to do when nvfp4 activations are asked for and the checkpoint has no input scales.

    Raises:
        MegaMoeWeightError: The checkpoint or the layer cannot be used, or lacks input scales.
        MegaMoeUnavailableError: The engine cannot run on this machine.
        MegaMoeConfigError: The input or an option is not legal, or does not fit the checkpoint.
    """
    opened = Checkpoint.open(checkpoint)
    shape = opened.layer_shape(layer)
    given = read_input(input_path, layer)
    largest_share = math.ceil(given.num_tokens / ep_size)
    calibrate = options.get("activations") == ActivationMode.NVFP4.value and not opened.has_input_scales(layer)
    if calibrate:
        if on_missing_input_scale is MissingInputScale.REFUSE:
            raise MegaMoeWeightError(
                f"layer {layer} of {checkpoint} has no input scales (weight-only), which nvfp4 activations need; use "
                "--activations bf16, or measure them on this input: --on-missing-input-scale calibrate"
            )
        options = {**options, "activations": "auto"}  # room for the warm-up, which runs with 16-bit activations
    defaults: dict[str, Any] = {
        "max_tokens_per_rank": max(1, largest_share),
        "score_placement": ScorePlacement.for_architecture(opened.architecture),
        "swiglu_limit": opened.swiglu_limit,
        "timeout_s": WAIT_S,
    }
    config = MegaMoeConfig.create(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        **(defaults | {name: value for name, value in options.items() if value is not None}),
    )
    choose_engine(config.engine, ep_size)
    require_eligible(config, ep_size, f"layer {layer} of {checkpoint}")
    if given.x.shape[1] != shape.hidden_size:
        raise MegaMoeConfigError(
            f"{input_path}: x has {given.x.shape[1]} columns, the checkpoint's hidden size is {shape.hidden_size}"
        )
    if given.topk_ids.shape[1] != shape.top_k:
        raise MegaMoeConfigError(
            f"{input_path}: topk_ids has {given.topk_ids.shape[1]} columns, the checkpoint routes to top-{shape.top_k}"
        )
    if largest_share > config.max_tokens_per_rank:
        raise MegaMoeCapacityError(
            f"{given.num_tokens} tokens on {ep_size} ranks give one rank {largest_share}, above --max-tokens-per-rank "
            f"{config.max_tokens_per_rank}; raise it, use more ranks or pass fewer tokens"
        )
    case = RunCase(
        checkpoint=checkpoint, layer=layer, input=input_path, ep_size=ep_size, config=config, calibrate=calibrate
    )
    return case, given


def forward_case(case: RunCase, given: LayerInput, comm: Communicator, show_progress: bool = False) -> Forwarded | None:
    """Run one case on this rank of `comm` and gather the whole output on rank 0; None on the others.

    A fault of the weights is raised with the same text on every rank, whichever rank saw it.

    Collective: yes, all ranks of `comm`, the same case.
    """
    config, timeout_s = case.config, case.config.timeout_s
    with MegaMoELayer(config, comm) as layer:
        started = time.perf_counter()
        succeed_or_fail_together(
            lambda: _load(layer, case, comm, show_progress), comm, timeout_s, f"layer {case.layer} of {case.checkpoint}"
        )
        load_s = time.perf_counter() - started
        share = deal(given.num_tokens, comm.size)[comm.rank]
        largest_share = math.ceil(given.num_tokens / comm.size)
        x, ids, weights = (t[share].to(layer.device) for t in (given.x, given.topk_ids, given.topk_weights))
        scales = layer.calibrate(x, ids, weights) if case.calibrate else None
        started = time.perf_counter()
        out = layer.forward(x, ids, weights, largest_share).cpu()
        layer.raise_if_failed()
        forward_s = time.perf_counter() - started
        a2 = [] if scales is None else scales.down_input_global.tolist()
        facts = comm.allgather((out, layer.saturation, load_s, forward_s, a2), timeout_s)
        if comm.rank != 0:
            return None
        outs, saturations, loads, forwards, a2_of_ranks = zip(*facts, strict=True)
        return Forwarded(
            out=torch.cat(outs),
            engine=layer.engine_name,
            transport=comm.transport,
            activation_mode=layer.activation_mode,
            saturation=None if None in saturations else sum(saturations, SaturationReport()),
            load_s=max(loads),
            forward_s=max(forwards),
            calibrated=_gathered_scales(scales, a2_of_ranks),
        )


def _gathered_scales(scales: InputScales | None, a2_of_ranks: Sequence[Sequence[float]]) -> CalibratedScales | None:
    """Scales of all E experts, in expert order."""
    if scales is None:
        return None
    return CalibratedScales(scales.input_global, tuple(a2 for of_rank in a2_of_ranks for a2 in of_rank))


def _load(layer: MegaMoELayer, case: RunCase, comm: Communicator, show_progress: bool) -> None:
    """Load this rank's experts of the case's layer."""
    num_local = case.config.num_experts // comm.size
    mine = range(comm.rank * num_local, (comm.rank + 1) * num_local)
    checkpoint = Checkpoint.open(case.checkpoint)
    layer.load_weights(_with_progress(checkpoint, case.layer, mine, show_progress and comm.rank == 0))


def _with_progress(
    checkpoint: Checkpoint, layer: int, experts: Iterable[int], is_shown: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's tensors; a bar on stderr for people (tqdm hides itself where stderr is no terminal)."""
    tensors = checkpoint.iter_layer(layer, experts)
    total = len(checkpoint.layer_tensors(layer, experts))
    return iter(tqdm(tensors, total=total, desc=f"layer {layer}", unit="tensor", disable=None if is_shown else True))


class _LazyTensors(Mapping[str, torch.Tensor]):
    """A layer's tensors by canonical name, read when asked for; what the oracle computes from."""

    def __init__(self, stored: Iterable[StoredTensor]) -> None:
        self._stored = {tensor.key.name: tensor for tensor in stored}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._stored[name]
        return 1 / tensor.read() if tensor.reciprocal else tensor.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _scale_tensors(scales: CalibratedScales) -> dict[str, torch.Tensor]:
    """Calibrated scales under the names a checkpoint would give them."""
    named = {}
    for expert, a2 in enumerate(scales.down_input_global):
        for projection, scale in (("w1", scales.input_global), ("w3", scales.input_global), ("w2", a2)):
            named[f"{expert}.{projection}.input_scale"] = torch.tensor(scale)
    return named


def check_case(case: RunCase, given: LayerInput, forwarded: Forwarded) -> Check:
    """Compare with the oracle of the same x, options and activation mode.

    Values that the oracle says are NaN or infinite (a token with such inputs) must be so in the result too and are
    left out of the norms.
    """
    config = case.config
    checkpoint = Checkpoint.open(case.checkpoint)
    stored: Mapping[str, torch.Tensor] = _LazyTensors(checkpoint.layer_tensors(case.layer))
    if forwarded.calibrated is not None:
        stored = ChainMap(_scale_tensors(forwarded.calibrated), dict(stored))
    weights = OracleWeights.from_tensors(stored)
    options = OracleOptions.product(
        forwarded.activation_mode,
        combine_format=config.combine_format,
        score_placement=config.score_placement,
        swiglu_limit=config.swiglu_limit,
        swiglu_alpha=config.swiglu_alpha,
        swiglu_beta=config.swiglu_beta,
    )
    expected = oracle_forward(weights, given.x, given.topk_ids, given.topk_weights, options)
    finite = expected.isfinite()
    is_same_elsewhere = mismatch_report(forwarded.out[~finite], expected[~finite]) is None
    error = rel_l2(forwarded.out[finite], expected[finite])
    limit = tolerance_of(forwarded.engine, config.combine_format.value)
    return Check(
        rel_l2=error,
        cosine=cosine(forwarded.out[finite], expected[finite]),
        num_nonfinite=int((~finite).sum()),
        tolerance_rel_l2=limit,
        passed=is_same_elsewhere and error < limit,
    )
