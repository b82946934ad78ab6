"""Builds the package. Everything about it is here; its version is in flexhybrid/__init__.py.

A wheel has the folders of BESIDE inside flexhybrid (``flexhybrid.sim``), so that it takes no names at the top of
site-packages, where a user's own ``experiments`` may be. Their imports are rewritten when they are copied. An editable
install leaves the repository's folders where they are.
"""

import re
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

BESIDE = ("sim", "policy_search", "experiments", "figures")
#: Folders of data (named in package_data), and what only developers run.
LEFT_OUT = ("flexhybrid.shipped.*", "experiments.reproduce.notes", "experiments.results*")
LEFT_OUT += tuple(f"experiments.{name}*" for name in ("bench", "checkpoints", "gpu", "peers", "studies", "training"))
NAMES = "|".join(BESIDE)
#: Import of a folder of BESIDE, or from one -> the same import in a wheel.
IMPORTS = {rf"^(\s*)import ({NAMES})$": r"\1from flexhybrid import \2"}
IMPORTS |= {rf"^(\s*(?:from|import) )(?=(?:{NAMES})\b)": r"\1flexhybrid."}
HOME = "" if "editable_wheel" in sys.argv else "flexhybrid."  #: package that has the folders of BESIDE
ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "flexhybrid/__init__.py").read_text(encoding="utf-8"))


class BuildPy(build_py):
    """Copies modules, and rewrites their imports of the folders of BESIDE."""

    def build_module(self, module, module_file, package):
        outfile, copied = super().build_module(module, module_file, package)
        text = rewritten = Path(module_file).read_text(encoding="utf-8")
        for pattern, inside in IMPORTS.items() if HOME else ():
            rewritten = re.sub(pattern, inside, rewritten, flags=re.MULTILINE)
        if rewritten != text:
            Path(outfile).write_text(rewritten, encoding="utf-8")
        return outfile, copied


def packages() -> list[str]:
    """Return the names of all packages where they are installed."""
    patterns = [pattern for name in ("flexhybrid", *BESIDE) for pattern in (name, f"{name}.*")]
    found = find_namespace_packages(include=patterns, exclude=LEFT_OUT)
    return [HOME * (name.partition(".")[0] in BESIDE) + name for name in found]


setup(
    name="flexhybrid",
    version=VERSION[1],
    description="Runs language models whose weights and caches do not fit the GPU, and predicts how fast.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="LLM inference offloading KV cache simulator",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    cmdclass={"build_py": BuildPy},
    packages=packages(),
    package_dir={HOME + name: name for name in BESIDE},
    package_data={
        HOME + "sim": ["catalogue/*.json"],
        "flexhybrid": ["shipped/*.txt", "shipped/opt-stdlib-4m/*", "core/context/*.csv", "jobs/run/report.html"],
        HOME + "figures": ["report.css"],
        HOME + "experiments": [
            *("grid.toml", "reference/*.csv", "reference/README.md"),
            *("reproduce/*.csv", "reproduce/notes/*.md", "reproduce/report.*"),
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
