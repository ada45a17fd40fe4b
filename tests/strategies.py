"""Hypothesis strategies for schedule texts: random programs, comments, damage."""

import re

from hypothesis import strategies as st
from hypothesis.extra.lark import from_lark

from schedlang.language.grammar import parser
from schedlang.language.syntax import RESERVED

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(
    lambda name: name not in RESERVED
)


def programs() -> st.SearchStrategy[str]:
    """Texts from the grammar; a few do not parse, because two tokens were joined."""
    lark = parser(strict=True)  # a new parser: a cached one has no grammar
    explicit = {
        t.name: st.just(f" {t.pattern.value} ")
        for t in lark.terminals
        if t.pattern.type == "str" and t.pattern.value.isalpha()
    }
    explicit |= {
        "NAME": NAMES,
        "COMMENT": st.just(" "),
        "_NL": st.sampled_from(["\n", "\n\n", "\n\n\n"]),
        "QUANTITY": st.sampled_from(["40GiB", "1.5ms"]),
        "STRING": st.sampled_from(['"a"', '"x # y"']),
        "INT": st.sampled_from(["1", "7", "12"]),
        "SIGNED": st.sampled_from(["-1", "3"]),
        "FLOAT": st.sampled_from(["1e-5", "0.25"]),
        "GLOB": st.sampled_from(["*", "**", "{q,k}_proj", "h_*"]),
        "QUOTED": st.just("`at`"),
    }
    return from_lark(lark, start="start", explicit=explicit)


@st.composite
def with_comments(draw: st.DrawFn, text: str) -> str:
    """The text with comments and blank lines at random places."""
    lines = []
    for number, line in enumerate(text.split("\n")):
        above = draw(st.sampled_from([[], [], [], [f"# above {number}"], [""], ["", "# a", ""]]))
        end = draw(st.sampled_from(["", "", "", f"  # end {number}"]))
        lines += [*above, line + end]
    return "\n".join(lines)


@st.composite
def with_damage(draw: st.DrawFn, text: str) -> str:
    """The text with a part removed, doubled, or replaced by noise."""
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 12)))
    noise = draw(st.sampled_from(["", text[start:end] * 2, "{", "(", '"', "`", ":", "..", "é\x00"]))
    return text[:start] + noise + text[end:]


WORDS = [
    "tp",
    "3",
    "-1",
    "0",
    "2.5",
    "true",
    "R",
    "S(out)",
    "P",
    "[1, 2]",
    "()",
    "(tp, 2)",
    "model",
]
WORDS += [
    "model.config",
    "model.config.n_head",
    '"x"',
    "40GiB",
    "x.y",
    "a == b",
    "**",
    "lm_head",
    "_",
]


@st.composite
def with_swaps(draw: st.DrawFn, text: str) -> str:
    """The text with one or two of its words replaced by another word or value."""
    for _ in range(draw(st.integers(1, 2))):
        spans = [match.span() for match in re.finditer(r"[A-Za-z_0-9.*]+", text)]
        start, end = draw(st.sampled_from(spans))
        text_words = [text[a:b] for a, b in spans]
        text = (
            text[:start] + draw(st.sampled_from(WORDS) | st.sampled_from(text_words)) + text[end:]
        )
    return text
