"""Real prose for haystacks and perplexity, wherever we run: Python's own language reference, or the user's file.

`pydoc_data.topics` ships with Python and differs between Python versions, so the prose's sha256 belongs to the data.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import BadInput

# What marks a block as code, grammar, a table, a rule line or a footnote instead of prose.
_NOT_PROSE = re.compile(r"::=|>>>|--\+|\||^\s*\.\.\. |^\s*\[\d+\] |\*{4}|={4}|-{4}", re.MULTILINE)
_LEAD = re.compile(r"^(?:\*|-|\d+\.|\w[\w ]*:|(?:Changed|New|Added|Deprecated[\w ]*) in version [\d.]+:)\s+(?=[A-Z])")
_SENTENCE_END = re.compile(r"[.?!][\"'\u201d\u2019)]*$")
_WORDS_A_PARAGRAPH = 12  # shorter blocks are headings, glosses and list entries


@dataclass(frozen=True)
class Prose:
    """Paragraphs of readable text separated by blank lines, and the sha256 of that text."""

    text: str
    sha256: str

    @property
    def pieces(self) -> list[str]:
        """The words, each with the white space before it: ``"".join(pieces)`` is the text."""
        return re.findall(r"\s*\S+", self.text)


def read_prose(path: str | None) -> Prose:
    """The prose of the UTF-8 text file `path`, or of Python's language reference when `path` is None.

    Raises BadInput for a file that is missing, not text or empty, and for a Python without its language reference.
    """
    text = _language_reference() if path is None else _user_file(Path(path))
    return Prose(text, hashlib.sha256(text.encode()).hexdigest())


def ends_sentence(word: str) -> bool:
    """Whether `word` closes a sentence, closing quotes and brackets included."""
    return bool(_SENTENCE_END.search(word))


def sentences(text: str) -> list[str]:
    """`text` cut after full stops, question and exclamation marks; white space between sentences is dropped."""
    return re.split(r"(?<=[.!?])\s+", text)


def _user_file(path: Path) -> str:
    try:
        raw = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"expected a UTF-8 text file at task.prose={path}, got: {error}; name a readable file, "
            "or task.prose=null for Python's language reference"
        ) from error
    paragraphs = [" ".join(block.split()) for block in re.split(r"\n\s*\n", raw) if block.strip()]
    if not paragraphs:
        raise BadInput(f"expected prose in task.prose={path}, got an empty file; name a file with text")
    return "\n\n".join(paragraphs)


def _language_reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise BadInput(
            "expected pydoc_data.topics (Python's language reference), got a Python without it; "
            "set task.prose=<a UTF-8 text file>"
        ) from error
    # A dict keeps the first of each paragraph: topics repeat whole sections of one another.
    paragraphs = {
        p: None for name in sorted(topics) for block in re.split(r"\n\s*\n", topics[name]) if (p := _paragraph(block))
    }
    return "\n\n".join(paragraphs)


def _paragraph(block: str) -> str | None:
    """One block of reStructuredText as plain prose; None when it is something else."""
    if _NOT_PROSE.search(block):
        return None
    text = re.sub(r"(?<=\w)-\n\s*(?=\w)", "-", block)  # a word broken at its hyphen
    text = _LEAD.sub("", " ".join(text.split()))
    text = re.sub(r"\*{1,2}([^*\s][^*]*)\*{1,2}", r"\1", text)  # emphasis
    text = re.sub(r"\s*\[\d+\]", "", text)  # footnote marks
    letters = sum(c.isalpha() or c in " ,.'\u2019" for c in text)
    readable = len(text.split()) >= _WORDS_A_PARAGRAPH and letters >= 0.9 * len(text)
    return text if readable and text[0].isupper() and ends_sentence(text) else None
