# SPDX-License-Identifier: Apache-2.0
"""`python -m trtllm_megamoe`."""

from trtllm_megamoe.cli.main import main

if __name__ == "__main__":
    main()
