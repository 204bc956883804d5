# SPDX-License-Identifier: Apache-2.0
"""One rank of a layer whose last rank is killed: `python -m THIS_MODULE OUT_DIR`, under torchrun's variables.

Every other rank must get an error that names the dead one within the limit, and can build a new layer afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from tests.helpers.layer_cases import make_case, oracle_of
from trtllm_megamoe.comm import single, torch_distributed
from trtllm_megamoe.errors import MegaMoeError
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.reference.metrics import rel_l2

LIMIT_S = 2.0
WAIT_S = 60.0
GOOD_LAUNCHES = 3


def main() -> None:
    out_dir = Path(sys.argv[1])
    comm = torch_distributed(WAIT_S)
    fields = {"engine": "cuda", "max_tokens_per_rank": 64, "timeout_s": LIMIT_S, "activations": "nvfp4"}
    case = make_case("uniform", ep_size=comm.size, num_tokens=8 * comm.size, **fields)  # type: ignore[arg-type]
    layer = MegaMoELayer(case.config, comm)
    layer.load_weights(case.weights)
    rows = case.rank_slice(comm.rank)
    inputs = (case.x[rows].cuda(), case.routing.topk_ids[rows].cuda(), case.routing.topk_weights[rows].cuda())
    for _ in range(GOOD_LAUNCHES):
        layer.forward(*inputs)
    torch.cuda.synchronize()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    layer.forward(*inputs)
    started = time.monotonic()
    torch.cuda.synchronize()
    result = {"rank": comm.rank, "size": comm.size, "seconds": time.monotonic() - started}
    try:
        layer.forward(*inputs)
        result["error"] = ""
    except MegaMoeError as err:
        result["error"] = f"{type(err).__name__}: {err}"
    with MegaMoELayer(case.config, single()) as fresh:
        fresh.load_weights(case.weights)
        result["fresh_rel_l2"] = rel_l2(fresh.forward(*inputs).cpu(), oracle_of(case)[rows])
    (out_dir / f"rank{comm.rank}.json").write_text(json.dumps(result))
    os._exit(0)  # a process group with a dead member would wait for it


if __name__ == "__main__":
    main()
