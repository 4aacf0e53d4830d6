"""Metadata, dependencies and extras; tool settings are in pyproject.toml, exact versions in constraints.txt.

`scripts/venv.sh` reads the two literals below to see whether an environment is complete: keep them literals.
"""

from setuptools import find_packages, setup

CORE = [
    "torch>=2.6",
    "numpy>=1.26",
    "transformers>=5.20",
    "tqdm>=4.64",
    "pulp>=2.8",
    "numba>=0.60",
    "safetensors>=0.4.3",
    "psutil>=5.9",
]
EXTRAS = {
    "dev": [
        "ruff>=0.17",
        "mypy>=2.0",
        "pytest>=8.2",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "openai>=3.50",
        "httpx2>=2.12",
        "starlette>=1.7",
        "uvicorn>=0.50",
        "python-multipart>=0.0.30",
    ],
    "bench": ["accelerate>=1.0", "matplotlib>=3.8"],
    "eval": [
        "rouge-score>=0.1.2",
        "rouge>=1.0.1",
        "lm-eval>=0.4.13",
        "nltk>=3.9.1",
        "wonderwords>=2.2",
        "matplotlib>=3.8",
    ],
    "gpu": ["triton>=3.6"],
    "plot": ["matplotlib>=3.8"],
    "serve": ["starlette>=1.7", "uvicorn>=0.50", "python-multipart>=0.0.30"],
    "browser": ["selenium>=4.40"],
    "ray": ["ray[data]>=2.60,<2.64"],
}

setup(
    name="flexgen-h2o",
    version="0.1.0",
    description="Offline LLM inference for models that do not fit the machine: FlexGen's schedule, H2O's KV cache",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["flexgen_h2o", "flexgen_h2o.*"]), "flexgen_h2o.policies"],
    package_dir={"flexgen_h2o.policies": "policies"},  # data only; it stays at the top of the repository
    package_data={
        "flexgen_h2o": ["py.typed", "assets/opt-tiny/*", "serving/static/*"],
        "flexgen_h2o.policies": ["*/*.json"],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["flexgen-h2o = flexgen_h2o.cli:main"]},
)
