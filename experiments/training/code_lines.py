"""A task of graded difficulty for language models: finish a line of code, by type of line.

The lines are of the standard library's files that no checkpoint learned from (``corpus``). A request is some lines, the
last one without its last word, as the tokenizer has words: a name, a number, or signs between them. Its answer is the
first token of that word. What ends ``except ValueError`` is easy, the name in ``return self.name`` is hard.
``code_lines.jsonl`` beside this file holds the requests, in the form that ``flexhybrid cascade fit --task generation``
reads::

    python -m experiments.training.code_lines      # writes the file anew, from this interpreter's library
"""

import ast
import bisect
import io
import itertools
import json
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments import token_ids, tokenizer
from experiments.training.corpus import read_corpus
from flexhybrid.core.files import write_by_rename

FILE = Path(__file__).with_name("code_lines.jsonl")
PROMPT_TOKENS, ANSWER_TOKENS = 64, 1  #: a prompt has up to so many, an answer as many
INDENT_TOKENS = 5  #: at most, that a first line's indentation has more by itself than behind a line, with </s>
MOST_REQUESTS, LEAST_REQUESTS = 120, 20  #: of a file; one with fewer is left out
#: How a line of a type begins; the first that fits counts.
TYPES = {
    "def": r"(async )?def\b",
    "class": r"class\b",
    "return": r"return\b",
    "raise": r"raise\b",
    "if": r"(if|elif|while)\b",
    "for": r"for\b",
    "except": r"except\b",
    "other keyword": r"(else|try|with|assert|yield|del|global|finally|pass|break|continue|from|import)\b|@",
    "self.x =": r"self(\.\w+)+ *[-+*/|&]?= ",
    "x =": r"[\w.,\[\]'\" ]+ *[-+*/|&]?= ",
    "call": r"[\w.]+\(",
}
OTHER_TYPE = "within a statement"


@dataclass(frozen=True)
class Request:
    """A line to finish: the number of its file, its type, the text up to its last word, and what comes there."""

    file: int
    type: str
    prompt: str
    answer: str


def type_of(line: str) -> str:
    """Return the type of a line of code."""
    return next((name for name, begins in TYPES.items() if re.match(begins, line.strip())), OTHER_TYPE)


def code_lines(text: str) -> set[int]:
    """Return the numbers, from 0, of the lines that hold code, without comments, docstrings and texts over several
    lines; none of a text that is no code."""
    prose = set()
    try:
        ast.parse(text)  # words of a language may be words of Python, too
        for word in tokenize.generate_tokens(io.StringIO(text).readline):
            first, last = word.start[0] - 1, word.end[0] - 1
            if word.type == tokenize.STRING and (first != last or word.line.strip() == word.string):
                prose.update(range(first, last + 1))
    except (tokenize.TokenError, SyntaxError):
        return set()
    lines = [line.strip() for line in text.split("\n")]
    return {n for n, line in enumerate(lines) if line and not line.startswith("#") and n not in prose}


def requests_of(text: str, file: int, order: random.Random) -> list[Request]:
    """Return up to MOST_REQUESTS requests of a file, of lines that ``order`` draws; prompts begin where lines do."""
    encoding, made = tokenizer()(text, return_offsets_mapping=True, verbose=False), []
    ids, words, offsets = encoding["input_ids"], encoding.word_ids(), encoding["offset_mapping"]
    lines, begins = text.split("\n"), [begin for begin, _ in offsets]
    starts = list(itertools.accumulate((len(line) + 1 for line in lines), initial=0))
    first_token = [bisect.bisect_left(begins, start) for start in starts]
    numbers = sorted(code_lines(text))
    order.shuffle(numbers)
    for number in numbers:
        last = bisect.bisect_left(begins, starts[number] + len(lines[number].rstrip())) - 1
        at = words.index(words[last])
        place, end = offsets[at][0], offsets[at][1]
        context = bisect.bisect_left(first_token, at - PROMPT_TOKENS + INDENT_TOKENS)
        answer = text[place:end]
        has_words_before = place > starts[number] and text[starts[number] : place].strip()
        if has_words_before and context <= number and token_ids(answer)[1:] == ids[at : at + ANSWER_TOKENS]:
            made.append(Request(file, type_of(lines[number]), text[starts[context] : place], answer))
        if len(made) == MOST_REQUESTS:
            break
    return made


def make(seed: int = 0) -> Iterator[Request]:
    """Yield the requests of all held-out files of this interpreter's library that have enough of them."""
    order = random.Random(seed)
    of_files = (requests_of(text, file, order) for file, text in enumerate(read_corpus(0, full_files=True).held_out))
    yield from itertools.chain.from_iterable(made for made in of_files if len(made) >= LEAST_REQUESTS)


def read() -> list[Request]:
    """Return the requests that the repository holds."""
    return [Request(**json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    write_by_rename(FILE, "".join(json.dumps(asdict(request), ensure_ascii=False) + "\n" for request in make()))
