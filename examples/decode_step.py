# SPDX-License-Identifier: Apache-2.0
"""A decode step that never waits for the GPU, eager and as two captured regions around an eager attention.

    python examples/decode_step.py [--device cpu|cuda] [--steps 200]

Also a step for the checker: `python -m trtllm_megamoe check-graph --run examples.decode_step:make_step`.
"""

from __future__ import annotations

import click
import torch

from trtllm_megamoe.graph import StepUnderTest
from trtllm_megamoe.graph.selfcheck import check_decode
from trtllm_megamoe.graph.toy_decoder import ToyDecoder, ToyShape


def make_step(device: torch.device) -> StepUnderTest:
    """The part behind the attention, as the checker takes it: output projection, experts, sampling, advance."""
    decoder = ToyDecoder(ToyShape(), device)
    decoder.io.upload([3, 5, 7], [0, 1, 2])
    decoder.step(3)

    def run() -> list[torch.Tensor]:
        decoder.after_attention()
        return [decoder.logits, decoder.io.tokens, decoder.io.positions]

    inputs = {"hidden": decoder.hidden, "attended": decoder.attended}
    return StepUnderTest(run, inputs, decoder.state(), name="after attention")


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--steps", default=200, show_default=True)
def main(device: str, steps: int) -> None:
    """Decode, eagerly and in regions, and compare every step bit for bit."""
    result = check_decode(torch.device(device), steps)
    for name, value in result.items():
        click.echo(f"{name}: {value}")
    raise SystemExit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
