# SPDX-License-Identifier: Apache-2.0
"""`trtllm-serve MODEL --extra_llm_api_options FILE [--custom_module_dirs DIR]`, cut down to one scenario."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--extra_llm_api_options", "--config", dest="extra")
    parser.add_argument("--custom_module_dirs", action="append", default=[])
    parser.add_argument("--scenario", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--timeout_s", type=float, default=120.0)
    options = parser.parse_args(argv)
    from tensorrt_llm.tools.importlib_utils import import_custom_module_from_dir

    for directory in options.custom_module_dirs:
        import_custom_module_from_dir(directory)
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs, update_llm_args_with_extra_dict

    extra = yaml.safe_load(Path(options.extra).read_text()) if options.extra else {}
    args = TorchLlmArgs(**update_llm_args_with_extra_dict({"model": options.model}, extra))
    from tensorrt_llm.executor.proxy import GenerationExecutorProxy

    return GenerationExecutorProxy(args, options.scenario, options.out).run(options.timeout_s)


if __name__ == "__main__":
    sys.exit(main())
