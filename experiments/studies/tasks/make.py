"""Two multiple-choice tasks of lm-evaluation-harness, made of text that no small model here has learned from.

* ``next_line``: which of four lines of a file comes next. The others are lines of the same file, of like length.
* ``earlier_name``: which of four words comes next, where the right one was last seen at least FAR tokens ago, as the
  others were. A cache that has dropped the distant past can only guess at it.

Both write JSON lines (document, context, choices, answer) beside the tasks' YAML files. A word is one token of the
shared tokenizer, so that the choices of a question differ in one token, and are computed together.

Usage::

    python -m experiments.studies.tasks.make
"""

from __future__ import annotations

import json
import keyword
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from flexhybrid import shipped

FOLDER = Path(__file__).parent
TEXTS = FOLDER.parent / "long_texts.txt"
SEED = 0
CHOICES = 4
LINES_OF_DOCUMENT, LINE_CONTEXT, SHORTEST_LINE, LIKE_LENGTH = 3, 300, 20, 1.4
NAMES_OF_DOCUMENT, NAME_CONTEXT, FAR = 5, 600, 200
WORD = re.compile(r" ?[A-Za-z_]{3,}")


def documents() -> list[str]:
    return TEXTS.read_text(encoding="utf-8").split("\f")


def next_lines(document: str, generator: random.Random, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield questions of a document: a context that ends with a line's end, and four lines."""
    encoding = tokenizer.encode(document, add_special_tokens=False)
    ends = [end for _, end in encoding.offsets]
    lines = [match for match in re.finditer(r"[^\n]+", document) if len(match.group().strip()) >= SHORTEST_LINE]
    late = [line for line in lines if line.start() >= ends[LINE_CONTEXT]]
    for right in sorted(generator.sample(late, min(LINES_OF_DOCUMENT, len(late))), key=lambda line: line.start()):
        first = max(i for i, end in enumerate(ends) if end <= right.start()) - LINE_CONTEXT
        begin = encoding.offsets[max(first, 0)][0]
        size = len(right.group())
        others = sorted(
            {
                line.group()
                for line in lines
                if not begin <= line.start() <= right.start()
                and line.group().strip() != right.group().strip()
                and size / LIKE_LENGTH <= len(line.group()) <= size * LIKE_LENGTH
            }
        )
        if len(others) >= CHOICES - 1:
            yield question(document[begin : right.start()], right.group(), generator.sample(others, 3), generator)


def is_word(encoding: Encoding, place: int, document: str) -> bool:
    """Whether a token is a whole word, that begins and ends where the tokenizer cuts words."""
    begin, end = encoding.offsets[place]
    text = document[begin:end]
    return (
        bool(WORD.fullmatch(text))
        and not keyword.iskeyword(text.strip())
        and not document[end : end + 1].isalnum()
        and document[end : end + 1] != "_"
        and (text.startswith(" ") or not (document[begin - 1 : begin].isalnum() or document[begin - 1 : begin] == "_"))
    )


def earlier_names(document: str, generator: random.Random, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield questions of a document: a context of NAME_CONTEXT tokens, and four words that were last seen long ago."""
    encoding = tokenizer.encode(document, add_special_tokens=False)
    texts = [document[begin:end] for begin, end in encoding.offsets]
    found: list[dict[str, Any]] = []
    last_seen: dict[str, int] = {}  #: of the tokens before a place, be they words or parts of words
    words: set[str] = set()  #: of these, those that were whole words
    for place in range(1, len(texts)):
        first, word = place - NAME_CONTEXT, texts[place]
        if is_word(encoding, place, document):
            spaced = word.startswith(" ")
            distant = sorted(
                text for text in words if first <= last_seen[text] <= place - FAR and text.startswith(" ") == spaced
            )
            if first >= 0 and word in distant and len(distant) >= CHOICES:
                distant.remove(word)
                context = document[encoding.offsets[first][0] : encoding.offsets[place][0]]
                found.append(question(context, word, generator.sample(distant, CHOICES - 1), generator))
            words.add(word)
        last_seen[word] = place
    yield from generator.sample(found, min(NAMES_OF_DOCUMENT, len(found)))


def question(context: str, right: str, others: list[str], generator: random.Random) -> dict[str, Any]:
    choices = [right, *others]
    generator.shuffle(choices)
    return {"context": context, "choices": choices, "answer": choices.index(right)}


def main() -> None:
    tokenizer = Tokenizer.from_file(str(shipped.CHECKPOINT / "tokenizer.json"))
    for name, make in (("next_line", next_lines), ("earlier_name", earlier_names)):
        generator = random.Random(SEED)
        rows = [
            {"document": number, **asked}
            for number, document in enumerate(documents())
            for asked in make(document, generator, tokenizer)
        ]
        with (FOLDER / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{name}: {len(rows)} questions of {len({row['document'] for row in rows})} documents")


if __name__ == "__main__":
    main()
