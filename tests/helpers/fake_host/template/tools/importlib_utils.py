# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import sys
from pathlib import Path


def import_custom_module_from_dir(directory):
    path = Path(directory).resolve()
    if not path.is_dir():
        raise FileNotFoundError(f"no such directory: {path}")
    sys.path.insert(0, str(path.parent))
    importlib.import_module(path.name)
