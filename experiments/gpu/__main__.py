"""``python -m experiments.gpu``: see ``runner``."""

import sys

try:
    from experiments.gpu.parts import PARTS
    from experiments.gpu.runner import main
except ModuleNotFoundError as error:
    sys.exit(
        f"experiments.gpu: {sys.executable} has no {error.name}: make gpu PYTHON=… takes one with torch and the rest"
    )

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PARTS, [sys.executable, "-m", "experiments.gpu"]))
