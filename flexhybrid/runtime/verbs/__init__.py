"""The verbs: one function each, called with the state of a wave and a task."""

from collections.abc import Callable

from flexhybrid.core.task import Task
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.selections.speculative import Speculation
from flexhybrid.runtime.verbs import attending, computing, moving, ranking, speculating

#: A function of (state, task). Verbs of one selection take the state of a wave under it.
Verb = Callable[..., None]

VERBS: dict[str, Verb] = {
    **computing.VERBS,
    **attending.VERBS,
    **moving.VERBS,
    **ranking.VERBS,
    **speculating.VERBS,
}


def verbs_under(selection: SelectionHooks) -> dict[str, Verb]:
    """Return the verbs of a wave with this selection."""
    if not isinstance(selection, Speculation):
        return dict(VERBS)
    return VERBS | {name: _by_layer(chosen, VERBS[name]) for name, chosen in speculating.CHOSEN.items()}


def _by_layer(chosen: Verb, plain: Verb) -> Verb:
    """Return a verb that runs ``chosen`` in layers that read chosen tokens, and ``plain`` in all others."""

    def verb(state, task: Task) -> None:
        (chosen if state.selection.chooses(task) else plain)(state, task)

    return verb
