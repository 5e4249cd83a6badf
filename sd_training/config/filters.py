"""The language of metadata filters. Text becomes a tree of comparisons by the grammar below; it is never evaluated as
code. `data/index/selection.py` turns the tree into a pyarrow expression over the index.

    filters:
      original_width: ">=512"                  a field and its condition; all entries must hold
      aesthetic: 5.5..7                        a range, both ends included; 5.5.. and ..7 have one end
      nsfw: false
      source: in [laion, "my own"]
      license: not null
      any_of: [{width: ">=1024"}, {height: ">=1024"}]        one of these mappings must hold; all_of: every one
      where: "width >= 512 and (aesthetic > 5 or source == laion)"     fields named in the text

    expression := conjunction { "or" conjunction }          conjunction := term { "and" term }
    term := "not" term | "(" expression ")" | [field] condition
    condition := operator value | value ".." value | ["not"] "in" "[" values "]" | ["is"] ["not"] "null" | value

A field is written in `where` and left out elsewhere; `where` requires `==` for equality. A value is a number, a bare
word or quoted text; a field in `where` may be in backquotes or quotes. A metadata field that is itself called where,
any_of or all_of is reached through `where`. Needs neither torch nor pyarrow.
"""

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

GRAMMAR = (
    'a condition such as >=512, ==en, != "two words", 0.5..1, in [a, b], null, not null, or several with and, or, not '
    "and parentheses"
)
EXACT_INTEGERS = 2**53
"""From here on not every integer is a float64, so longer integers are compared as text."""
_MAX_DIGITS = 300
_RESERVED = frozenset({"and", "or", "not", "in", "is", "null", "none", "nan", "inf", "infinity"})
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.(?!\.)\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?(?![\w]))"
    r"|(?P<dots>\.\.)|(?P<operator>>=|<=|==|!=|>|<)|(?P<mark>[()\[\],])"
    r"|\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'|`(?P<back>[^`]+)`"
    r"|(?P<word>[^\W\d](?:[\w:/+-]|\.(?!\.))*))",
    re.ASCII | re.DOTALL,
)
_WORD_START = re.compile(r"[^\W\d_]")
_BARE_FIELD = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_SHORT_REPR = reprlib.Repr()  # plain repr() of a deeply nested value is a RecursionError
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = 80

Value = float | str


@dataclass(frozen=True)
class Filter:
    """One node of a filter's tree.

    Attributes:
        operator: `>=`, `<=`, `>`, `<`, `==`, `!=`, `in` and `null` about `field`; `not`, `and`, `or` over `parts`.
        values: what the field is compared with; none for `null`.
    """

    operator: str
    field: str = ""
    values: tuple[Value, ...] = ()
    parts: tuple["Filter", ...] = ()

    def fields(self) -> set[str]:
        """The metadata fields that it reads."""
        return {self.field} if self.field else set().union(*(part.fields() for part in self.parts))

    def __str__(self) -> str:
        """The filter as `where` reads it."""
        if self.operator == "not":
            return f"not ({self.parts[0]})"
        if self.parts:
            return f" {self.operator} ".join(f"({part})" if part.parts else str(part) for part in self.parts)
        is_bare = _BARE_FIELD.fullmatch(self.field) and self.field not in _RESERVED
        field, values = self.field if is_bare else f"`{self.field}`", ", ".join(map(_value_text, self.values))
        if self.operator == "null":
            return f"{field} null"
        return f"{field} in [{values}]" if self.operator == "in" else f"{field} {self.operator} {values}"


def _value_text(value: Value) -> str:
    if isinstance(value, str):
        return f"'{value}'" if '"' in value else f'"{value}"'
    return repr(value).removesuffix(".0")


def long_integer(number: str) -> str | None:
    """The canonical text of an integer of at least 2^53, which is compared as text; None for any other text."""
    digits = number[1:] if number[:1] in ("+", "-") else number
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _MAX_DIGITS or int(digits) < EXACT_INTEGERS:
        return None
    return str(int(number))


def parse_filters(filters: Mapping[str, Any] | None) -> tuple[list[Filter], list[str]]:
    """Parses `dataset.params.filters`.

    Args:
        filters: as written by the user; None means no filter.

    Returns:
        One filter per valid entry, and one sentence per invalid entry.
    """
    found: list[Filter] = []
    problems: list[str] = []
    for name, written in (filters or {}).items():
        try:
            found.append(_parse_entry(str(name), written))
        except ValueError as error:  # also of a number with thousands of digits
            problems.append(_problem(str(name), written, str(error)))
        except RecursionError:
            problems.append(_problem(str(name), written, "nested too deeply"))
    return found, problems


def _problem(name: str, written: object, detail: str) -> str:
    shown = _SHORT_REPR.repr(written)[:80]
    if written is None:
        detail = (
            f"; quote it on the command line ('dataset.params.filters.{name}=>=512'), or the shell takes > as a "
            'redirection; a missing value is the text "null" in quotes'
        )
    elif detail:
        detail = f" ({detail[:120]})"
    return f"dataset.params.filters.{name}: {shown} is not a filter{detail}; write {GRAMMAR}"


