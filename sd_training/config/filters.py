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

import ast
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GRAMMAR = (
    'a condition such as >=512, ==en, != "two words", 0.5..1, in [a, b], null, not null, or several with and, or, not '
    "and parentheses"
)
EXACT_INTEGERS = 2**53
"""From here on not every integer is a float64, so longer integers are compared as text."""
_MAX_DIGITS = 300
_MAX_CHARACTERS, _MAX_DEPTH = 20_000, 40
_NUMBER = r"[+-]?(?:\d+\.(?!\.)\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?(?!\w)"
_END = r"(?![\w:/+-]|\.(?!\.))"
"""Of a word."""
_FREE = rf"(?!(?i:and|or|not|in|is|null|none|nan|inf|infinity){_END})"
_BARE_FIELD = rf"{_FREE}[^\W\d](?:[\w:/+-]|\.(?!\.))*{_END}"
_FIELD = rf"(?P<field>{_BARE_FIELD}|`[^`]+`|\"[^\"]+\"|'[^']+')"
_VALUE = rf"(?:{_NUMBER}|(?!_){_BARE_FIELD}|\"[^\"]*\"|'[^']*')"
_CONDITION = (
    rf"(?:(?P<order>>=|<=|>|<)\s*(?P<bound>{_NUMBER})|(?P<equality>==|!=)\s*(?P<equal>{_VALUE})"
    rf"|(?P<low>{_NUMBER})\s*\.\.\s*(?P<high>{_NUMBER})?|\.\.\s*(?P<most>{_NUMBER})"
    rf"|(?:is\s+)?(?P<no>not\s+)?(?:(?P<null>null){_END}|in\s*\[\s*(?P<among>{_VALUE}(?:\s*,\s*{_VALUE})*)\s*\]))"
)
_LOGIC = rf"(?P<logic>(?:and|or|not){_END}|[()])"
_WITH_FIELDS = re.compile(rf"\s*(?:{_FIELD}\s*{_CONDITION}|{_LOGIC})", re.ASCII)
_WITHOUT_FIELDS = re.compile(rf"\s*(?:{_CONDITION}|{_LOGIC}|(?P<bare>{_VALUE}))", re.ASCII)
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
        field = self.field if re.fullmatch(_BARE_FIELD, self.field, re.ASCII) else f"`{self.field}`"
        values = ", ".join(map(_value_text, self.values))
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


def _parse_entry(name: str, written: Any, depth: int = 0) -> Filter:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if name in ("any_of", "all_of"):
        # A single mapping is refused: `any_of: {a: .., b: ..}` does not say whether it means a or b.
        if not isinstance(written, list) or not written or not all(isinstance(e, Mapping) and e for e in written):
            raise ValueError(f"{name} takes a list of mappings of field to condition: [{{a: '>1'}}, {{b: '>1'}}]")
        alternatives = [_joined("and", [_parse_entry(str(k), v, depth + 1) for k, v in e.items()]) for e in written]
        return _joined("or" if name == "any_of" else "and", alternatives)
    if isinstance(written, (bool, int, float)) and name != "where":
        written = str(written).lower()
    if not isinstance(written, str):
        raise ValueError("where takes one text that names its fields" if name == "where" else "")
    return _parse_text(written.strip(), None if name == "where" else name)


def _joined(word: str, parts: list[Filter]) -> Filter:
    return parts[0] if len(parts) == 1 else Filter(word, parts=tuple(parts))


def _parse_text(text: str, field: str | None) -> Filter:
    """The filter of one text. Python's parser reads how the conditions are joined; it is shown names in their place.

    Args:
        text: what was written.
        field: the field that every condition is about; None where the text names fields.
    """
    conditions: dict[str, Filter] = {}
    words, at = [], 0
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"longer than {_MAX_CHARACTERS:,} characters")
    while at < len(text):
        match = (_WITH_FIELDS if field is None else _WITHOUT_FIELDS).match(text, at)
        if match is None:
            raise ValueError(f"invalid from {text[at : at + 20]!r} on")
        if match["logic"]:
            words.append(match["logic"])
        else:
            words.append(f"_{len(conditions)}")
            conditions[words[-1]] = _condition(match, _unquoted(match["field"]) if field is None else field)
        at = match.end()
    try:
        return _tree(ast.parse(" ".join(words), mode="eval").body, conditions)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("conditions are joined by and, or, not and parentheses") from None


def _tree(node: ast.expr, conditions: Mapping[str, Filter], depth: int = 0) -> Filter:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    match node:
        case ast.BoolOp(operator, nodes):
            word = "and" if isinstance(operator, ast.And) else "or"
            return Filter(word, parts=tuple(_tree(part, conditions, depth + 1) for part in nodes))
        case ast.UnaryOp(_, part):
            return Filter("not", parts=(_tree(part, conditions, depth + 1),))
        case ast.Name(name):
            return conditions[name]
        case _:  # two pairs of parentheses look like a call, for instance
            raise SyntaxError


def _condition(match: re.Match[str], field: str) -> Filter:
    part = match.groupdict()
    if part["order"]:
        return Filter(part["order"], field, (_number(part["bound"]),))
    if part["low"] or part["most"]:
        ends = {">=": part["low"], "<=": part["high"] or part["most"]}
        limits = [Filter(operator, field, (_number(end),)) for operator, end in ends.items() if end]
        if len(limits) == 2 and limits[0].values > limits[1].values:
            raise ValueError(f"the range {match[0].strip()} is empty")
        return _joined("and", limits)
    if part["null"] or part["among"]:
        values = tuple(map(_value, re.findall(_VALUE, part["among"] or "", re.ASCII)))
        found = Filter("null" if part["null"] else "in", field, values)
        return Filter("not", parts=(found,)) if part["no"] else found
    return Filter(part["equality"] or "==", field, (_value(part["equal"] or part["bare"]),))


def _value(text: str) -> Value:
    """A long integer is text."""
    return _unquoted(text) if text[0] in "\"'" or text[0].isalpha() else long_integer(text) or _number(text)


def _unquoted(text: str) -> str:
    return text[1:-1] if text[0] in "\"'`" else text


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large")
    return number
