"""Where a training stands, and what it needs to go on after a stop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

LAST_STEPS = 50  # Their mean loss is said.
STATE = "state.pt"


@dataclass
class Progress:
    """Where the training stands."""

    steps: int
    began: float = field(default_factory=time.perf_counter)  #: less the seconds of runs before this one
    done: int = 0
    tokens: int = 0
    recent: list[float] = field(default_factory=list)  #: losses of the last LAST_STEPS steps

    @property
    def loss(self) -> float:
        return sum(self.recent) / len(self.recent)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def add(self, loss: float, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens
        self.recent = [*self.recent[-LAST_STEPS + 1 :], loss]

    def speed(self) -> str:
        return f"{self.tokens / self.seconds:.0f} tokens/s, {self.seconds / 60:.1f} min"


@dataclass
class Learning:
    """All that changes in a training, and the arguments by which it is told from another one."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    generator: torch.Generator
    progress: Progress
    arguments: dict[str, str]

    def save(self, folder: Path) -> None:
        """Write all that the training needs to go on from here."""
        state = {
            "arguments": self.arguments,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "progress": {name: getattr(self.progress, name) for name in ("done", "tokens", "recent", "seconds")},
        }
        written = folder / f"{STATE}.new"
        torch.save(state, written)
        written.replace(folder / STATE)

    def go_on(self, folder: Path) -> bool:
        """Take up the state in the folder, if there is one. Raises SystemExit where it is another training's."""
        if not (folder / STATE).exists():
            return False
        state = torch.load(folder / STATE, weights_only=True)
        if state["arguments"] != self.arguments:
            raise SystemExit(
                f"{folder} holds another training ({state['arguments']}): remove it, or give another --out"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, of_optimizer in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(of_optimizer)
        self.generator.set_state(state["generator"])
        for name in ("done", "tokens", "recent"):
            setattr(self.progress, name, state["progress"][name])
        self.progress.began = time.perf_counter() - state["progress"]["seconds"]
        return True


def forget(folder: Path) -> None:
    """Remove the state of a training that is over."""
    (folder / STATE).unlink(missing_ok=True)
