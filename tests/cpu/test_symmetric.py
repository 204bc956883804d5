# SPDX-License-Identifier: Apache-2.0
"""Providers of symmetric memory in one process, the header that peers compare, and the choice of a provider."""

from __future__ import annotations

import random

import pytest
import torch

from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.comm.base import Communicator as CommunicatorBase
from trtllm_megamoe.errors import (
    MegaMoeConfigError,
    MegaMoeRankDivergenceError,
    MegaMoeTimeoutError,
    MegaMoeUnavailableError,
    MegaMoeVerificationError,
)
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.regions import (
    HEADER_FACTS,
    HEADER_GENERATION,
    HEADER_LAYOUT,
    Geometry,
    RegionTable,
    header_words,
    launch_facts,
    layout_digest,
)
from trtllm_megamoe.symmetric import SymmetricMemory, allocate_symmetric
from trtllm_megamoe.symmetric.base import require_same_header
from trtllm_megamoe.symmetric.local import GUARD_BYTES, LocalMemory, VirtualRankMemory

CPU = torch.device("cpu")
WATCHDOG_S = 30.0
EP = 4


def table_for(ep_size: int = EP, **changes: object) -> RegionTable:
    fields = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_experts": 8,
        "top_k": 2,
        "max_tokens_per_rank": 8,
        "ep_size": ep_size,
        "combine_format": CombineFormat.BF16,
        "activations": "nvfp4",
    }
    return RegionTable(Geometry(**(fields | changes)))


def region(view: torch.Tensor, table: RegionTable, name: str) -> torch.Tensor:
    return view[table[name].offset_bytes : table[name].end_bytes]


@pytest.fixture
def _dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds garbage, as it does on a machine that has run for a while."""
    empty = torch.empty

    def dirty(*size: int, **options: object) -> torch.Tensor:
        memory: torch.Tensor = empty(*size, **options)
        return memory.fill_(0x5C) if memory.dtype == torch.uint8 else memory

    monkeypatch.setattr(torch, "empty", dirty)


def assert_at_start(view: torch.Tensor, table: RegionTable, generation: int) -> None:
    """Every zero-at-start byte but the header's two words is zero; nothing else was cleared (R6)."""
    for entry in table.regions("shared"):
        content = region(view, table, entry.name)
        if entry.name == "header":
            words = content.view(torch.int64).tolist()
            assert words == [generation, layout_digest(table)] + [0] * 6
        elif entry.zero_at_start:
            assert not content.any(), entry.name
        elif content.numel():
            assert bool((content == 0x5C).all()), entry.name


@pytest.mark.usefixtures("_dirty_memory")
def test_local_memory_starts_with_zeros_and_its_header_and_touches_nothing_else() -> None:
    table = table_for(1)
    memory = allocate_symmetric(table, single(), CPU, WATCHDOG_S)
    assert isinstance(memory, LocalMemory)
    assert memory.own.numel() == table.total_bytes("shared")
    assert memory.peer_addresses == (memory.own.data_ptr(),)
    assert_at_start(memory.own, table, memory.generation)
    memory.close()
    memory.close()
    assert memory.views == ()


@pytest.mark.usefixtures("_dirty_memory")
def test_virtual_ranks_see_each_others_memory_at_the_exchanged_addresses() -> None:
    table = table_for()

    def body(comm: Communicator) -> tuple[tuple[int, ...], int, int, list[int]]:
        memory = allocate_symmetric(table, comm, CPU, WATCHDOG_S)
        assert isinstance(memory, VirtualRankMemory)
        for view in memory.views:
            assert_at_start(view, table, memory.generation)
        comm.barrier(WATCHDOG_S)
        for peer, view in enumerate(memory.views):  # every rank writes its number into its slot of every peer
            region(view, table, "return_counters").view(torch.int64)[comm.rank] = 100 * comm.rank + peer
        comm.barrier(WATCHDOG_S)
        received = region(memory.own, table, "return_counters").view(torch.int64).tolist()
        comm.barrier(WATCHDOG_S)
        memory.close()
        return memory.peer_addresses, memory.generation, memory._guarded.data_ptr(), received

    per_rank = run_threads(EP, body, WATCHDOG_S)
    addresses, generations, bases, received = zip(*per_rank, strict=True)
    assert len(set(addresses)) == 1 and len(set(addresses[0])) == EP
    assert addresses[0] == tuple(base + GUARD_BYTES for base in bases)
    assert len(set(generations)) == 1 and generations[0] > 0
    assert list(received) == [[100 * peer + rank for peer in range(EP)] for rank in range(EP)]


def test_generation_is_another_one_for_every_allocation_and_fits_a_signed_word() -> None:
    def body(comm: Communicator) -> list[int]:
        return [allocate_symmetric(table_for(), comm, CPU, WATCHDOG_S).generation for _ in range(3)]

    per_rank = run_threads(EP, body, WATCHDOG_S)
    assert all(row == per_rank[0] for row in per_rank)
    assert len(set(per_rank[0])) == 3
    assert all(0 < generation < 1 << 63 for generation in per_rank[0])


