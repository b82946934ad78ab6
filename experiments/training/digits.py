"""A cascade of real models on real data: small CNNs on scikit-learn's handwritten digits (1,797 images of 8 x 8).

Four sizes learn from the same images; the smaller three cost 1/130, 1/22 and 1/4 of the largest. Nothing is downloaded:
the images are part of scikit-learn (``pip install -e .[cascade]``)::

    python -m experiments.training.digits --out digits

Energy is stated, not measured: multiply-adds of a forward pass at the picojoules of one (PICOJOULES).
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from flexhybrid.cascade.models import ModelOutputs
from flexhybrid.cascade.routes import CascadeModel
from flexhybrid.cascade.thresholds.confidence import Scored
from flexhybrid.cascade.thresholds.fit import Fitted, fit
from flexhybrid.runtime.process_settings import torch_threads

#: Channels of the two convolutions of each model.
SIZES = {"cnn-xs": (2, 4), "cnn-s": (6, 12), "cnn-m": (16, 32), "cnn-l": (32, 64)}
NUM_TRAINING, NUM_VALIDATION = 800, 500  #: of the 1,797 images; the rest is held out
SIDE, NUM_CLASSES = 8, 10
EPOCHS, BATCH, PEAK_RATE = 20, 64, 6e-3
#: Energy of a 32-bit multiply-add with its operands' way through a cache: Horowitz, ISSCC 2014, Fig. 1.1.9, 45 nm.
PICOJOULES = 4.6 + 10.0


@dataclass(frozen=True)
class Split:
    """Images [N, 1, 8, 8] in 0 .. 1 and their digits [N]."""

    x: torch.Tensor
    labels: torch.Tensor


def splits(seed: int) -> dict[str, Split]:
    """ "training", "validation" and "held out", shuffled by the seed."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, SIDE, SIDE)[order]
    labels = torch.tensor(labels)[order]
    ends = (0, NUM_TRAINING, NUM_TRAINING + NUM_VALIDATION, len(x))
    names = ("training", "validation", "held out")
    return {name: Split(x[a:b], labels[a:b]) for name, a, b in zip(names, ends, ends[1:])}


def build(name: str) -> nn.Module:
    """A fresh CNN: two convolutions, each halving the image, and one linear layer."""
    first, second = SIZES[name]
    return nn.Sequential(
        *(nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(second * (SIDE // 4) ** 2, NUM_CLASSES)),
    )


def multiply_adds(name: str) -> int:
    """Return the multiply-adds of one image."""
    first, second = SIZES[name]
    return SIDE**2 * 9 * first + (SIDE // 2) ** 2 * 9 * first * second + second * (SIDE // 4) ** 2 * NUM_CLASSES


def energy_j(name: str) -> float:
    """Return the stated energy of one image in joules."""
    return multiply_adds(name) * PICOJOULES * 1e-12


def train(name: str, data: Split, seed: int, epochs: int = EPOCHS) -> nn.Module:
    """AdamW with a one-cycle learning rate; the same seed gives the same model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(name)
    steps = len(data.x) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=epochs * steps)
    for _ in range(epochs):
        order = torch.randperm(len(data.x), generator=generator)
        for batch in order[: steps * BATCH].split(BATCH):
            loss = F.cross_entropy(model(data.x[batch]), data.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def train_all(seed: int, epochs: int = EPOCHS, names: tuple[str, ...] = tuple(SIZES)) -> dict[str, nn.Module]:
    """Train the models from small to large, on one thread, since they are too small for two."""
    with torch_threads(1):
        data = splits(seed)["training"]
        return {name: train(name, data, seed, epochs) for name in names}


@torch.inference_mode()
def logits_of(model: nn.Module, x: torch.Tensor) -> np.ndarray:
    """[N, 1, classes]."""
    return model(x).double().numpy()[:, None]


def fit_on(models: dict[str, nn.Module], data: Split) -> Fitted:
    """Fit the models' confidence on a validation set."""
    named = [CascadeModel(name, energy_j=energy_j(name)) for name in models]
    all_logits = [logits_of(model, data.x) for model in models.values()]
    predictions = [ModelOutputs([], logits, np.ones(logits.shape[:2], dtype=bool)) for logits in all_logits]
    return fit(named, predictions, data.labels.numpy()[:, None])


def scored_on(model: nn.Module, data: Split) -> Scored:
    """Return a model's logits with the labels."""
    logits = logits_of(model, data.x)
    return Scored(logits, data.labels.numpy()[:, None], np.ones(logits.shape[:2], dtype=bool))


def export(model: nn.Module, path: Path) -> None:
    """Write a .pt2 file whose batch size is dynamic."""
    example = torch.zeros(2, 1, SIDE, SIDE)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)


def write(out: Path, seed: int, epochs: int = EPOCHS, names: tuple[str, ...] = tuple(SIZES)) -> None:
    """Write the files of ``flexhybrid cascade``: a .pt2 per model; validation.npz and held_out.npz (x, labels)."""
    out.mkdir(parents=True, exist_ok=True)
    for name, model in train_all(seed, epochs, names).items():
        export(model, out / f"{name}.pt2")
    for name, data in splits(seed).items():
        if name != "training":
            np.savez(out / f"{name.replace(' ', '_')}.npz", x=data.x.numpy(), labels=data.labels.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for models and data")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the weights (0)")
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed)
    print(f"{arguments.out}: " + ", ".join(f"{name} {energy_j(name) * 1e9:.0f} nJ" for name in SIZES))


if __name__ == "__main__":
    main()
