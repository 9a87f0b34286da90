"""Packages the library and the experiments with their recipes."""

import setuptools

CORE = [
    "absl-py>=2.1",
    "flax>=0.12",
    "gguf>=0.17",
    "grain>=0.2.15",
    "jax>=0.10",
    "jinja2>=3.1.5",
    "ml_collections>=1.0",
    "numpy>=2.0",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.12",
    "rich>=13.9",
    "safetensors>=0.5",
    "scipy>=1.14",
    "tensorstore>=0.1.75",
    "tokenizers>=0.21",
]

EXTRAS = {
    "serve": [
        "llguidance>=1.7",
        "prometheus-client>=0.22",
        "pydantic>=2.11",
        "starlette>=0.46",
        "uvicorn>=0.34",
    ],
    "online": ["redis>=6.0"],
    "report": ["matplotlib>=3.9"],
    "dev": [
        "chex>=0.1.90",
        "hypothesis>=6.130",
        "ipykernel>=6.29",
        "mypy>=1.15",
        "nbclient>=0.10",
        "pytest>=8.3",
        "pytest-xdist>=3.6",
        "ruff>=0.11",
    ],
    "tpu": ["jax[tpu]>=0.10"],
    "gpu": ["jax[cuda12]>=0.10"],
}

setuptools.setup(
    name="spec_jax",
    version="0.1.0",
    description="Train and serve speculative-decoding drafters in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=setuptools.find_namespace_packages(
        include=[
            f"{name}{tail}"
            for name in ("spec_jax", "pallas_kernels", "experiments", "configs")
            for tail in ("", ".*")
        ]
    ),
    package_data={"": ["*.jsonl", "*.json", "*.txt", "*.html"]},
    install_requires=CORE,
    extras_require=EXTRAS,
)
