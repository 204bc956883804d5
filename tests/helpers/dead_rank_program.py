# SPDX-License-Identifier: Apache-2.0
"""One rank of layers whose last rank fails: `python -m THIS_MODULE OUT_DIR`, under mpirun or torchrun's variables.

First the last rank leaves a launch out; every other rank must get an error that names it within the limit, and all of
them build a new layer together. Then it is killed: the same error in time, and a survivor builds a layer of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.helpers.layer_cases import LayerCase, make_case, oracle_of
from trtllm_megamoe.comm import Communicator, mpi, single, torch_distributed
from trtllm_megamoe.comm.launch import detect
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeError
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.reference.metrics import rel_l2

LIMIT_S = 2.0
WAIT_S = 60.0
GOOD_LAUNCHES = 3


def rank_case(ranks: int) -> LayerCase:
    """Eight tokens a rank."""
    fields = {"engine": "cuda", "max_tokens_per_rank": 64, "timeout_s": LIMIT_S, "activations": "nvfp4"}
    return make_case("uniform", ep_size=ranks, num_tokens=8 * ranks, **fields)  # type: ignore[arg-type]


def config(ranks: int) -> MegaMoeConfig:
    """Of the layers."""
    return rank_case(ranks).config


class Program:
    """One rank."""

    def __init__(self, out_dir: Path, comm: Communicator) -> None:
        self.comm, self.case, self.out_dir = comm, rank_case(comm.size), out_dir
        self.rows = self.case.rank_slice(comm.rank)
        routing = self.case.routing
        self.given = [values[self.rows] for values in (self.case.x, routing.topk_ids, routing.topk_weights)]
        self.result: dict[str, Any] = {"rank": comm.rank, "size": comm.size}

    @property
    def is_last(self) -> bool:
        """Whether this is the rank that fails."""
        return self.comm.rank == self.comm.size - 1

    def layer(self, comm: Communicator) -> MegaMoELayer:
        """A loaded layer."""
        layer = MegaMoELayer(self.case.config, comm)
        layer.load_weights(self.case.weights)
        return layer

    def forward(self, layer: MegaMoELayer) -> torch.Tensor:
        """This rank's tokens through a layer, on the GPU that the layer chose."""
        x, ids, weights = (values.to(layer.device) for values in self.given)
        return layer.forward(x, ids, weights)

    def error_of(self, layer: MegaMoELayer) -> float:
        """rel-L2 of this rank's rows against the oracle."""
        return float(rel_l2(self.forward(layer).cpu(), oracle_of(self.case)[self.rows]))

    def wait_in_vain(self, layer: MegaMoELayer) -> dict[str, Any]:
        """A launch without the last rank: seconds until it ended, and what the next one raises."""
        self.forward(layer)
        started = time.monotonic()
        torch.cuda.synchronize()
        seconds = time.monotonic() - started
        try:
            self.forward(layer)
        except MegaMoeError as err:
            return {"seconds": seconds, "error": f"{type(err).__name__}: {err}"}
        return {"seconds": seconds, "error": ""}

    def leave_one_out(self) -> None:
        """The last rank does not launch, and lives."""
        layer = self.layer(self.comm)
        for _ in range(GOOD_LAUNCHES):
            self.forward(layer)
        torch.cuda.synchronize()
        self.comm.barrier(WAIT_S)
        if not self.is_last:
            self.result["absent"] = self.wait_in_vain(layer)
        self.comm.barrier(WAIT_S)

    def kill(self) -> None:
        """All ranks build anew; the last one dies between two launches."""
        layer = self.layer(self.comm)
        self.result["rebuilt_rel_l2"] = self.error_of(layer)
        torch.cuda.synchronize()
        self.comm.barrier(WAIT_S)
        if self.is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.result["killed"] = self.wait_in_vain(layer)
        with self.layer(single()) as fresh:
            self.result["fresh_rel_l2"] = self.error_of(fresh)
        (self.out_dir / f"rank{self.comm.rank}.json").write_text(json.dumps(self.result))


def main() -> None:
    program = Program(Path(sys.argv[1]), mpi() if detect().is_launched else torch_distributed(WAIT_S))
    program.leave_one_out()
    program.kill()
    os._exit(0)  # MPI or a process group with a dead member would wait for it


if __name__ == "__main__":
    main()
