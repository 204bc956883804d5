# SPDX-License-Identifier: Apache-2.0
"""What `--custom_module_dirs` imports: the plug-in. Give it `$(python -m trtllm_megamoe.host)`."""

from __future__ import annotations

import trtllm_megamoe.host  # noqa: F401  (importing it is the point)
