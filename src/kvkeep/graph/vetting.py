"""Check the text that torch turns into code when it loads a program; refuse text that kvkeep's
export never writes.

torch evaluates shape expressions, compiles guards and value names into Python, looks up operators
by name, and imports types. So a program's file is code. These checks prevent the known abuses; they
are not a sandbox.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9_.]*")
_TEXTS = {"as_string", "nn_module_stack", "source_fn_stack", "stack_trace", "torch_fn"}
"""Fields that torch does not evaluate."""

_OPERATORS = re.compile(
    r"torch\.ops\.(aten|transformers|prims|higher_order)(\.(?!__)\w+){1,2}"
    r"|torch\.ops\.aten\.__(and|or|xor|lshift|rshift)__\.(Tensor|Scalar)"
    r"|torch\.ops\.kvkeep\.(grouped|read_in|step_in)\.default"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|neg|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
    r"|torch\.sym_(max|min|not|float|int|ite|sum)|math\.(ceil|floor|trunc)",
    re.ASCII,
)
_OPENS_FILES = re.compile(r"torch\.ops\.aten\.(from_file|_?save|_?load)")
_TYPES = {None, "builtins.tuple", "builtins.list", "builtins.dict"}

_FUNCTIONS = {
    *("Symbol", "Integer", "Rational", "Add", "Mul", "Pow", "Mod", "PythonMod", "Min", "Max"),
    *("FloorDiv", "CeilDiv", "CleanDiv", "IntTrueDiv", "FloatTrueDiv", "ModularIndexing", "Where"),
    *("Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "TruncToInt", "ToFloat", "Identity"),
    *("Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan"),
}
_ASSUMPTIONS = {"integer", "positive", "nonnegative", "nonzero", "negative", "real", "finite"}
_SYMBOL = re.compile(r"[a-z]{1,6}\d{1,9}")
_CONSTANTS = {"true", "false"}
_MOST_TEXT, _MOST_EXPONENT, _MOST_NUMBER = 10_000, 64, 1 << 63
_PLAIN = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.And),
    *(ast.Or, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


def why_refused(model: Any) -> str:
    """Describe a string of a program that kvkeep's export never writes, given the parsed JSON of
    `models/model.json`; empty if there is none."""
    for name, value in _strings(model):
        if not _is_known(name, value):
            return f"{name} {value[:80]!r}"
    return ""


def _strings(part: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every string, with the name of its field. Field names themselves are yielded as 'the name',
    because they may be value names."""
    waiting: list[tuple[Any, str]] = [(part, name)]
    while waiting:
        part, name = waiting.pop()
        if isinstance(part, dict):
            for key, value in part.items():
                yield "the name", key
                waiting.append((value, key))
        elif isinstance(part, list):
            waiting += [(value, name) for value in part]
        elif isinstance(part, str):
            yield name, part


def _is_known(name: str, text: str) -> bool:
    if name == "expr_str":
        return _is_expression(text)
    if name == "guards_code":
        return _is_guard(text)
    if name in ("target", "as_operator"):
        return _OPERATORS.fullmatch(text) is not None and not _OPENS_FILES.match(text)
    if name in ("in_spec", "out_spec"):
        return _is_structure(text)
    if name in ("as_float", "as_floats"):  # numbers in other fields are not strings
        return text in ("Infinity", "-Infinity", "NaN")
    if name == "torch_version":
        return re.fullmatch(r"[\w.+-]*", text, re.ASCII) is not None
    return name in _TEXTS or _NAME.fullmatch(text) is not None


def _parsed(text: str) -> list[ast.AST]:
    """The nodes of a Python expression; empty if the text is not an expression."""
    try:
        return list(ast.walk(ast.parse(text, mode="eval"))) if len(text) <= _MOST_TEXT else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _is_expression(text: str) -> bool:
    """Whether the text is a sympy expression of known functions, symbols and small numbers."""
    parts = _parsed(text)
    named = {part.func for part in parts if isinstance(part, ast.Call)}
    quoted: set[ast.AST] = set()
    for part in parts:
        if not isinstance(part, ast.Call):
            continue
        if not isinstance(part.func, ast.Name) or part.func.id not in _FUNCTIONS:
            return False
        if any(
            word.arg not in _ASSUMPTIONS or not isinstance(word.value, ast.Constant)
            for word in part.keywords
        ):
            return False
        if part.func.id == "Symbol":
            if len(part.args) != 1 or not _is_symbol(part.args[0]):
                return False
            quoted.add(part.args[0])
        if part.func.id == "Pow" and not (_is_base(part.args[:1]) and _is_small(part.args[1:])):
            return False
    return bool(parts) and all(
        isinstance(part, (*_PLAIN, ast.Call, ast.keyword))
        or (isinstance(part, ast.Constant) and (part in quoted or _is_number(part)))
        or (
            isinstance(part, ast.Name)
            and (part in named or part.id in _CONSTANTS or _SYMBOL.fullmatch(part.id))
        )
        for part in parts
    )


def _is_guard(text: str) -> bool:
    """Whether the text only compares sizes and strides of the inputs."""
    parts = _parsed(text)
    calls = [part for part in parts if isinstance(part, ast.Call)]
    sizes = {part.func for part in calls if not part.args and not part.keywords}
    return bool(parts) and all(
        isinstance(part, (*_PLAIN, ast.Subscript))
        or (isinstance(part, ast.Call) and part.func in sizes)
        or (isinstance(part, ast.Attribute) and part in sizes and part.attr in ("size", "stride"))
        or (isinstance(part, ast.Name) and part.id == "L")
        or (isinstance(part, ast.Constant) and (_is_number(part) or _is_key(part)))
        for part in parts
    )


def _is_structure(text: str) -> bool:
    """Whether the text describes nested tuples, lists and dicts."""
    try:
        waiting = [json.loads(text)]
    except (ValueError, RecursionError):
        return False
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if part.get("type") not in _TYPES:
                return False
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return True


def _is_number(part: ast.Constant) -> bool:
    value = part.value
    return isinstance(value, (bool, float)) or (isinstance(value, int) and value < _MOST_NUMBER)


def _is_key(part: ast.Constant) -> bool:
    return isinstance(part.value, str) and _NAME.fullmatch(part.value) is not None


def _is_symbol(part: ast.AST) -> bool:
    value = part.value if isinstance(part, ast.Constant) else None
    return isinstance(value, str) and _SYMBOL.fullmatch(value) is not None


def _is_base(bases: list[ast.expr]) -> bool:
    """Whether this is a single base that contains no power: nested powers give numbers of a million
    digits, however small the exponents."""
    calls = (part for each in bases for part in ast.walk(each) if isinstance(part, ast.Call))
    names = (part.func.id for part in calls if isinstance(part.func, ast.Name))
    return len(bases) == 1 and "Pow" not in names


def _is_small(exponents: list[ast.expr]) -> bool:
    """Whether this is a single exponent too small to give a number of a million digits."""
    numbers = [part.value for part in _numbers(exponents)]
    symbols = any(isinstance(part, ast.Name) for e in exponents for part in ast.walk(e))
    calls = sum(isinstance(part, ast.Call) for e in exponents for part in ast.walk(e))
    small = all(isinstance(n, int) and n <= _MOST_EXPONENT for n in numbers)
    return len(exponents) == 1 and len(numbers) == 1 and small and calls <= 1 and symbols <= calls


def _numbers(parts: list[ast.expr]) -> list[ast.Constant]:
    return [part for each in parts for part in ast.walk(each) if isinstance(part, ast.Constant)]
