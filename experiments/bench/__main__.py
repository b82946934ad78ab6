"""``python -m experiments.bench``."""

from experiments.bench.suite import main

if __name__ == "__main__":
    main()