def _parse_entry(name: str, written: Any) -> Filter:
    if name in ("any_of", "all_of"):
        # A single mapping is refused: `any_of: {a: .., b: ..}` does not say whether it means a or b.
        if not isinstance(written, list) or not written or not all(isinstance(e, Mapping) and e for e in written):
            raise ValueError(f"{name} takes a list of mappings of field to condition: [{{a: '>1'}}, {{b: '>1'}}]")
        alternatives = [_joined("and", [_parse_entry(str(k), v) for k, v in e.items()]) for e in written]
        return _joined("or" if name == "any_of" else "and", alternatives)
    if name == "where":
        if not isinstance(written, str):
            raise ValueError("where takes one text that names its fields")
        return _Parser(written, None).parse()
    if isinstance(written, (bool, int, float)):
        written = str(written).lower()
    if not isinstance(written, str):
        raise ValueError("")
    return _Parser(written, name).parse()


def _joined(word: str, parts: list[Filter]) -> Filter:
    return parts[0] if len(parts) == 1 else Filter(word, parts=tuple(parts))


_Token = tuple[str | None, str]
"""Kind (a group of `_TOKEN`) and text."""
_END: _Token = ("end", "the end")


class _Parser:
    """Recursive descent over the tokens of one text.

    Args:
        text: what was written.
        field: the field that every condition is about; None where the text names fields.
    """

    def __init__(self, text: str, field: str | None) -> None:
        self.field, self.position, at = field, 0, 0
        self.tokens: list[_Token] = []
        text = text.strip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise ValueError(f"invalid from {text[at : at + 20]!r} on")
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self.tokens += [_END, _END, _END]

    def parse(self) -> Filter:
        """The filter of the whole text."""
        found = self._several("or")
        if self.tokens[self.position] != _END:
            self._fail("the end")
        return found

    def _several(self, word: str) -> Filter:
        parts = [self._several("and") if word == "or" else self._term()]
        while self._take("word", word):
            parts.append(self._several("and") if word == "or" else self._term())
        return _joined(word, parts)

    def _term(self) -> Filter:
        # Without a field before it, `not in […]` and `not null` are conditions.
        is_condition = self.field is not None and self.tokens[self.position + 1] in (("word", "in"), ("word", "null"))
        if not is_condition and self._take("word", "not"):
            return Filter("not", parts=(self._term(),))
        if self._take("mark", "("):
            found = self._several("or")
            self._expect(")")
            return found
        return self._condition(self._field_name() if self.field is None else self.field)

    def _condition(self, field: str) -> Filter:
        kind, operator = self.tokens[self.position]
        if kind == "operator":
            self.position += 1
            is_equality = operator in ("==", "!=")
            return Filter(operator, field, (self._value(is_exact=True) if is_equality else self._number(),))
        if self._take("dots"):
            return Filter("<=", field, (self._number(),))
        has_is, is_negated = self._take("word", "is"), self._take("word", "not")
        if self._take("word", "null"):
            found = Filter("null", field)
        elif not has_is and self._take("word", "in"):
            found = Filter("in", field, self._list())
        elif has_is or is_negated:
            self._fail("null")
        else:
            return self._equality_or_range(field)
        return Filter("not", parts=(found,)) if is_negated else found

    def _equality_or_range(self, field: str) -> Filter:
        is_range = self.tokens[self.position + 1][0] == "dots"
        if not is_range and self.field is None:
            self._fail("a condition")
        low = self._number() if is_range else self._value(is_exact=True)
        if not self._take("dots"):
            return Filter("==", field, (low,))
        lower = Filter(">=", field, (low,))
        if self.tokens[self.position][0] != "number":
            return lower
        high = self._number()
        if isinstance(low, float) and low > high:
            raise ValueError(f"the range {low:g}..{high:g} is empty")
        return Filter("and", parts=(lower, Filter("<=", field, (high,))))

    def _field_name(self) -> str:
        kind, text = self.tokens[self.position]
        if not text or not (kind in ("back", "double", "single") or (kind == "word" and text not in _RESERVED)):
            self._fail("a field")
        self.position += 1
        return text

    def _list(self) -> tuple[Value, ...]:
        self._expect("[")
        values = [self._value(is_exact=True)]
        while self._take("mark", ","):
            values.append(self._value(is_exact=True))
        self._expect("]")
        return tuple(values)

    def _number(self) -> float:
        if self.tokens[self.position][0] != "number":
            self._fail("a number")
        return float(self._value(is_exact=False))

    def _value(self, *, is_exact: bool) -> Value:
        """The next token as a number or text; an exact long integer is text."""
        kind, text = self.tokens[self.position]
        is_number = kind == "number" and math.isfinite(float(text))
        is_bare = kind == "word" and text.lower() not in _RESERVED and _WORD_START.match(text)
        if not (is_number or is_bare or kind in ("double", "single")):
            self._fail("a number, a word or a text in quotes")
        self.position += 1
        if is_number:
            return (long_integer(text) if is_exact else None) or float(text)
        return text

    def _take(self, kind: str, text: str | None = None) -> bool:
        """Whether the next token is this one; then it is consumed."""
        token = self.tokens[self.position]
        is_it = token[0] == kind and text in (None, token[1])
        self.position += is_it
        return is_it

    def _expect(self, mark: str) -> None:
        if not self._take("mark", mark):
            self._fail(repr(mark))

    def _fail(self, wanted: str) -> NoReturn:
        raise ValueError(f"{wanted} is expected, not {self.tokens[self.position][1]!r}")
