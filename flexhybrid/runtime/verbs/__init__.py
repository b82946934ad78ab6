"""The functions of the verbs. Each takes the state of a wave (``executor.State``) and a task."""

from collections.abc import Callable
from functools import partial

from flexhybrid.core.task import Task
from flexhybrid.core.verbs import VERBS
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.selections.speculative import Speculation
from flexhybrid.runtime.verbs import attending, computing, moving, recurring, speculating

#: A function of (state, task). Verbs of one selection method take a state with that selection.
VerbFunction = Callable[..., None]

#: Verb -> function: functions of these modules with a verb's name, and (below) functions that serve several verbs.
VERB_FUNCTIONS: dict[str, VerbFunction] = {
    name: function
    for module in (attending, computing, moving, recurring, speculating)
    for name, function in vars(module).items()
    if name in VERBS and function.__module__ == module.__name__
}
#: Variants of verbs for layers that read only chosen tokens (``SelectionHooks.chooses``).
CHOSEN: dict[str, VerbFunction] = {"kv_gen": speculating.kv_gen_chosen, "assemble": speculating.assemble_chosen}

for _cached in ("act", "kv"):
    VERB_FUNCTIONS[f"read_{_cached}"] = partial(moving.read_cache, representation=_cached)
    VERB_FUNCTIONS[f"load_{_cached}"] = partial(moving.load_cache, representation=_cached)
    VERB_FUNCTIONS[f"dequantize_{_cached}"] = partial(computing.dequantize_cache, representation=_cached)
    VERB_FUNCTIONS[f"store_{_cached}"] = partial(moving.store_cache, representation=_cached)
    VERB_FUNCTIONS[f"write_{_cached}"] = partial(moving.write_cache, representation=_cached)
    CHOSEN[f"load_{_cached}"] = partial(speculating.load_chosen, representation=_cached)
    CHOSEN[f"dequantize_{_cached}"] = partial(speculating.dequantize_chosen, representation=_cached)


def verbs_under(selection: SelectionHooks) -> dict[str, VerbFunction]:
    """Return the functions of the verbs under a selection."""
    if not isinstance(selection, Speculation):
        return dict(VERB_FUNCTIONS)
    return VERB_FUNCTIONS | {name: _by_layer(chosen, VERB_FUNCTIONS[name]) for name, chosen in CHOSEN.items()}


def _by_layer(chosen: VerbFunction, plain: VerbFunction) -> VerbFunction:
    """Return a function that runs ``chosen`` in layers that read only chosen tokens, and ``plain`` in others."""

    def verb(state, task: Task) -> None:
        (chosen if state.selection.chooses(task) else plain)(state, task)

    return verb
