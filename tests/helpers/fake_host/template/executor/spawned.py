# SPDX-License-Identifier: Apache-2.0
"""One spawned worker: unpickles a function BY REFERENCE and its arguments, and calls it."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    function, args = pickle.loads(Path(sys.argv[1]).read_bytes())
    function(*args)
