"""Files that ship with flexhybrid: a small OPT checkpoint, prompts, and text that the checkpoint did not learn from."""

from pathlib import Path

FOLDER = Path(__file__).parent
CHECKPOINT = FOLDER / "opt-stdlib-4m"  #: a Hugging Face checkpoint; its README says how it was trained
PROMPTS = FOLDER / "prompts.txt"  #: one prompt a line
HELD_OUT = FOLDER / "held_out.txt"  #: documents separated by form feeds; ``experiments.training.corpus`` writes it


def prompts() -> list[str]:
    """Return the shipped prompts."""
    return [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]
