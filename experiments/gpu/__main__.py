"""``python -m experiments.gpu``: see ``runner``."""

import sys

from experiments.gpu.parts import PARTS
from experiments.gpu.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PARTS, [sys.executable, "-m", "experiments.gpu"]))
