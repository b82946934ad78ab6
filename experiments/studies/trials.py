"""A cascade that is fitted on some requests and judged on others, with each of the compared searches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.reproduce.cascade.confidence import CAREFUL, CAUTION
from flexhybrid.cascade.thresholds.confidence import Scored, calibration_error, confidence
from flexhybrid.cascade.thresholds.curve import Answers
from flexhybrid.cascade.thresholds.fit import Fitted
from flexhybrid.cascade.thresholds.search import SearchOptions, search
from flexhybrid.cascade.thresholds.skips import Route

#: The search's defaults, with caution, and the paper's own rules for dropping and skipping models.
OPTIONS = {
    "AP": SearchOptions(),
    CAREFUL: SearchOptions(caution=CAUTION),
    "EO": SearchOptions(mode="eo"),
    "AP, the paper's": SearchOptions(method="sampling", drop="paper", skips="paper"),
    "AP, paper's skips": SearchOptions(skips="paper"),
    "AP, no skips": SearchOptions(skips="none"),
}


@dataclass(frozen=True)
class Trial:
    """Models fitted on a validation set, and their answers to held-out requests."""

    fitted: Fitted
    held_out: Answers
    ece: np.ndarray  #: [models, 2] on held-out requests, before and after scaling

    def route(self, options: SearchOptions) -> Route:
        """Return the route of the held-out requests through the cascade that the validation set gives."""
        searched = search(self.fitted, options)
        return Route(self.held_out.only(searched.kept), searched.cascade)

    @property
    def accuracy(self) -> np.ndarray:
        """Held-out accuracy of each model alone."""
        return self.held_out.correct.mean(axis=1)


def evaluated(fitted: Fitted, held_out: Sequence[Scored]) -> Trial:
    """Evaluate fitted models on data that no model was fitted on."""
    correct = np.array([scored.correct for scored in held_out])
    pairs = list(zip(held_out, fitted.models, strict=True))
    scaled = np.array([confidence(scored.logits, None, model.temperature) for scored, model in pairs])
    plain = np.array([confidence(scored.logits) for scored in held_out])
    ece = [[calibration_error(row, right) for row in pair] for *pair, right in zip(plain, scaled, correct, strict=True)]
    return Trial(fitted, Answers(correct, scaled, fitted.answers("energy_j").cost), np.array(ece))
