r"""Extracts the answer from a response, and the expected answer from a label. Text only, no mathematics.

Two answers can differ in ways that a parser of formulas does not see: `NO` and `ON` are the same product of letters,
`5 cm` and `5 m` the same number. The functions here separate words, units, bases and moduli from formulas.
"""

from __future__ import annotations

import re
from decimal import Decimal

from miles_async.types import Sample

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ANSWER_LINE = re.compile(r"(?i)answer[*\s]*:[*\s]*([^\n]+)")
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last `\boxed{...}` or `\fbox{...}`, nested braces included; None if there is none.

    TeX reads `\boxed 5` as `\boxed{5}`; the number up to the next character that is not part of it is returned.
    """
    start, command = max((text.rfind(command), command) for command in ("\\boxed", "\\fbox"))
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip()
    if not rest.startswith("{"):
        number = _NUMBER.match(rest)
        return number[0] if number else None
    depth = 0
    for position, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:position]
    return None


def after_thinking(response: str) -> str | None:
    """Return the text after the reasoning, or None if the reasoning never ended (the format of DeepScaleR)."""
    for mark in ("</think>", "###Response"):
        if mark in response:
            return response.rpartition(mark)[2]
    return None


def last_part(response: str) -> str:
    """Return the text after the reasoning, or else after the last empty line, as ROLL's reward for mathematics does.

    The text is empty if there is neither, if reasoning ends twice, and if it begins later than the response.
    """
    if response.count("</think>") > 1 or response.find("<think>") > 0:
        return ""
    for mark in ("</think>", "\n\n"):
        if mark in response:
            return response.rpartition(mark)[2].strip()
    return ""


_SPECIAL_TOKENS = re.compile(r"<[|\uff5c][^\s<>|\uff5c]+[|\uff5c]>|<pad>|<eos>|<end_of_turn>|</s>\s*\Z")
"""Tokens that end a response, as text; DeepSeek has full-width bars (U+FF5C). `</s>` is also a tag of HTML."""


def after_reasoning(response: str) -> str:
    """Return the text after the reasoning, or else all text, without the tokens that end a response (as ROLL does)."""
    return _SPECIAL_TOKENS.sub("", response.rpartition("</think>")[2]).strip()


def answer_line(response: str) -> str | None:
    """Return the answer of the last `Answer: ...` line in the last 300 characters (DAPO, arXiv 2503.14476).

    The token that ends the response does not belong to it. If the line has formulas between dollar signs, the first
    one is the answer. Both are as in the code of the paper.
    """
    lines = _ANSWER_LINE.findall(response[-300:])
    if not lines:
        return None
    line = _SPECIAL_TOKENS.sub("", lines[-1])
    formula = _FORMULA.search(line)
    return tidy(line.strip("* ") if formula is None else formula[1] or formula[2])


def label_of(sample: Sample) -> str:
    """Return the label as text. Raises TypeError if the label is neither a string nor a number."""
    if not isinstance(sample.label, (str, int, float)):
        raise TypeError(f"the label is {sample.label!r}, a {type(sample.label).__name__}, not a string or a number")
    return str(sample.label)


_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|rm|bf)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"^(?:\\[ ,;:]|[ ~])++")
_ENCLOSING = ("**", "**"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")
_GROUPED_DIGITS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|,\\!|~|\{,\}|,| )\d{3})+(?!\d)")
"""Digits in groups of three, such as `5\\,000`."""
_NOTATIONS = (
    (re.compile(r"(?<![\w.\\}])(\d++(?:\.\d*+)?|\.\d++)[eE]\+?(-?\d{1,3})(?![\w.])"), r"\1\\cdot 10^{\2}"),
    (re.compile(r"(?<![\w.}])(\d+)\s+(\d+)/(\d+)(?![\w.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<![a-zA-Z])(?:\\sqrt|(?<!\\)sqrt)\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\a-zA-Z])(sqrt|pi)(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"°"), r"^{\\circ}"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"\\text\{\s*\\?\$\s*\}"), r"\\$"),
)
"""Other ways to write numbers, constants and symbols, and the LaTeX for them."""


def tidy(formula: str) -> str:
    r"""Return the formula in plain LaTeX.

    Removes enclosing dollar signs, asterisks and braces, final punctuation and spaces between groups of digits.
    Rewrites `1e-3`, `3 1/4`, `5 million`, `sqrt`, `pi` and `°`.
    """
    # Patterns below would read long runs of white space again and again.
    formula, before = " ".join(formula.split()), None
    while before != formula:
        before = formula
        formula = _SPACES.sub("", formula.rstrip(" .,;:~\\"), count=1)
        for start, end in _ENCLOSING:
            inner = formula[len(start) : len(formula) - len(end)]
            if formula.startswith(start) and formula.endswith(end) and inner and start not in inner:
                formula = inner
    if (wrapped := _WRAPPED.fullmatch(formula)) and any(map(str.isdigit, wrapped[1])):
        formula = wrapped[1]
    formula = _GROUPED_DIGITS.sub(lambda match: re.sub(r"\D", "", match[0]), formula)
    formula = in_digits(formula)
    for pattern, replacement in _NOTATIONS:
        formula = pattern.sub(replacement, formula)
    return formula.strip()


_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(
    r"(?<![\w.,}^/])(?P<number>\d{1,15}(?:\.\d{1,15})?)(?:\s|~|\\[ ,;:])*+"
    rf"(?P<open>\\(?:text|mathrm|mbox)\{{[\s~]*+)?(?P<scale>{'|'.join(_SCALES)})\b(?P<close>\s*+\}})?"
)


def in_digits(text: str) -> str:
    r"""Write numbers such as `5 million` and `5\text{ million}` in digits."""
    return _SCALED.sub(_digits, text)


def _digits(found: re.Match[str]) -> str:
    braces = "" if found["open"] and found["close"] else (found["open"] or "") + (found["close"] or "")
    return f"{(Decimal(found['number']) * _SCALES[found['scale']]).normalize():f}{braces}"


_FIGURE = re.compile(r"\\(?:angle|triangle)\b\s*")
_LETTERS = re.compile(r"\(?[^\W\d_]\)?|[^\W\d_][^\W\d_ ,;'-]*(?:[ ,;'-]+[^\W\d_][^\W\d_,;'-]*)*")
_JOINTS = re.compile(r"\s*(?:[,;]|\b(?:and|or)\b)\s*")


def words_of(formula: str) -> list[str] | None:
    """Return the words of a formula that consists of letters, without case and in sorted order; None if it does not.

    A list such as `A, C` has several entries.
    """
    text = _unwrapped(formula)
    if _LETTERS.fullmatch(text) is None:
        return None
    return sorted(" ".join(part.split()) for part in _JOINTS.split(text.strip("()").lower()) if part)


def is_text(formula: str) -> bool:
    r"""Whether a formula of letters is text, such as `NO` and `\text{even}`, and not a product such as `ab`.

    A product has at most three letters, all small and different.
    """
    if words_of(formula) is None:
        return False
    text = _unwrapped(formula)
    if text != formula or (text != text.lower()):
        return True
    return any(len(word) > 3 or len(set(word)) < len(word) for word in re.findall(r"[^\W\d_]+", text))


def _unwrapped(formula: str) -> str:
    r"""Return the formula without `\text{...}` around words, and without the kind of figure that letters name."""
    return " ".join(_FIGURE.sub("", _WRAPPED.sub(r"\1", formula)).split())


_UNIT_NAMES = """
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|ft foot feet
yd yard|mi mile|mg milligram|g gram|kg kilogram|pound lb|oz ounce|ml milliliter millilitre|l liter litre
s sec second|ms millisecond|min minute|h hr hour|day|week|month|yr year|am a.m|pm p.m|mph|km/h kmh kph|m/s
dollar|euro|cent|degree deg|K kelvin|mol mole|mmol|dm|nm|A amp ampere|mA|V volt|mV|kV|J joule|kJ|MJ
N newton|kN|Pa pascal|kPa|MPa|Hz hertz|kHz|MHz|GHz|W watt|mW|kW kilowatt|MW megawatt|kWh
"""
"""Each entry has the names of one unit; the case counts for names that have capitals."""
_CURRENCIES = {"\\$": "dollar", "$": "dollar", "€": "euro", "£": "pound"}
_UNITS = {name: row.split()[0] for row in re.split(r"[|\n]", _UNIT_NAMES.strip()) for name in row.split()}
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_QUANTITY = re.compile(
    r"(?:(?P<number>.*[\d})\]])(?P<space>(?:\s|~|\\[,;: ])*+)(?P<bare>[A-Za-z][A-Za-z/. ]*)"
    r"|(?P<formula>.*[^\s~,;:\\])(?:[\s~,;:]|\\(?![a-z]))*+"
    r"\\(?:text|textrm|textnormal|mathrm|mbox|rm)\s*\{(?P<wrapped>[^{}]*)\})"
    r"(?:\^\{?(?P<power>[23])\}?)?",
    re.DOTALL,
)


def split_unit(formula: str) -> tuple[str, str | None]:
    r"""Return the number of a quantity such as `5\text{ cm}` and its unit; the unit is None if there is none.

    A unit that is not in a table is any noun. `5m` is a product, and `5 m` a quantity.
    """
    for sign, currency in _CURRENCIES.items():
        if formula.startswith(sign):
            return formula.removeprefix(sign).strip(), currency
    if (found := _QUANTITY.fullmatch(formula)) is None:
        return formula, None
    *powers, name = (found["wrapped"] or found["bare"] or "").strip(" ~\\,;:.").split() or [""]
    powers, known = [word.lower() for word in powers], _known_unit(name)
    if found["bare"] and not (
        _is_plain_unit(found["number"], name, known, spaced=bool(found["space"])) and set(powers) <= set(_POWERS)
    ):
        return formula, None
    power = f"^{found['power']}" if found["power"] else "".join(_POWERS.get(word, "") for word in powers)
    return (found["number"] or found["formula"]).strip(), f"{known}{power}" if known else ""


def _known_unit(name: str) -> str | None:
    forms = (form.removesuffix(plural) for form in (name, name.lower()) for plural in ("", "s", "es"))
    return next((_UNITS[form] for form in forms if form in _UNITS), None)


def _is_plain_unit(number: str, name: str, known: str | None, *, spaced: bool) -> bool:
    r"""Whether letters after a number are a unit: in `\frac{1}{2} h` and `r^2 h` they are a variable."""
    if len(name) == 1:
        return name.lower() in _UNITS and spaced and re.fullmatch(r"[+-]?[\d.,]+", number) is not None
    return known is not None or (spaced and len(name) > 3)


_IN_BASE = re.compile(r"\(?(\d[\dA-F]*)\)?_\{?(\d+)\}?")
_JOINED = re.compile(r"\d+(?::\d+){2,}|\d{4}-\d{1,2}-\d{1,2}")


def numerals(formula: str) -> tuple[str, ...] | None:
    """Return the numbers in a notation that is not a formula, and None for any formula.

    These are the digits and the base of `12_8`, the numbers of a date (`2020-01-31`) and those of a ratio (`1:2:3`).
    """
    text = formula.replace(" ", "")
    if found := _IN_BASE.fullmatch(text):
        return found.groups()
    return tuple(part.lstrip("0") for part in re.split("[:-]", text)) if _JOINED.fullmatch(text) else None


_MOD = re.compile(r"\\?(?<![A-Za-z])[pb]?mod(?![A-Za-z])")


def split_modulus(formula: str) -> tuple[str, str | None]:
    r"""Return `x = 5` and `7` for `x \equiv 5 \pmod 7`; the modulus is None if there is none."""
    residue, *moduli = _MOD.split(formula)
    if len(moduli) != 1:
        return formula, None
    residue = residue.rstrip(" ~({")
    for command in ("\\text", "\\mathrm", "\\operatorname"):
        residue = residue.removesuffix(command)
    residue = residue.rstrip(" ~(\\,;:").replace("\\equiv", "=").replace("≡", "=")
    return residue, moduli[0].strip(" ~(){}\\,;:")
