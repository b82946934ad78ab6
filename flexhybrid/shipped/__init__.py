"""Files that ship with flexhybrid: two small checkpoints, prompts, and text that neither learned from."""

from pathlib import Path

FOLDER = Path(__file__).parent
CHECKPOINT = FOLDER / "opt-stdlib-4m"  #: a Hugging Face checkpoint of an OPT; its README says how it was trained
QWEN3 = FOLDER / "qwen3-stdlib-4m"  #: of a Qwen3: grouped heads, normed queries and keys, tied head; not in a wheel
PROMPTS = FOLDER / "prompts.txt"  #: one prompt a line
HELD_OUT = FOLDER / "held_out.txt"  #: documents separated by form feeds, of files that no shipped model learned from


def prompts() -> list[str]:
    """Return the shipped prompts."""
    return [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]