@pytest.mark.parametrize("distance", [-GUARD_BYTES, -1, 0, GUARD_BYTES - 1])
def test_virtual_rank_write_outside_its_memory_is_found_and_located(distance: int) -> None:
    table = table_for(2)
    num_bytes = table.total_bytes("shared")

    def body(comm: Communicator) -> str:
        memory = VirtualRankMemory(table, comm, CPU, WATCHDOG_S)
        memory.check_guards()
        if comm.rank == 1:  # negative: so far in front of the space; else so far behind its end
            byte = GUARD_BYTES + distance + (num_bytes if distance >= 0 else 0)
            memory._guarded[byte] = 0
            with pytest.raises(MegaMoeVerificationError) as caught:
                memory.close()
            return str(caught.value)
        memory.close()
        return ""

    text = run_threads(2, body, WATCHDOG_S)[1]
    side, bytes_outside = ("in front of", -distance) if distance < 0 else ("behind", distance + 1)
    assert f"rank 1: 1 bytes were written {side} its shared memory" in text
    assert f"{bytes_outside} bytes outside" in text


def test_virtual_rank_that_never_allocates_is_named_within_the_limit() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            return
        with pytest.raises(MegaMoeTimeoutError, match=r"for ranks \[2\]"):
            allocate_symmetric(table_for(), comm, CPU, 0.3)

    run_threads(EP, body, WATCHDOG_S)


@pytest.mark.parametrize(
    ("word", "name"), [(HEADER_GENERATION, "generation"), (HEADER_LAYOUT, "layout digest"), (5, "unused")]
)
def test_stale_or_differently_laid_out_peer_is_found_by_its_header(word: int, name: str) -> None:
    table = table_for(2)

    def body(comm: Communicator) -> None:
        memory: SymmetricMemory = allocate_symmetric(table, comm, CPU, WATCHDOG_S)
        require_same_header(memory, table, comm)
        comm.barrier(WATCHDOG_S)
        if comm.rank == 1:
            region(memory.own, table, "header").view(torch.int64)[word] += 2
        comm.barrier(WATCHDOG_S)
        if comm.rank == 0:
            with pytest.raises(MegaMoeRankDivergenceError, match=rf"of rank 1 .* header word {word} \({name}\)"):
                require_same_header(memory, table, comm)

    run_threads(2, body, WATCHDOG_S)


def test_layout_digest_changes_with_every_fact_of_the_geometry_and_with_nothing_else() -> None:
    base = layout_digest(table_for())
    assert base == layout_digest(table_for()) and 0 < base < 1 << 63
    changes = [
        {"hidden_size": 128},
        {"intermediate_size": 48},
        {"num_experts": 16},
        {"top_k": 3},
        {"max_tokens_per_rank": 9},
        {"ep_size": 2},
        {"combine_format": CombineFormat.FP8},
        {"activations": "auto"},
    ]
    assert len({base, *(layout_digest(table_for(**change)) for change in changes)}) == 1 + len(changes)
    assert header_words(table_for(), 77)[:2] == (77, base)


def test_launch_facts_of_other_layers_or_weights_are_other_words_below_the_sign_bit() -> None:
    draw = random.Random(5)
    pairs = {(draw.randrange(1 << 20), draw.randrange(1 << 32)) for _ in range(2000)} | {(0, 0), (0, 1), (1, 0)}
    words = {launch_facts(layer, digest) for layer, digest in pairs}
    assert len(words) == len(pairs) and all(0 < word < 1 << 63 for word in words)
    assert len(header_words(table_for(), 1)) > HEADER_FACTS + 1


class _UnknownTransport(CommunicatorBase):
    rank, size, world_size, transport = 0, 2, 2, "pigeon"

    def allgather(self, value: object, timeout_s: float) -> list[object]:
        raise AssertionError("refused before any collective")

    def barrier(self, timeout_s: float) -> None:
        raise AssertionError("refused before any collective")

    def fence(self) -> None: ...


def test_unknown_kind_of_ranks_is_refused_before_any_collective() -> None:
    with pytest.raises(MegaMoeUnavailableError, match="no shared host memory between 2 ranks of transport 'pigeon'"):
        allocate_symmetric(table_for(2), _UnknownTransport(), CPU, WATCHDOG_S)


def test_run_threads_on_a_gpu_refuses_more_ranks_than_streams() -> None:
    with pytest.raises(MegaMoeConfigError, match="at most 32 virtual ranks"):
        run_threads(33, lambda comm: None, WATCHDOG_S, device="cuda")


def test_launch_together_no_rank_passes_before_all_have_launched() -> None:
    """Whatever a rank does before or after its launch cannot stand between two launches."""
    events: list[str] = []

    def body(comm: Communicator) -> None:
        for _ in range(20):
            events.append("outside")
            comm.launch_together(lambda: events.append("launch"), WATCHDOG_S)

    run_threads(EP, body, WATCHDOG_S)
    launches = [index for index, event in enumerate(events) if event == "launch"]
    for first in range(0, len(launches), EP):
        assert launches[first + EP - 1] - launches[first] == EP - 1, events[launches[first] : launches[first + EP - 1]]
