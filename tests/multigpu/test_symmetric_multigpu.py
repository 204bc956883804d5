# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory between GPUs: `torchrun --standalone --nproc-per-node N -m pytest tests/multigpu`, or mpirun."""

from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.symmetric_program import WAIT_S, assert_exchanged, communicator, exchange
from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.symmetric.devices import OVERLAP_VARIABLE, choose_device, nvlink_matrix

pytestmark = [
    pytest.mark.gpu_2,
    pytest.mark.skipif(os.environ.get(OVERLAP_VARIABLE) == "1", reason="ranks share GPUs here, by request"),
]


@pytest.fixture(scope="module")
def comm() -> Communicator:
    return communicator()


def test_every_rank_gets_a_gpu_of_its_own_joined_by_nvlink(comm: Communicator) -> None:
    device = choose_device(comm, WAIT_S)
    assert torch.cuda.current_device() == device.index
    indices = comm.allgather(device.index, WAIT_S)
    assert sorted(indices) == sorted(set(indices))
    matrix = nvlink_matrix()
    assert matrix is not None
    assert all(matrix[device.index][other] > 0 for other in indices if other != device.index)


def test_words_written_to_every_gpu_arrive(comm: Communicator) -> None:
    assert_exchanged(comm.allgather(exchange(comm, "cuda"), WAIT_S))


def test_choice_of_the_application_is_kept(comm: Communicator) -> None:
    index = (comm.rank + 1) % comm.size
    torch.cuda.set_device(index)
    assert choose_device(comm, WAIT_S) == torch.device("cuda", index)
    assert_exchanged(comm.allgather(exchange(comm, "cuda"), WAIT_S))
