"""``python -m experiments.gpu``."""

from experiments.gpu.steps import main

if __name__ == "__main__":
    main()
