"""Test the arithmetic of all Triton kernels in Triton's interpreter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_python

pytest.importorskip("triton")
FOLDER = Path(__file__).parent


def test_the_arithmetic_is_plain_torchs_and_attention_a_softmax():
    """It runs in its own process: TRITON_INTERPRET must be set before triton is imported, which torch with CUDA imports
    early, so a process forked after importing torch will not do."""
    program = "import sys, pytest; assert 'triton' not in sys.modules; sys.exit(pytest.main(sys.argv[1:]))"
    files = sorted(map(str, FOLDER.glob("interpreted_*.py")))
    command = [sys.executable, "-c", program, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    where = {"cwd": FOLDER.parents[1], "timeout": 280}
    if torch.version.cuda:
        result = subprocess.run(command, capture_output=True, text=True, **where)
    else:
        result = warm_python.run(command, **where)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(files) == 4 and re.search(r"\d+ passed", result.stdout) and "skipped" not in result.stdout
