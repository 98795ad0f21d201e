r"""Answers and labels with the verdict that a mathematician would give, by families of notation.

Each family renders values in several ways: two renderings of the same value are equal, and two renderings of different
values are not. Where the right verdict is a matter of taste, the family is marked, and no verdict is expected.
"""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """An answer in a box, a label, and the verdict of a mathematician; None where mathematicians may differ."""

    family: str
    answer: str
    label: str
    right: bool | None


RENDERINGS: dict[str, list[list[str]]] = {
    # Each row has renderings of one value; the values of a family differ.
    "integers": [
        ["5", "5.", "5.0", "+5", " 5 ", "05", "(5)", "{5}", "$5$", r"\(5\)", r"5\,", "5 ", r"\text{5}", "5,"],
        ["-5", "- 5", "-5.0", "$-5$", r"\left(-5\right)"],
        ["12", "12.00", r"\mathbf{12}", "12;"],
        ["17", "17.0"],
        ["50", r"5\cdot 10", r"\frac{100}{2}"],
        ["0", "0.0", "-0"],
    ],
    "thousands": [
        ["5000", "5,000", r"5\,000", "5{,}000", r"5\;000", "5 000", r"5\!000", "5000.0", r"5,\!000"],
        ["12345678", "12,345,678", r"12\,345\,678", "12{,}345{,}678"],
        ["50", "50.0"],
        ["5001", "5,001", r"5\,001"],
        ["123456", "123,456"],
    ],
    "decimals": [
        ["0.5", ".5", "0.50", r"\frac{1}{2}", "1/2", r"\frac12", r"\dfrac{1}{2}", r"\tfrac12", r"{1}/{2}",
         r"\frac{2}{4}"],
        ["0.05", ".05", r"\frac{1}{20}", r"5\cdot 10^{-2}"],
        ["-0.5", "-.5", r"-\frac{1}{2}", r"\frac{-1}{2}", r"\frac{1}{-2}", "-1/2"],
        ["3.25", r"\frac{13}{4}", r"3\frac{1}{4}", "3 1/4", "13/4", r"3\tfrac14"],
        ["0.001", r"10^{-3}", "1e-3", "1E-3", r"\frac{1}{1000}", r"1\times 10^{-3}"],
        ["1.5", r"1\frac{1}{2}", "3/2"],
        ["3.5", "7/2"],
    ],
    "scientific": [
        ["6000", r"6\times 10^3", r"6 \times 10^{3}", "6e3", "6.0e+3", r"6\cdot10^3", "6*10^3"],
        ["1500", r"1.5\times10^{3}", "1.5e3"],
        ["0.0012", r"1.2\times 10^{-3}", "1.2e-3", "1.2E-03"],
        ["600", r"6\times 10^{2}", "6e2"],
    ],
    "roots": [
        [r"2\sqrt{3}", r"\sqrt{12}", r"2\sqrt3", "2 sqrt(3)", r"\sqrt{4\cdot 3}", r"2\cdot\sqrt{3}", r"2 \sqrt {3}"],
        [r"3\sqrt{2}", r"\sqrt{18}"],
        [r"\sqrt{3}", r"3^{1/2}", r"\sqrt 3"],
        [r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", r"\frac{1}{2}\sqrt{3}", r"\dfrac{\sqrt3}{2}"],
        [r"\frac{2}{\sqrt{3}}", r"\frac{2\sqrt{3}}{3}"],
        ["2", r"\sqrt[3]{8}", r"\sqrt{4}"],
        [r"1+\sqrt{5}", r"\sqrt{5}+1"],
        [r"1-\sqrt{5}", r"-\sqrt{5}+1"],
    ],
    "constants": [
        [r"\pi", "pi", r"\pi "],
        [r"2\pi", r"2 \pi", r"\pi\cdot 2", "2pi"],
        [r"\frac{\pi}{2}", r"\pi/2", r"\frac12\pi"],
        ["e", r"e^1"],
        [r"\infty", r"+\infty"],
        [r"-\infty"],
        ["i", r"\sqrt{-1}"],
        [r"3+4i", "4i+3"],
        ["3-4i"],
    ],
    "powers": [
        ["1024", "2^{10}", "2^10"],
        ["120", "5!"],
        ["10", r"\binom{5}{2}"],
        ["2^{100}", "4^{50}"],
        ["2^{99}"],
    ],
    "algebra": [
        ["ab", "ba", r"a\cdot b", r"a b", "a*b"],
        ["xy", "yx", r"x \cdot y"],
        ["x^2+1", "1+x^2", "x^{2}+1"],
        ["x^2-1", "(x-1)(x+1)", r"(x+1)\cdot(x-1)"],
        ["2x+3", "3+2x", r"2 x + 3"],
        ["2x-3"],
        ["a+b", "b+a"],
        [r"\pi r^2 h", r"h \pi r^2"],
        [r"\pi r^2"],
        [r"\frac{1}{2} b h", r"\frac{bh}{2}", r"\frac12 bh"],
        [r"\frac{1}{2} h", r"\frac{h}{2}"],
        [r"\frac{1}{2}"],
        ["a-b", "-b+a"],
        [r"\frac{x}{y}", "x/y"],
        [r"\frac{y}{x}"],
        ["x_1", "x_{1}"],
        ["x_2"],
        ["2abc", "2bca"],
        [r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"],
        [r"\sin x", r"\sin(x)"],
        [r"\cos x", r"\cos(x)"],
        [r"\ln 2", r"\ln(2)"],
    ],
    "words": [
        ["AB", r"\text{AB}", r"\mathrm{AB}", "AB.", " AB "],
        ["BA", r"\text{BA}"],
        ["ACBD", r"\text{ACBD}"],
        ["ABCD", r"\mathrm{ABCD}", r"\textbf{ABCD}"],
        ["NO", "no", r"\text{No}", "No."],
        ["ON", r"\text{ON}"],
        ["YES", "yes", r"\text{Yes}"],
        ["even", r"\text{even}", r"\text{ even }", "Even"],
        ["odd", r"\text{odd}"],
        ["Monday", r"\text{Monday}", r"\mbox{Monday}"],
        ["Tuesday"],
        ["True", r"\text{True}", "true"],
        ["False", r"\text{false}"],
        ["CAB"],
        ["listen", r"\text{listen}"],
        ["silent", r"\text{silent}"],
        [r"\text{no solution}", "no solution", "No Solution"],
        [r"\text{east}", "east"],
        [r"\text{seat}"],
        [r"\text{Spain, France}"],
    ],
    "choices": [
        ["A", r"\text{A}", "(A)", r"\text{(A)}", r"\textbf{(A)}", r"\mathrm{A}", r"\mathbf{A}", "A."],
        ["B", r"\text{B}", "(B)", r"\textbf{B}"],
        ["C", "(C)"],
        ["D", r"\text{(D)}"],
        ["A, C", "A,C", r"\text{A, C}"],
        ["A, D"],
    ],
    "tuples": [
        ["(1,2)", "(1, 2)", r"\left(1, 2\right)", r"(1,\,2)", "(1.0,2)"],
        ["(2,1)", "(2, 1)"],
        [r"\left(\frac{1}{2}, 3\right)", "(0.5, 3)", "(1/2,3)"],
        ["(1,2,3)", "(1, 2, 3)"],
        ["(1,3,2)"],
        ["(-1,0)", r"\left(-1,\ 0\right)"],
        [r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"],
    ],
    "sets": [
        [r"\{1,2\}", r"\{2,1\}", r"\{1, 2\}", r"\left\{1, 2\right\}"],
        [r"\{1,3\}"],
        [r"\{1,2,3\}", r"\{3,2,1\}"],
        [r"\emptyset", r"\varnothing", r"\{\}"],
    ],
    "lists": [
        ["1, 2", "1,2", r"1,\ 2", r"1 \text{ and } 2", "1 and 2", r"1\text{ or }2", "2, 1"],
        ["1, 3", "1,3"],
        ["2, -2", r"\pm 2", "-2, 2", r"\pm2"],
        ["5, 6", "5 and 6"],
        ["1, 2, 3", "1,2,3"],
    ],
    "intervals": [
        ["[1,2]", "[1, 2]", r"\left[1,2\right]", r"1\le x\le 2", r"x\in[1,2]"],
        ["[1,2)", r"\left[1, 2\right)"],
        ["(-\\infty,2]", r"\left(-\infty, 2\right]", r"x\le 2"],
        ["(-\\infty,2)", r"(-\infty, 2)", "x<2"],
        [r"(-\infty,0)\cup(1,\infty)", r"\left(-\infty,0\right) \cup \left(1,\infty\right)"],
        [r"(-\infty,0]\cup[1,\infty)"],
    ],
    "matrices": [
        [r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
         r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"],
        [r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"],
        [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"],
        [r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"],
        [r"\begin{pmatrix} \frac{1}{2} \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}"],
    ],
    "equations": [
        ["x=5", "x = 5", "5", r"x = 5.0"],
        ["x=6", "6"],
        ["y=2x+1", "y = 2x + 1", "2x+1", "y=1+2x"],
        ["y=2x-1", "2x-1"],
        ["x^2+y^2=4", "x^2 + y^2 = 4", r"y^2+x^2=4"],
        ["x^2+y^2=9"],
    ],
    "units": [
        ["5 cm", r"5\text{ cm}", r"5 \text{ cm}", r"5\,\mathrm{cm}", r"5~\text{cm}", r"5 \text{ centimeters}",
         "5 centimeters"],
        ["5 m", r"5\text{ m}", r"5\,\mathrm{m}", r"5 \text{ meters}"],
        ["6 cm", r"6\text{ cm}"],
        ["5 kg", r"5\text{ kg}"],
        ["5 hours", r"5\text{ hours}"],
        ["5 minutes", r"5\text{ minutes}"],
        [r"12 \text{ cm}^2", r"12\text{ cm}^{2}", r"12\ \mathrm{cm}^2"],
        [r"13 \text{ cm}^2"],
    ],
    "bases": [
        ["12_8", "12_{8}"],
        ["12_9", "12_{9}"],
        ["1011_2", "1011_{2}"],
        ["12"],
        ["1011"],
    ],
    "degrees": [
        [r"30^\circ", r"30^{\circ}", r"30\text{ degrees}", "30 degrees", "30°"],
        [r"60^\circ", r"60^{\circ}"],
        [r"30.5^\circ"],
    ],
    "money": [
        [r"\$5", "$5", r"\$5.00", r"5 \text{ dollars}", "5 dollars", r"\text{\$}5"],
        [r"\$6", "$6"],
        [r"\$1,250", "$1250", r"\$1{,}250", r"\$1,250.00"],
        [r"\$1,251"],
    ],
    "percent": [
        [r"50\%", "50%", r"50 \%", r"50\text{ percent}", "50 percent"],
        [r"60\%", "60%"],
        [r"5\%", "5%"],
        [r"12.5\%", "12.5%", r"12.50\%"],
    ],
    "malformed": [
        [r"\frac{3}{7}", r"\frac 37", r"\frac37", r"\frac{3}7", r"\frac3{7}", r"\dfrac 3 7", r"3/7",
         r"\frac{ 3 }{ 7 }"],
        [r"\frac{7}{3}", r"\frac73"],
        [r"\sqrt{7}", r"\sqrt7", r"\sqrt 7", "sqrt(7)", "sqrt{7}"],
        ["x^{12}", "x^{ 12 }", "x^(12)"],
        ["x^{13}"],
    ],
    "nested": [
        [r"\frac{1}{\frac{2}{3}}", r"\frac{3}{2}", "1.5"],
        [r"\frac{\frac{1}{2}}{3}", r"\frac{1}{6}"],
        [r"{{7}}", "7", r"{{{7}}}"],
        [r"\left\{\frac{1}{2}\right\}", r"\{0.5\}"],
        [r"\sqrt{1+\sqrt{2}}", r"\sqrt{\sqrt{2}+1}"],
    ],
}  # fmt: skip

DISPUTED = {
    # Whether these are equal depends on what the question asked for.
    "unit left out": [("5", "5 cm"), ("5 cm", "5"), (r"5\text{ m}", "5"), (r"30^\circ", "30"), ("30", r"30^\circ"),
                      (r"\$5", "5"), ("5", r"\$5"), (r"5 \text{ apples}", "5"), ("5", r"5 \text{ apples}")],
    "percent as number": [(r"50\%", "50"), ("50", r"50\%"), (r"50\%", "0.5"), ("0.5", r"50\%"), (r"500\%", "5"),
                          ("5", r"500\%"), (r"\frac{1}{2}", r"50\%")],
    "name left out": [("2x+1", "f(x)=2x+1"), ("5", "x+1=5"), ("x=5", "y=5"), (r"x \in [1,2]", "[1,2]")],
    "ratio": [("2:3", r"\frac{2}{3}"), ("2/3", "2:3"), ("2:3", "2:3"), ("2:3", "3:2"), ("4:6", "2:3"), ("10:30",
    "10:30")],
    "rounded": [("0.333", r"\frac{1}{3}"), ("0.3333333", r"\frac{1}{3}"), ("3.14", r"\pi"), ("3.14159", r"\pi"),
    ("1.41", r"\sqrt{2}")],
    "case": [("a", "A"), ("b", r"\text{B}"), ("ab", "AB"), ("X", "x")],
    "order": [(r"\{1,1,2\}", r"\{1,2\}"), ("C, A", "A, C"), ("AC", "A, C"), ("(1,2)", "1,2"), ("1,2", "(1,2)"),
    ("[1,2]", "(1,2)")],
    "choice with its text": [(r"\text{(B) } 5", "B"), ("B. 5", "B"), ("B: 5", "B"), (r"\textbf{(B)}\ 5", "B"), ("5",
    "B")],
    "more than the answer": [("5 or 6", "5"), ("5, 6", "5"), ("5=5", "5"), ("2+3", "5"), ("5+0", "5"), ("x=2+3", "5")],
    "units converted": [("500 cm", "5 m"), ("5 m", "500 cm"), (r"1\text{ hour}", r"60\text{ minutes}")],
    "base converted": [("10", "12_8"), ("1011", "1011_2"), ("11", "1011_2")],
}  # fmt: skip

EMPTY = [
    ("", ""),
    ("", "5"),
    ("5", ""),
    (" ", "5"),
    (" ", " "),
    ("{}", "5"),
    (r"\text{}", "5"),
    ("$$", "5"),
    (r"\ ", ""),
]
"""An empty answer is never right, and an empty label has no right answer."""


WHOLE_NUMBERS = [("34.", True), ("34,", True), ("**34**", True), ("**34**.", True), (r"\ 34", True), ("134", False),
                 ("341", False), ("-34", False), ("34x", False), ("34.5", False), ("0.34", False), ("34%", None),
                 ("2t", False), ("34t", False), ("34ab", False), ("34 apples", None)]  # fmt: skip


def pairs() -> list[Pair]:
    """Return about 1,300 different pairs, the same ones in every call."""
    found = [Pair("whole number", answer, "34", right) for answer, right in WHOLE_NUMBERS]
    found += [Pair("empty", answer, label, False) for answer, label in EMPTY]
    for family, disputed in DISPUTED.items():
        found += [Pair(family, answer, label, None) for answer, label in disputed]
    for family, rows in RENDERINGS.items():
        for number, row in enumerate(rows):
            for position, answer in enumerate(row):
                other = rows[(number + 1 + position % (len(rows) - 1)) % len(rows)]
                found.append(Pair(family, answer, row[0], True))
                found.append(Pair(family, row[0], answer, True))
                found.append(Pair(family, answer, other[position % len(other)], False))
    return list(dict.fromkeys(found))


LINES = (
    # Text before and after the number, and whether the line gives that number as the answer.
    ("Answer: ", "", True), ("Answer: $", "$", True), ("Answer: $", "$.", True), ("answer : ", "", True),
    ("So.\nAnswer: ", "\n", True), ("Answer: \\boxed{", "}", True), ("Answer: $\\boxed{", "}$", True), ("ANSWER:",
     " ", True),
    ("Answer: ", ".", True), ("Answer: ", " apples", None), ("Answer: ", " dollars", True), ("Answer: $", "$ dollars",
     True),
    ("Answer: x = ", "", True), ("Answer: The value is $", "$.", True), ("**Answer:** ", "", True), ("**Answer**: ",
     "", True),
    ("Answer: **", "**", True), ("Answer: \\(", "\\)", True), ("Answer:\n", "", True), ("Answer: \\text{", "}", True),
    ("Answer: 1", "", False), ("Answer: ", "1", False), ("Answer: -", "", False), ("Answer: 7\nNo, ", "", False),
    ("It is ", "", False), ("The answer is ", "", False), ("Answer: ", "x", False), ("Answer: ", ".5", False),
    ("Answer: 3 or ", "", False), ("Answer: ", ", 5", False), ("Answer: ", "\nAnswer: 99999", False),
)  # fmt: skip
NUMBERS = (4, 34, 204, 1000, 12345, 113, 540, 25, 9, 721, 2, 16, 81, 70, 588, 33, 62, 106)


def lines() -> list[Pair]:
    """Return about 570 pairs of a response and a whole number as its label, as DAPO's data has them."""
    found = []
    for before, after, right in LINES:
        for number in NUMBERS:
            found.append(Pair(f"{before}N{after}", f"{before}{number}{after}", str(number), right))
    for number in NUMBERS:
        found.append(Pair("too early", f"Answer: {number}" + " so" * 100, str(number), False))
        found.append(Pair("thousands", f"Answer: {number:,}", str(number), True))
        found.append(Pair("as a sum", f"Answer: {number - 1}+1", str(number), None))
    return found


TEXTS = (
    "the cat", "a cat", "cat", "The Cat!", "cat sat", "the cat sat on the mat", "dog", "yes", "no", "Yes.",
    "yes and no",
    "no answer", "noanswer", "New York", "York New", "new york city", "", " ", "the", "1,000", "1000",
    "state-of-the-art",
    "état", "cat cat", "a an the", "U.S.A.", "USA",
)  # fmt: skip

RESPONSES = (
    "{X}", "({X})", "**{X}**", "Answer: {X}", "answer is {X}", "The answer is ({X}).",
    "The answer is {X} because it fits.",
    "The final answer is option {X}.", "I choose choice {X}", "{X} is correct", "{X} is the correct answer",
    "\\boxed{{X}}", "\\boxed{\\text{{X}}}", "<think>A or D? B!</think>The answer is {X}",
    "Answer: {X}. The force is 5 N",
    "It cannot be A, so {X}", "Not ({Y}). Answer: ({X})", "The answer depends. I choose {X}",
    "The answer is a mix: {X}",
    "Answer: $\\mathbf{{X}}$", "{T}", "The answer is {T}.", "I do not know", "Answer:\n{X}",
)  # fmt: skip
CHOICES = ("red", "blue", "green apple", "dark")


def chosen() -> list[tuple[str, str, dict[str, object], bool]]:
    """Return about 600 tuples of a response, a label, metadata, and whether the response chooses the label's choice."""
    found = []
    for pattern in RESPONSES:
        for said, right in ((0, 0), (1, 1), (2, 1), (3, 3), (1, 0)):
            letter, other = "ABCD"[said], "ABCD"[(said + 1) % 4]
            response = pattern.replace("{X}", letter).replace("{Y}", other).replace("{T}", CHOICES[said])
            says = pattern != "I do not know" and said == right
            labels: tuple[tuple[str, dict[str, object]], ...] = (
                ("ABCD"[right], {}),
                ("ABCD"[right], {"choices": list(CHOICES)}),
                (CHOICES[right], {"choices": list(CHOICES)}),
                (CHOICES[right], {"choices": dict(zip("ABCD", CHOICES, strict=True))}),
                ("any", {"correct_letter": "ABCD"[right], "choices": list(CHOICES)}),
            )
            for label, metadata in labels:
                # The text of a choice says nothing if the choices are not known.
                found.append((response, label, dict(metadata), says and ("{T}" not in pattern or bool(metadata))))
    return found
