from setuptools import find_namespace_packages, setup

FLOORS = ("flexhybrid", "sim", "policy_search", "experiments", "figures")

setup(
    name="flexhybrid",
    version="0.1.0",
    description="Runs language models whose weights and caches do not fit the GPU, and predicts how fast.",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(
        include=[pattern for name in FLOORS for pattern in (name, f"{name}.*")],
        # data, named in package_data
        exclude=[
            "flexhybrid.shipped.*",
            "experiments.checkpoints*",
            "experiments.results*",
            "experiments.reproduce.notes",
        ],
    ),
    package_data={
        "sim": ["catalogue/*.json"],
        "flexhybrid": ["shipped/*.txt", "shipped/*/*", "core/context/*.csv", "jobs/run/report.html"],
        "figures": ["report.css"],
        "experiments": [
            *("checkpoints/**/*", "grid.toml", "reference/*.csv", "reference/README.md"),
            *("reproduce/*.csv", "reproduce/notes/*.md", "reproduce/report.*"),
            *("studies/*.txt", "studies/*.jsonl", "studies/tasks/*.jsonl", "studies/tasks/*.yaml"),
            # what our own models and cascades did, for reproduce; what peers found, to compare with
            *("results/accuracy/**/*.json", "results/cascade/*.json", "results/peers/*.json"),
        ],
    },
    entry_points={"console_scripts": ["flexhybrid = flexhybrid.__main__:main"]},
    install_requires=[
        "torch>=2.4",
        "numpy",
        "scipy",
        "pandas",
        "matplotlib",
        "jinja2",
        "pulp[highs]>=3.3.2,<5",
        "safetensors",
        "transformers>=4.45,<6",  # 5.6 for models that run through its layers (runtime/models/transformer.py)
        "greenlet>=3",  # runs transformers' layers up to their attention
        "tokenizers",
        "sentencepiece",  # reads tokenizer.model, spiece.model
        "protobuf",  # likewise
        "tqdm",
    ],
    extras_require={
        "parquet": ["pyarrow"],  # for Parquet files and dataset folders
        "ray": ["ray[data,serve]>=2.50,<2.64"],  # for --engine ray
        "cascade": ["scikit-learn>=1.3"],  # the handwritten digits of experiments.training.digits
        "structured": ["llguidance>=1.0,<2"],  # for structured outputs: JSON schemas, regular expressions, choices
        "cpu": ["numba>=0.61"],  # compiled kernels for a CPU: attention, packing, blocks' rows
        # for `flexhybrid serve`; python-multipart for its uploads
        "serve": ["starlette>=0.40", "uvicorn>=0.30", "prometheus_client", "python-multipart"],
        "tiktoken": ["tiktoken"],  # for tokenizers of that kind without tokenizer.json
        "energy": ["nvidia-ml-py"],  # reads the power of NVIDIA GPUs
        "lm-eval": ["lm_eval>=0.4.10"],  # for flexhybrid.lm_eval_adapter
        "test": ["pytest", "hypothesis", "pytest-timeout", "pytest-xdist", "openai"],
        "lint": ["ruff"],
    },
)
