"""The verbs: one function each, called with the state of a wave and a task."""

from collections.abc import Callable
from functools import partial

from flexhybrid.core.task import Task
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.selections.speculative import Speculation
from flexhybrid.runtime.verbs import attending, computing, moving, ranking, speculating

#: A function of (state, task). Verbs of one selection take the state of a wave under it.
VerbFunction = Callable[..., None]

VERB_FUNCTIONS: dict[str, VerbFunction] = {
    "read_weights": moving.read_weights,
    "load_weights": moving.load_weights,
    "dequantize_weights": computing.dequantize_weights,
    "read_act": partial(moving.read_cache, representation="act"),
    "read_kv": partial(moving.read_cache, representation="kv"),
    "load_act": partial(moving.load_cache, representation="act"),
    "load_kv": partial(moving.load_cache, representation="kv"),
    "load_hidden": moving.load_hidden,
    "embed": computing.embed,
    "dequantize_act": partial(computing.dequantize_cache, representation="act"),
    "dequantize_kv": partial(computing.dequantize_cache, representation="kv"),
    "kv_gen": computing.kv_gen,
    "project": computing.project,
    "quantize": computing.quantize_new,
    "assemble": attending.assemble,
    "attend": attending.attend,
    "attend_recomputed": attending.attend_recomputed,
    "attend_prefill": attending.attend_prefill,
    "store_query": moving.store_query,
    "attend_host": attending.attend_host,
    "load_attended": moving.load_attended,
    "rank": ranking.rank,
    "speculate": speculating.speculate,
    "store_index": speculating.store_index,
    "gather": speculating.gather,
    "finish": computing.finish,
    "scatter_device": computing.scatter_device,
    "store_act": partial(moving.store_cache, representation="act"),
    "store_kv": partial(moving.store_cache, representation="kv"),
    "scatter": moving.scatter,
    "write_act": partial(moving.write_cache, representation="act"),
    "write_kv": partial(moving.write_cache, representation="kv"),
    "store_hidden": moving.store_hidden,
    "head": computing.head,
    "sample": computing.sample,
    "store_out": moving.store_out,
}

#: Variants of verbs for layers whose tokens a selection has chosen (``SelectionHooks.chooses``).
CHOSEN: dict[str, VerbFunction] = {
    "load_act": partial(speculating.load_chosen, representation="act"),
    "load_kv": partial(speculating.load_chosen, representation="kv"),
    "dequantize_act": partial(speculating.dequantize_chosen, representation="act"),
    "dequantize_kv": partial(speculating.dequantize_chosen, representation="kv"),
    "kv_gen": speculating.kv_gen_chosen,
    "assemble": speculating.assemble_chosen,
}


def verbs_under(selection: SelectionHooks) -> dict[str, VerbFunction]:
    """Return the verbs of a wave with this selection."""
    if not isinstance(selection, Speculation):
        return dict(VERB_FUNCTIONS)
    return VERB_FUNCTIONS | {name: _by_layer(chosen, VERB_FUNCTIONS[name]) for name, chosen in CHOSEN.items()}


def _by_layer(chosen: VerbFunction, plain: VerbFunction) -> VerbFunction:
    """Return a verb that runs ``chosen`` in layers that read chosen tokens, and ``plain`` in all others."""

    def verb(state, task: Task) -> None:
        (chosen if state.selection.chooses(task) else plain)(state, task)

    return verb
