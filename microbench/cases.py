# SPDX-License-Identifier: Apache-2.0
"""Which layer is benchmarked: a preset's shape, perhaps shrunk or cut to one rank's share, or a checkpoint's layer.

Used by the command line; builds no tensors. A shrunk case says so in its label, so that its numbers are never mistaken
for the preset's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ScorePlacement, round_up
from trtllm_megamoe.presets import get_preset
from trtllm_megamoe.weights.checkpoint import Checkpoint

# shrunk widths stay multiples of what every wire format and both GPU main loops take
_CHANNEL_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Case:
    """Shape and options of one layer.

    `name` is the preset's or the checkpoint directory's name. `num_experts` is what the benchmarked layer has: the
    model's, divided by `scale_experts` and, for one rank's share, by `share_of_ep`. `layer` is None for synthetic
    weights.
    """

    name: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    score_placement: ScorePlacement
    swiglu_limit: float | None
    swiglu_alpha: float
    swiglu_beta: float
    checkpoint: Path | None = None
    layer: int | None = None
    scale_experts: int = 1
    scale_channels: int = 1
    share_of_ep: int = 1

    @property
    def weights_source(self) -> str:
        """`synthetic` or `checkpoint`."""
        return "synthetic" if self.checkpoint is None else "checkpoint"

    @property
    def label(self) -> str:
        """Name with everything that makes the case differ from the model."""
        parts = [self.name]
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        shrunk = [
            f"{what} / {factor}"
            for what, factor in (("experts", self.scale_experts), ("channels", self.scale_channels))
            if factor > 1
        ]
        if shrunk:
            parts.append(f"SHRUNK ({', '.join(shrunk)})")
        if self.share_of_ep > 1:
            parts.append(f"one rank's share of EP {self.share_of_ep}")
        return ", ".join(parts)

    def cut_to_share(self, share_of_ep: int) -> Case:
        """One rank's experts of a `share_of_ep`-way layer, as a layer of its own.

        Raises:
            MegaMoeConfigError: the experts do not divide.
        """
        if share_of_ep < 1 or self.num_experts % share_of_ep:
            raise MegaMoeConfigError(
                f"{self.num_experts} experts of {self.label} do not divide into {share_of_ep} shares"
            )
        local = self.num_experts // share_of_ep
        if local < self.top_k:
            raise MegaMoeConfigError(
                f"a share of {local} experts has fewer than top-k {self.top_k}; choose a smaller --share-of-ep"
            )
        return replace(self, num_experts=local, share_of_ep=share_of_ep)


def preset_case(name: str, *, scale_experts: int = 1, scale_channels: int = 1) -> Case:
    """A preset with its experts and its widths (hidden and intermediate) divided by the two factors.

    Raises:
        MegaMoeConfigError: unknown preset, or a factor that leaves no legal layer.
    """
    preset = get_preset(name)
    if scale_experts < 1 or preset.num_experts % scale_experts or preset.num_experts // scale_experts < preset.top_k:
        raise MegaMoeConfigError(
            f"--scale-experts {scale_experts} does not fit {name}: it must divide {preset.num_experts} experts and "
            f"leave at least top-k {preset.top_k} of them"
        )
    if scale_channels < 1:
        raise MegaMoeConfigError(f"--scale-channels must be at least 1, got {scale_channels}")

    def narrow(width: int) -> int:
        return width if scale_channels == 1 else round_up(max(1, width // scale_channels), _CHANNEL_MULTIPLE)

    return Case(
        name=preset.name,
        architecture=preset.architecture,
        hidden_size=narrow(preset.hidden_size),
        intermediate_size=narrow(preset.intermediate_size),
        num_experts=preset.num_experts // scale_experts,
        top_k=preset.top_k,
        score_placement=preset.score_placement,
        swiglu_limit=preset.swiglu_limit,
        swiglu_alpha=preset.swiglu_alpha,
        swiglu_beta=preset.swiglu_beta,
        scale_experts=scale_experts,
        scale_channels=scale_channels,
    )


def checkpoint_case(directory: Path, layer: int) -> Case:
    """One layer of a checkpoint directory.

    Raises:
        MegaMoeWeightError: not a readable NVFP4 checkpoint, or no routed experts in that layer.
    """
    checkpoint = Checkpoint.open(directory)
    shape = checkpoint.layer_shape(layer)
    return Case(
        name=directory.resolve().name,
        architecture=checkpoint.architecture,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        score_placement=ScorePlacement.for_architecture(checkpoint.architecture),
        swiglu_limit=checkpoint.swiglu_limit,
        swiglu_alpha=1.0,
        swiglu_beta=0.0,
        checkpoint=directory,
        layer=layer,
    )
