# SPDX-License-Identifier: Apache-2.0
"""Every product of a code and a scale byte through the Hopper kernel's PTX, and planted decode faults that must show.

The cases are those of the GPU suite (`tools/gpu_suite/products.py`), in the small shape of the kept PTX.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from tools.gpu_suite.products import (
    LEGAL_BYTES,
    SPECS,
    ProductCase,
    byte_value,
    code_parts,
    code_value,
    make_case,
    scale_terms,
)
from tools.ptxsim.layers import KernelFile
from tools.ptxsim.ranks import run_one_rank
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward
from vendored_kernels.common.layer import LayerSpec

DATA = Path(__file__).parent.parent / "data" / "ptx"
SHAPE = (128, 64, 3, 2)
PRODUCT = r"(mul\.rn\.f16x2 (%r\d+), t\d, s\d;)"
BEFORE_DECODE = "and.b32 t0, t0, 0x8E008E00;"


def significant_bits(value: float) -> int:
    """Bits from the first to the last one that is set."""
    units = int(abs(value) * 2**10)
    return len(bin(units).rstrip("0")) - 2 if units else 0


def wrong_of(case: ProductCase, mode: str, text: str | None = None, kind: str = "") -> set[tuple[float, float]]:
    """Code and scale values of the outputs that are not as expected, of all kinds of tokens or of one.

    The first sixteen tokens of a kind show every code with every byte.
    """
    seen: Counter[str] = Counter()
    chosen = []
    for t, name in enumerate(case.kinds):
        if kind in name and seen[name] < 16:
            chosen.append(t)
            seen[name] += 1
    kernel = KernelFile.load(DATA / f"sm90_{mode}.ptx")
    kernel = kernel if text is None else KernelFile(text, kernel.facts)
    run = run_one_rank(kernel, case.tensors, case.x[chosen], case.ids[chosen], case.weights[chosen])
    assert run.error[0] == 0
    part = dataclasses.replace(
        case,
        expected=case.expected[chosen],
        products=case.products[chosen],
        kinds=tuple(case.kinds[t] for t in chosen),
    )
    bad = run.y.double() != part.expected
    assert len(part.wrong(run.y)) == int(bad.sum())
    return {(code_value(code), byte_value(byte)) for _, code, byte in part.products[bad].tolist()}


def test_values_of_codes_and_bytes_equal_torch() -> None:
    bytes_ = torch.tensor(LEGAL_BYTES, dtype=torch.uint8)
    assert [byte_value(b) for b in LEGAL_BYTES] == bytes_.view(torch.float8_e4m3fn).float().tolist()
    assert [code_value(c) for c in (0, 1, 7, 9, 15)] == [0, 0.5, 6, -0.5, -6]


def test_summands_are_smaller_powers_of_two_that_add_up() -> None:
    """The induction behind `difference`: only the smallest code and the smallest byte stand for themselves."""
    smallest = (0, 1)
    for byte in LEGAL_BYTES:
        terms = [sign * byte_value(term) for sign, term in scale_terms(byte)]
        sizes = {abs(term) for term in terms if term}
        assert sum(terms) == byte_value(byte)
        assert all(significant_bits(size) == 1 for size in sizes)
        # 15 is 16 - 1, and 16 is 8 + 8
        assert all(size < byte_value(byte) for size in sizes) or byte in smallest or byte & 7 == 7, byte
    for code in range(16):
        parts = [code_value(part) for part in code_parts(code)]
        assert sum(parts) == code_value(code)
        assert all(abs(part) < abs(code_value(code)) for part in parts) or code & 7 <= 1


@pytest.mark.parametrize("mode", ["bf16", "nvfp4"])
def test_make_case_shows_every_product_in_every_projection(mode: str) -> None:
    shown: set[tuple[str, int, int]] = set()
    for scale_bytes in (LEGAL_BYTES[:64], LEGAL_BYTES[63:]):
        case = make_case(*SHAPE, mode, scale_bytes)
        for t, kind in enumerate(case.kinds):
            if kind == "down" and t >= 16:
                continue
            shown |= {(kind, code, byte) for _, code, byte in case.products[t].tolist()}
    kinds = {"down", "up difference", "gate difference"} | ({"up alone", "gate alone"} if mode == "bf16" else set())
    assert shown == {(kind, code, byte) for kind in kinds for code in range(16) for byte in LEGAL_BYTES}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.activation_mode)
def test_make_case_of_the_gpu_suite_expects_what_the_oracle_gives(spec: LayerSpec) -> None:
    """Two independent ways to the same values, before a GPU is asked."""
    shape = (spec.hidden_size, spec.intermediate_size, spec.num_local_experts, spec.top_k)
    case = make_case(*shape, spec.activation_mode, LEGAL_BYTES, 8)
    options = OracleOptions.product(ActivationMode(spec.activation_mode))
    y = oracle_forward(OracleWeights.from_tensors(case.tensors), case.x, case.ids, case.weights, options)
    assert case.wrong(y) == [] and bool(y.any())


@pytest.mark.parametrize(
    ("mode", "scale_bytes", "shift"), [("bf16", LEGAL_BYTES[:64], 0), ("nvfp4", LEGAL_BYTES[63:], 4)]
)
def test_kernel_ptx_every_product_is_exact(mode: str, scale_bytes: tuple[int, ...], shift: int) -> None:
    """All sixteen codes; one half of the scale bytes in each mode, so that this takes seconds."""
    assert not wrong_of(make_case(*SHAPE, mode, scale_bytes, shift), mode)


@pytest.mark.parametrize("kind", ["up alone", "down"])
def test_products_rounded_to_five_bits_are_named_and_no_others(kind: str) -> None:
    """A decode that loses the sixth bit of a product (f16 has eleven; no product needs more than six)."""
    scale_bytes = LEGAL_BYTES[64:]  # normal in f16: none of these is hit for being small
    case = make_case(*SHAPE, "bf16", scale_bytes)
    text = KernelFile.load(DATA / "sm90_bf16.ptx").text
    text, count = re.subn(PRODUCT, r"\1 and.b32 \2, \2, 0xFFC0FFC0;", text)
    assert count > 0
    every = {(code_value(c), byte_value(b)) for c in range(16) for b in scale_bytes}
    assert wrong_of(case, "bf16", text, kind) == {p for p in every if significant_bits(p[0] * p[1]) > 5} != set()


def test_smallest_products_flushed_are_noticed() -> None:
    """A decode that loses the lowest bit of an f16 subnormal, as multiplication with flush to zero would."""
    scale_bytes = LEGAL_BYTES[:16]
    case = make_case(*SHAPE, "bf16", scale_bytes)
    text = KernelFile.load(DATA / "sm90_bf16.ptx").text
    text = re.sub(PRODUCT, r"\1 and.b32 \2, \2, 0xFFFEFFFE;", text)
    every = {(code_value(c), byte_value(b)) for c in range(16) for b in scale_bytes}
    odd = {p for p in every if int(abs(p[0] * p[1]) * 2**10) % 2}
    assert wrong_of(case, "bf16", text, "up alone") == odd != set()


@pytest.mark.parametrize(
    ("fault", "replacement"),
    [
        ("sign bit of a code", BEFORE_DECODE.replace("0x8E", "0x0E")),
        ("mantissa bit of a code", BEFORE_DECODE.replace("0x8E", "0x8C")),
    ],
)
def test_one_bit_of_the_decode_changed_is_noticed(fault: str, replacement: str) -> None:
    case = make_case(*SHAPE, "nvfp4", LEGAL_BYTES[64:80])
    text = KernelFile.load(DATA / "sm90_nvfp4.ptx").text
    assert BEFORE_DECODE in text
    wrong = wrong_of(case, "nvfp4", text.replace(BEFORE_DECODE, replacement), "gate difference")
    assert wrong, fault
