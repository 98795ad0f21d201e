"""Why our rewards differ from slime's, by the family of the answers; `tests/oracles/answer_pairs.py` has the families.

An entry is the kind of reward, the family, our reward, slime's, the number of such answers, and the reason.
"""

from __future__ import annotations

_UNREAD = "right: slime does not read"
_LOOSE = "wrong: slime"
_TASTE = "disputed:"

MATH = [
    ("algebra", 1.0, 0.0, 12, f"{_UNREAD} expressions of three letters, or two names of a function"),
    ("choices", 1.0, 0.0, 4, f"{_UNREAD} bold letters and final periods"),
    ("constants", 1.0, 0.0, 2, f"{_UNREAD} the sign of infinity"),
    ("degrees", 1.0, 0.0, 2, f"{_UNREAD} the sign for degrees"),
    ("empty", 0.0, 1.0, 1, f"{_LOOSE} accepts a blank box for a blank label"),
    ("equations", 1.0, 0.0, 6, f"{_UNREAD} equations other than as text"),
    ("integers", 1.0, 0.0, 8, f"{_UNREAD} final punctuation, and products and quotients if the label is an integer"),
    ("intervals", 1.0, 0.0, 8, f"{_UNREAD} inequalities"),
    ("lists", 1.0, 0.0, 8, f"{_UNREAD} lists in another order, and plus-minus"),
    ("malformed", 1.0, 0.0, 4, f"{_UNREAD} a root without a backslash, and an exponent in parentheses"),
    ("money", 1.0, 0.0, 2, f"{_UNREAD} the word dollars"),
    ("more than the answer", 1.0, 0.0, 3, f"{_TASTE} a sum that equals the label is accepted"),
    ("name left out", 0.0, 1.0, 1, f"{_TASTE} an equation for another variable is refused"),
    ("name left out", 1.0, 0.0, 2, f"{_TASTE} the name of a function or variable may be left out"),
    ("nested", 0.0, 1.0, 1, f"{_LOOSE} drops the braces of nested fractions"),
    ("nested", 1.0, 0.0, 4, f"{_UNREAD} nested fractions"),
    ("order", 1.0, 0.0, 4, f"{_TASTE} a list is a set, also with parentheses in one of the two places"),
    ("percent", 1.0, 0.0, 2, f"{_UNREAD} the word percent"),
    ("percent as number", 1.0, 0.0, 5, f"{_TASTE} 50% equals 0.5, and for both projects 50"),
    ("powers", 1.0, 0.0, 10, f"{_UNREAD} powers, factorials and binomials if the label is an integer"),
    ("ratio", 1.0, 0.0, 3, f"{_TASTE} a ratio equals its quotient"),
    ("roots", 1.0, 0.0, 6, f"{_UNREAD} roots that are integers, and fractional exponents"),
    ("rounded", 1.0, 0.0, 1, f"{_TASTE} a number that is equal to six decimals is accepted"),
    ("scientific", 1.0, 0.0, 12, f"{_UNREAD} powers of ten"),
    ("sets", 1.0, 0.0, 6, f"{_UNREAD} sets in another order"),
    ("thousands", 0.0, 1.0, 1, f"{_LOOSE} compares only the thousands of 5\\,000 and 5\\,001"),
    ("thousands", 1.0, 0.0, 8, f"{_UNREAD} thin spaces in numbers"),
    ("units", 0.0, 1.0, 6, f"{_LOOSE} drops different units"),
    ("units", 1.0, 0.0, 2, f"{_UNREAD} abbreviations of units"),
    ("whole number", 1.0, 0.0, 4, f"{_UNREAD} final punctuation, bold numbers and a noun after the number"),
    ("words", 0.0, 1.0, 2, f"{_LOOSE} takes two letters for a product"),
    ("words", 1.0, 0.0, 6, f"{_UNREAD} final periods and boxes of text"),
]
DAPO = [
    ("**Answer**: N", 1.0, -1.0, 18, f"{_UNREAD} a bold word Answer"),
    ("**Answer:** N", 1.0, -1.0, 18, f"{_UNREAD} a bold word Answer"),
    ("Answer: **N**", 1.0, -1.0, 18, f"{_UNREAD} a bold number"),
    ("Answer: N apples", 1.0, -1.0, 18, f"{_TASTE} a noun after the number is accepted"),
    ("Answer: N.", 1.0, -1.0, 18, f"{_UNREAD} a final period"),
    (r"Answer: \(N\)", 1.0, -1.0, 18, f"{_UNREAD} parentheses of LaTeX"),
    ("as a sum", 1.0, -1.0, 18, f"{_TASTE} a sum that equals the label is accepted"),
]
_LETTER = "slime takes a letter of a word, such as the i of is, for the choice"
GPQA = [
    *((f"The answer depends. I choose {letter}", 1.0, 0.0, 5, _LETTER) for letter in "AB"),
    *((f"The answer is ({letter}).", 1.0, 0.0, 1, _LETTER) for letter in "ABD"),
    *((f"The answer is a mix: {letter}", 1.0, 0.0, 5, _LETTER) for letter in "BD"),
    ("The answer is a mix: B", 0.0, 1.0, 5, _LETTER),
    ("I do not know", 0.0, 1.0, 1, "slime finds the label, one letter, somewhere in the response"),
    *((text, 0.0, 1.0, 1, "slime finds the label, one letter, somewhere in the response")
      for text in ("blue", "dark", "The answer is red.", "The answer is blue.", "The answer is dark.")),
]  # fmt: skip
REASONS = [
    *((kind, *entry) for kind in ("math", "deepscaler") for entry in MATH),
    *(("dapo", *entry) for entry in DAPO),
    *(("gpqa", *entry) for entry in GPQA),
]
