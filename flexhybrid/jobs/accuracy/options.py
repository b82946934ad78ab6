"""Options of ``flexhybrid accuracy``. Importing this loads no torch."""

from dataclasses import dataclass
from pathlib import Path

from flexhybrid.arguments import DEVICES, DISK_DIR_HELP, DTYPES, option


@dataclass(frozen=True)
class AccuracyOptions:
    """What the command was asked for, by the names of its flags."""

    model: Path | None = option("local checkpoint folder (the shipped OPT)", None)
    text: Path | None = option("text file, its documents parted by form feeds (the shipped one)", None)
    policies: tuple[str, ...] = option(
        "systems by name, with options as in a call, and policy JSON files (kv_only,act_only,int4,h2o(0.5),infinigen)",
        ("kv_only", "act_only", "int4", "h2o(0.5)", "infinigen"), metavar="NAME",
    )  # fmt: skip
    length: int | None = option("tokens of a text (all the model's positions, at most 2048)", None)
    prompt_tokens: int | None = option("of those, in the prompt: what h2o(0.5) takes half of (1/8)", None)
    num_texts: int = option("texts of that length, evenly over the file (14)", 14)
    dtype: str = option("(float32)", "float32", choices=DTYPES)
    device: str = option(None, "auto", choices=DEVICES)
    hardware: str | None = option("machine by name or file, for policies that it decides (what was measured)", None)
    disk_dir: Path | None = option(DISK_DIR_HELP, None, metavar="DIR")
    out: Path = option("folder (results/accuracy)", Path("results/accuracy"))
