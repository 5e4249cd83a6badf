"""Metadata filters are read by this small grammar and never evaluated as code.

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

A field stands before its condition in `where`, where `== value` is written out, and is left out elsewhere. A value is
a number, a bare word or anything in quotes; a field in `where` may be in backquotes or quotes. A metadata field that
is itself called where, any_of or all_of is reached through `where`.
"""

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from sd_training.config.filter_rules import (
    RESERVED,
    Comparison,
    IsNull,
    Junction,
    Negation,
    OneOf,
    Operator,
    Rule,
    Value,
    long_integer,
)

GRAMMAR = (
    'a condition such as >=512, ==en, != "two words", 0.5..1, in [a, b], null, not null, or several with and, or, not '
    "and parentheses"
)
_MAX_CHARACTERS = 20_000
_MAX_DEPTH = 40
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.(?!\.)\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?(?![\w]))"
    r"|(?P<dots>\.\.)|(?P<operator>>=|<=|==|!=|>|<)|(?P<mark>[()\[\],])"
    r"|\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'|`(?P<back>[^`]+)`"
    r"|(?P<word>[^\W\d](?:[\w:/+-]|\.(?!\.))*))",
    re.ASCII | re.DOTALL,
)
_WORD_START = re.compile(r"[^\W\d_]")
_GROUPS = ("any_of", "all_of")
_SHOWN = reprlib.Repr()  # plain repr() of a deeply nested value is a RecursionError
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80


class _Token(NamedTuple):
    kind: str
    text: str


class _NotAFilter(Exception):
    pass


def parse_filters(filters: Mapping[str, Any] | None) -> tuple[list[Rule], list[str]]:
    """Reads `dataset.params.filters`.

    Args:
        filters: as written by the user; None means no filter.

    Returns:
        One rule per entry that could be read, and one sentence per entry that could not.
    """
    rules: list[Rule] = []
    problems: list[str] = []
    for name, written in (filters or {}).items():
        try:
            rules.append(_entry(str(name), written, 0))
        except _NotAFilter as error:
            problems.append(_problem(str(name), written, str(error)))
    return rules, problems


def _problem(name: str, written: object, detail: str) -> str:
    shown = _SHOWN.repr(written)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    if written is None:
        quoted = f"'dataset.params.filters.{name}=>=512'"
        detail = (
            f"; quote it on the command line ({quoted}), or the shell takes > as a redirection; a missing value is "
        )
        detail += """the text "null" in quotes"""
    elif detail:
        detail = f" ({detail if len(detail) <= 120 else f'{detail[:117]}...'})"
    return f"dataset.params.filters.{name}: {shown} is not a filter{detail}; write {GRAMMAR}"


def _entry(name: str, written: Any, depth: int) -> Rule:
    if depth > _MAX_DEPTH:
        raise _NotAFilter("nested too deeply")
    if name in _GROUPS:
        return _group(name, written, depth)
    if name == "where":
        if not isinstance(written, str):
            raise _NotAFilter("where takes one text that names its fields")
        return _Parser(written, None).whole()
    if isinstance(written, bool):
        return Comparison(name, "==", str(written).lower())
    if isinstance(written, (int, float)):
        return Comparison(name, "==", long_integer(str(written)) or _finite(written))
    if not isinstance(written, str):
        raise _NotAFilter("")
    return _Parser(written, name).whole()


def _finite(number: float) -> float:
    try:
        value = float(number)
    except OverflowError:  # integers know no bounds
        value = math.inf
    if not math.isfinite(value):
        raise _NotAFilter("not a finite number")
    return value


def _group(name: str, written: Any, depth: int) -> Rule:
    """One mapping alone is refused: whether `any_of: {a: .., b: ..}` means a or b is anyone's guess."""
    if not isinstance(written, list) or not written or not all(isinstance(e, Mapping) and e for e in written):
        raise _NotAFilter(f"{name} takes a list of mappings of field to condition: [{{a: '>1'}}, {{b: '>1'}}]")
    parts = [_junction("and", [_entry(str(k), v, depth + 1) for k, v in entry.items()]) for entry in written]
    return _junction("or" if name == "any_of" else "and", parts)


def _junction(word: str, rules: list[Rule]) -> Rule:
    return rules[0] if len(rules) == 1 else Junction(cast(Any, word), tuple(rules))


def _tokens(text: str) -> list[_Token]:
    if len(text) > _MAX_CHARACTERS:
        raise _NotAFilter(f"longer than {_MAX_CHARACTERS:,} characters")
    found, position, text = [], 0, text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise _NotAFilter(f"not understood from {text[position : position + 20]!r} on")
        found.append(_Token(match.lastgroup, match[match.lastgroup]))
        position = match.end()
    return found


