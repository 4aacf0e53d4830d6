"""Dependencies, extras and what is packed; all other metadata is in pyproject.toml, exact versions
in constraints.txt.

`scripts/venv.sh` reads the two literals below to see whether an environment is complete: keep them
literals.
"""

from setuptools import find_packages, setup

# The oldest versions were tried together on Python 3.10, the newest ones of December 2026 on Python
# 3.13. A comment has the newest version that was tried. An upper bound is the next major version of
# a library that has broken things with one. `flexgen_h2o/core/libraries.py` has those whose insides
# are used.
CORE = [
    "torch>=2.6,<3",  # 2.14.1
    "numpy>=1.26",  # 2.5.5
    "transformers>=5.20,<6",  # 5.24.0
    "tqdm>=4.64",  # 4.70.1
    "pulp>=2.8,<5",  # 4.2.0
    # PuLP 4 needs Python 3.12, and brings no solver. Its own extra `cbc` is 50 times larger.
    # 1.16 writes a banner to stdout, and has no switch for it.
    "highspy>=1.10,<1.16; python_version >= '3.12'",  # 1.15.1
    "numba>=0.60",  # 0.68.1
    "safetensors>=0.8",  # 0.8.0, which transformers 5.20 asks for as well
    "psutil>=5.9",  # 7.2.2
]
# The default tests run with the newest versions of December 2026, which constraints.txt has. The
# oldest versions of `serve` were tried as well.
EXTRAS = {
    # The versions that the tests run with, of what changes most: those of constraints.txt (tested).
    "tested": [
        "torch==2.13.0",
        "transformers==5.20.2; python_version < '3.11'",
        "transformers==5.23.0; python_version >= '3.11'",
    ],
    "dev": [
        "ruff>=0.17",
        "mypy>=2.0",
        "pytest>=8.2",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "jsonschema>=4.20",
        "openai>=3.50",
        "httpx2>=2.12",
        "starlette>=1.7",
        "uvicorn>=0.50",
        "python-multipart>=0.0.30",
    ],
    "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"],
    "bench": ["accelerate>=1.0", "matplotlib>=3.8"],
    "eval": [
        "rouge-score>=0.1.2",
        "rouge>=1.0.1",
        "lm-eval>=0.4.13",
        "nltk>=3.9.1",
        "wonderwords>=2.2",
        "matplotlib>=3.8",
    ],
    "gguf": ["gguf>=0.19", "accelerate>=1.0"],  # with both of them transformers reads a GGUF file
    "gpu": ["triton>=3.6"],
    "plot": ["matplotlib>=3.8"],
    "serve": ["starlette>=1.7", "uvicorn>=0.50", "python-multipart>=0.0.30"],
    "browser": ["selenium>=4.40"],
    "ray": ["ray[data]>=2.60,<2.64"],
}

setup(
    packages=[*find_packages(include=["flexgen_h2o", "flexgen_h2o.*"]), "flexgen_h2o.policies"],
    package_dir={
        "flexgen_h2o.policies": "policies"
    },  # data only; it stays at the top of the repository
    package_data={
        "flexgen_h2o": [
            "py.typed",
            "assets/opt-tiny/*",
            "serving/static/*",
            "kvcache/eviction/kv_size.json",
            "models/built_in.json",
        ],
        "flexgen_h2o.policies": ["*/*.json"],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
)
