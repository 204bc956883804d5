# SPDX-License-Identifier: Apache-2.0
"""Holds the one directory for `trtllm-serve --custom_module_dirs`; nothing else may live here, it goes on sys.path."""