class _Parser:
    """Recursive descent over the tokens of one text.

    Args:
        text: what was written.
        field: the field that every condition is about; None where the text names fields.
    """

    def __init__(self, text: str, field: str | None) -> None:
        self.tokens, self.field = _tokens(text), field
        self.position = self.depth = 0

    def whole(self) -> Rule:
        """The rule of the whole text."""
        rule = self._expression()
        if self.position < len(self.tokens):
            raise _NotAFilter(f"unexpected {self.tokens[self.position].text!r}")
        return rule

    def _expression(self) -> Rule:
        return self._several("or", lambda: self._several("and", self._term))

    def _several(self, word: str, part: Callable[[], Rule]) -> Rule:
        rules = [part()]
        while self._took_word(word):
            rules.append(part())
        return _junction(word, rules)

    def _term(self) -> Rule:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _NotAFilter("nested too deeply")
        if self._is_word("not") and not (self.field and self._next_is("in", "null", ahead=1)):
            self.position += 1
            rule: Rule = Negation(self._term())
        elif self._took_mark("("):
            rule = self._expression()
            self._need_mark(")")
        else:
            rule = self._condition(self.field if self.field is not None else self._field_name())
        self.depth -= 1
        return rule

    def _condition(self, field: str) -> Rule:
        token = self._peek()
        if token is not None and token.kind == "operator":
            self.position += 1
            return _compared(field, cast(Operator, token.text), self._value(is_exact=token.text in ("==", "!=")))
        if token is not None and token.kind == "dots":
            self.position += 1
            return _compared(field, "<=", self._value(numbers_only=True))
        is_negated = self._took_words("is", "not") or (not self._took_word("is") and self._took_word("not"))
        if self._took_word("null"):
            rule: Rule = IsNull(field)
        elif self._took_word("in"):
            rule = OneOf(field, self._values())
        elif is_negated:
            raise _NotAFilter(f"no condition for {field!r}")
        else:
            return self._plain(field)
        return Negation(rule) if is_negated else rule

    def _plain(self, field: str) -> Rule:
        """A value, which must be equal, or a range."""
        low = self._value(is_exact=self._peek(1) is None or cast(_Token, self._peek(1)).kind != "dots")
        if not self._took("dots"):
            if self.field is None:
                raise _NotAFilter(f"no condition for {field!r}")
            return Comparison(field, "==", low)
        token = self._peek()
        lower = _compared(field, ">=", low)
        if token is None or token.kind != "number":
            return lower
        upper = _compared(field, "<=", self._value(numbers_only=True))
        if float(low) > float(token.text):
            raise _NotAFilter(f"the range {low:g}..{float(token.text):g} is empty")
        return Junction("and", (lower, upper))

    def _field_name(self) -> str:
        token = self._peek()
        is_name = token is not None and token.kind in ("word", "back", "double", "single") and token.text
        if token is None or not is_name or (token.kind == "word" and token.text in RESERVED):
            raise _NotAFilter("a field is expected" + (f", not {token.text!r}" if token else " at the end"))
        self.position += 1
        return token.text

    def _values(self) -> tuple[Value, ...]:
        self._need_mark("[")
        values = [self._value(is_exact=True)]
        while self._took_mark(","):
            values.append(self._value(is_exact=True))
        self._need_mark("]")
        return tuple(values)

    def _value(self, numbers_only: bool = False, is_exact: bool = False) -> Value:
        token = self._peek()
        self.position += 1
        if token is not None and token.kind == "number" and math.isfinite(float(token.text)):
            return (long_integer(token.text) if is_exact else None) or float(token.text)
        if token is None or numbers_only or token.kind not in ("double", "single", "word"):
            raise _NotAFilter("a number is expected" if numbers_only else "a value is expected")
        if token.kind == "word" and (token.text.lower() in RESERVED or not _WORD_START.match(token.text)):
            raise _NotAFilter(f"{token.text!r} must be in quotes to be a text")
        return token.text

    def _peek(self, ahead: int = 0) -> _Token | None:
        place = self.position + ahead
        return self.tokens[place] if place < len(self.tokens) else None

    def _is_word(self, word: str, ahead: int = 0) -> bool:
        return self._peek(ahead) == _Token("word", word)

    def _next_is(self, *words: str, ahead: int) -> bool:
        return any(self._is_word(word, ahead) for word in words)

    def _took(self, kind: str) -> bool:
        token = self._peek()
        found = token is not None and token.kind == kind
        self.position += found
        return found

    def _took_word(self, word: str) -> bool:
        found = self._is_word(word)
        self.position += found
        return found

    def _took_words(self, first: str, second: str) -> bool:
        found = self._is_word(first) and self._is_word(second, 1)
        self.position += 2 * found
        return found

    def _took_mark(self, mark: str) -> bool:
        found = self._peek() == _Token("mark", mark)
        self.position += found
        return found

    def _need_mark(self, mark: str) -> None:
        if not self._took_mark(mark):
            raise _NotAFilter(f"{mark!r} is missing")


def _compared(field: str, operator: Operator, value: Value) -> Rule:
    if isinstance(value, str) and operator not in ("==", "!="):
        raise _NotAFilter(f"{operator} needs a number, not {value!r}")
    return Comparison(field, operator, value)
