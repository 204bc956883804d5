# SPDX-License-Identifier: Apache-2.0
"""The oracle on a GPU is the oracle on the CPU: kernel tests at full size run it where it is fast."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.synthetic import RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.reference import codecs
from trtllm_megamoe.reference.metrics import rel_l2
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_trace

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("combine_format", list(CombineFormat))
@pytest.mark.parametrize("activations", list(ActivationMode))
def test_oracle_on_gpu_equals_cpu(activations: ActivationMode, combine_format: CombineFormat) -> None:
    generator = seeded(21)
    weights = OracleWeights.from_tensors(make_layer_tensors(generator, 512, 256, 8))
    x, routing = make_tokens(generator, 33, 512), make_routing(generator, RoutingKind.MASKED_30, 33, 8, 4)
    options = OracleOptions.product(activations, combine_format=combine_format)
    cpu = oracle_trace(weights, x, routing.topk_ids, routing.topk_weights, options)
    gpu = oracle_trace(weights, x.cuda(), routing.topk_ids.cuda(), routing.topk_weights.cuda(), options)
    for field in ("x_codes", "x_scales", "x_f16", "x_exponents"):
        ours, theirs = getattr(gpu, field), getattr(cpu, field)
        assert (ours is None and theirs is None) or torch.equal(ours.cpu(), theirs)
    # float64 exp and the order of float64 sums may differ in the last bit and, rarely, flip one fp32 rounding.
    assert gpu.gate is not None and cpu.gate is not None
    assert rel_l2(gpu.gate, cpu.gate) < 1e-7
    assert rel_l2(gpu.out, cpu.out) < 1e-4


@pytest.mark.parametrize("combine_format", list(CombineFormat))
def test_wire_codecs_on_gpu_equal_cpu_for_every_bf16_amax(combine_format: CombineFormat) -> None:
    amax = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = (amax.float()[:, None] * torch.linspace(1, -1, 32)).to(torch.bfloat16)
    cpu, gpu = codecs.wire_encode(rows, combine_format), codecs.wire_encode(rows.cuda(), combine_format)
    assert torch.equal(gpu.data.cpu(), cpu.data) and torch.equal(gpu.scales.cpu(), cpu.scales)
    decoded = [codecs.wire_decode(wire, combine_format, 32).cpu() for wire in (cpu, gpu)]
    torch.testing.assert_close(decoded[1], decoded[0], rtol=0, atol=0, equal_nan=True)
