# SPDX-License-Identifier: Apache-2.0
"""What every rank's worker process runs first: registration, then the host's own entry.

The host hands its workers a function by reference, so naming this one makes each worker import this package.
"""

from __future__ import annotations

import importlib
from typing import Any


def worker_main(*args: Any, **kwargs: Any) -> Any:
    """Register the backend in this rank, then run the host's worker.

    Raises:
        MegaMoeUnavailableError: The host is not what the plug-in was written for; no model is built.
    """
    importlib.import_module("trtllm_megamoe.host.register").register()
    return importlib.import_module("tensorrt_llm.executor.worker").worker_main(*args, **kwargs)
