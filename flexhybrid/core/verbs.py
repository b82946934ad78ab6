"""Verbs: a record for each kind of task. All tables over verbs follow from these records."""

from dataclasses import dataclass

from flexhybrid.core.context.cache_entries import TIERS

#: Kinds of data that cross a link. Queries, attention outputs and token ids count as hidden states.
CARGO = ("weights", "kv", "act", "hidden", "state")


@dataclass(frozen=True)
class Verb:
    """A kind of task: its resource, the data that it moves, how often it runs, and when a step lacks it."""

    name: str
    resource: str  #: one of RESOURCES
    cargo: str = ""  #: one of CARGO; empty for a verb that crosses no link
    #: how often a mini-batch has it: once in each "layer", "gap" between layers, "choosing layer" of a speculative
    #: selection, or "iteration"; "part": a layer's mini-batches have it together, in ``Experts.batch`` parts
    per: str = "layer"
    #: without this, a step lacks the verb: "blocks" of ``blocks``, new "rows" of ``blocks``, a "recomputed" prefix,
    #: "shared" blocks to attend to, a "chunk" of prompts after cached tokens, or a layer's "state"; None: every step of
    #: the policy has the verb
    needs: str | None = None
    #: (representations, tiers) of the cached blocks that it reads, or of the new rows that it stores
    blocks: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    stores: bool = False  #: it stores results of a step, so the last token of a run does not wait for it
    otherwise: str | None = None  #: verb whose line prices it if it has no line
    group: str | None = None  #: verbs with similar code in other systems: "cache copy", "conversion" or "gemm"


#: Verb name -> verb, in the order of a layer's work.
VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("read_weights", "disk_read", "weights"),
        Verb("load_weights", "h2d", "weights"),
        Verb("load_hidden", "h2d", "hidden", per="gap"),
        Verb("load_keys", "h2d", "kv", per="choosing layer", group="cache copy"),
        Verb("gather", "host_compute", per="choosing layer", otherwise="scatter"),
        Verb("read_act", "disk_read", "act", needs="blocks", blocks=(("act",), ("disk",))),
        Verb("load_act", "h2d", "act", needs="blocks", blocks=(("act",), ("host", "disk")), group="cache copy"),
        Verb("read_kv", "disk_read", "kv", needs="blocks", blocks=(("kv",), ("disk",))),
        Verb("load_kv", "h2d", "kv", needs="blocks", blocks=(("kv",), ("host", "disk")), group="cache copy"),
        Verb("load_state", "h2d", "state", needs="state", group="cache copy"),
        Verb("embed", "compute", per="iteration"),
        Verb("dequantize_weights", "compute", group="conversion"),
        Verb("dequantize_act", "compute", needs="blocks", blocks=(("act",), TIERS), group="conversion"),
        Verb("kv_gen", "compute", needs="blocks", blocks=(("act",), TIERS), group="gemm"),
        Verb("project", "compute", group="gemm"),
        Verb("quantize", "compute", needs="rows", blocks=(("act", "kv"), TIERS), group="conversion"),
        Verb("speculate", "compute", per="choosing layer"),
        Verb("store_index", "d2h", "kv", per="choosing layer", stores=True),
        Verb("store_query", "d2h", "hidden", stores=True),
        Verb("attend_host", "host_compute"),
        Verb("attend_host_shared", "host_compute", needs="shared", otherwise="attend_host"),
        Verb("load_attended", "h2d", "hidden"),
        Verb("dequantize_kv", "compute", needs="blocks", blocks=(("kv",), TIERS), group="conversion"),
        Verb("assemble", "compute"),
        Verb("attend", "compute"),
        Verb("attend_shared", "compute", needs="shared", otherwise="attend"),
        Verb("attend_chunk", "compute", needs="chunk", otherwise="attend"),
        Verb("attend_prefill", "compute", otherwise="attend", group="gemm"),
        Verb("attend_recomputed", "compute", needs="recomputed", otherwise="attend_prefill", group="gemm"),
        Verb("merge_attended", "compute", otherwise="assemble"),
        Verb("rank", "compute"),
        Verb("route", "compute", otherwise="finish", group="gemm"),
        Verb("experts", "compute", per="part", otherwise="finish", group="gemm"),
        Verb("finish", "compute", group="gemm"),
        Verb("store_act", "d2h", "act", "layer", "rows", (("act",), ("host", "disk")), stores=True, group="cache copy"),
        Verb("store_kv", "d2h", "kv", "layer", "rows", (("kv",), ("host", "disk")), stores=True, group="cache copy"),
        Verb("scatter", "host_compute", needs="rows", blocks=(("act", "kv"), ("host",)), stores=True),
        Verb("scatter_device", "compute", needs="rows", blocks=(("act", "kv"), ("device",)), stores=True),
        Verb("write_act", "disk_write", "act", needs="rows", blocks=(("act",), ("disk",)), stores=True),
        Verb("write_kv", "disk_write", "kv", needs="rows", blocks=(("kv",), ("disk",)), stores=True),
        Verb("store_state", "d2h", "state", needs="state", stores=True, group="cache copy"),
        Verb("store_hidden", "d2h", "hidden", per="gap", stores=True),
        Verb("head", "compute", per="iteration", group="gemm"),
        Verb("sample", "compute", per="iteration"),
        Verb("store_out", "d2h", "hidden", per="iteration", stores=True),
    )
}

#: Verb name -> the resource that runs it.
RESOURCE_OF = {name: verb.resource for name, verb in VERBS.items()}
