"""The built-in tool ``calculate``: exact arithmetic. Numbers are fractions, so 0.1 + 0.2 is 0.3.

Only the operators and functions declared here are evaluated, and sizes are checked before a number is computed.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from decimal import Context, Decimal, Inexact, InvalidOperation
from fractions import Fraction
from typing import Any

from config.kernel.money import MICRO
from runs.tools.base import BuiltinTool, ToolContext, ToolDefinition, ToolResult, in_thread, input_object, tool_error

EXPRESSION_MAX_CHARS = 1000
DEPTH_MAX = 100
DIGITS_MAX = 1000
_BITS_MAX = math.ceil(DIGITS_MAX * math.log2(10))
ROUND_PLACES_MAX = 100
# Roots are computed with more digits than the result shows, so that the result of sqrt(2) ** 2 is 2.
_WORKING = Context(prec=60, Emin=-10 * DIGITS_MAX, Emax=10 * DIGITS_MAX)
_EXACT = Context(prec=40, Emin=-10 * DIGITS_MAX, Emax=10 * DIGITS_MAX, traps=[Inexact])
_SHOWN = Context(prec=20, Emin=-10 * DIGITS_MAX, Emax=10 * DIGITS_MAX)


class CalculationError(ValueError):
    """The expression has no result; the message tells people and models why."""


async def calculate(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    try:
        return ToolResult(await in_thread(context, evaluate, input["expression"]))
    except CalculationError as error:
        raise tool_error(str(error)) from None


def evaluate(expression: str) -> str:
    """``"0.1 + 0.2"`` → ``"0.3"``; rounded to 20 digits if 40 digits are not exact. Raises CalculationError."""
    expression = " ".join(expression.split())
    if not expression:
        raise CalculationError("The expression is empty.")
    if len(expression) > EXPRESSION_MAX_CHARS:
        raise CalculationError(f"The expression may have at most {EXPRESSION_MAX_CHARS} characters.")
    if not expression.isascii():
        raise CalculationError("Write it with digits and + - * / // % ** ( ) only.")
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CalculationError("This is not an arithmetic expression.") from None
    try:
        return _to_text(_Evaluation(expression).value(tree.body, 1))
    except ZeroDivisionError:
        raise CalculationError("Division by zero.") from None


class _Evaluation:
    def __init__(self, expression: str) -> None:
        self.expression = expression

    def value(self, node: ast.expr, depth: int) -> Fraction:
        if depth > DEPTH_MAX:
            raise CalculationError(f"The expression is nested more than {DEPTH_MAX} deep.")
        if isinstance(node, ast.Constant):
            return self._literal(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            operand = self.value(node.operand, depth + 1)
            return -operand if isinstance(node.op, ast.USub) else operand
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return self._chain(node, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
            raise CalculationError("Write powers with **, not ^.")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node.func.id, [self.value(argument, depth + 1) for argument in node.args])
        raise CalculationError(f"Only numbers, + - * / // % **, parentheses and {', '.join(FUNCTIONS)} can be used.")

    def _chain(self, node: ast.BinOp, depth: int) -> Fraction:
        # The tree of a long sum nests on the left only; a loop over that side does not count as nesting.
        spine: list[ast.BinOp] = []
        leftmost: ast.expr = node
        while isinstance(leftmost, ast.BinOp) and type(leftmost.op) in OPERATORS:
            spine.append(leftmost)
            leftmost = leftmost.left
        result = self.value(leftmost, depth + 1)
        for step in reversed(spine):
            result = _bounded(OPERATORS[type(step.op)](result, self.value(step.right, depth + 1)))
        return result

    def _literal(self, node: ast.Constant) -> Fraction:
        if type(node.value) is int:
            return _bounded(Fraction(node.value))
        if type(node.value) is not float:
            raise CalculationError("Only numbers can be used.")
        # The source text has all digits; the float has lost some.
        number = Decimal(self.expression[node.col_offset : node.end_col_offset])
        if abs(number.adjusted()) > DIGITS_MAX or int(number.as_tuple().exponent) < -DIGITS_MAX:
            raise _too_large()
        return Fraction(number)

    def _call(self, name: str, arguments: list[Fraction]) -> Fraction:
        if name not in FUNCTIONS:
            raise CalculationError(f"There is no function {name[:40]}; there are {', '.join(FUNCTIONS)}.")
        function, least, most = FUNCTIONS[name]
        if not least <= len(arguments) <= most:
            raise CalculationError(f"{name} does not take {len(arguments)} numbers.")
        return _bounded(function(*arguments))


def _too_large() -> CalculationError:
    return CalculationError(f"A number has more than {DIGITS_MAX} digits.")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS_MAX:
        raise _too_large()
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise CalculationError("A negative number has no fractional power.")
        return _decimal_power(base, exponent)
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (-1, 0, 1) and (bits - 1) * abs(exponent.numerator) > _BITS_MAX:
        raise _too_large()
    return base**exponent.numerator


def _decimal_power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0:
        if exponent < 0:
            raise ZeroDivisionError
        return base
    if exponent.denominator == 2 and abs(exponent.numerator) == 1:
        root = _sqrt(base)
        return root if exponent > 0 else 1 / root
    # Before the computation, which takes long for a huge result.
    size = abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > _BITS_MAX:
        raise _too_large()
    try:
        return Fraction(_WORKING.power(_as_decimal(base, _WORKING), _as_decimal(exponent, _WORKING)))
    except (ArithmeticError, InvalidOperation):
        raise CalculationError("This power can't be calculated.") from None


def _sqrt(value: Fraction) -> Fraction:
    if value < 0:
        raise CalculationError("A negative number has no square root.")
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return Fraction(top, bottom)
    return Fraction(_WORKING.sqrt(_as_decimal(value, _WORKING)))


def _round(value: Fraction, places: Fraction = Fraction(0)) -> Fraction:
    """Half away from zero."""
    if places.denominator != 1 or abs(places) > ROUND_PLACES_MAX:
        raise CalculationError(f"round takes a whole number of places up to {ROUND_PLACES_MAX}.")
    factor = Fraction(10) ** places.numerator
    rounded = math.floor(abs(value) * factor + Fraction(1, 2)) / factor
    return rounded if value >= 0 else -rounded


def _as_decimal(value: Fraction, context: Context) -> Decimal:
    return context.divide(Decimal(value.numerator), Decimal(value.denominator))


def _to_text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    try:
        number = _as_decimal(value, _EXACT)
    except Inexact:
        number = _as_decimal(value, _SHOWN)
    number = number.normalize(_EXACT)
    return f"{number:f}" if -20 <= number.adjusted() <= 40 else f"{number:E}"


OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: lambda left, right: left % right,
    ast.Pow: _power,
}
# Each with the minimum and the maximum number of arguments.
FUNCTIONS: dict[str, tuple[Callable[..., Fraction], int, int]] = {
    "sqrt": (_sqrt, 1, 1),
    "round": (_round, 1, 2),
    "min": (lambda *values: min(values), 1, EXPRESSION_MAX_CHARS),
    "max": (lambda *values: max(values), 1, EXPRESSION_MAX_CHARS),
    "abs": (lambda value: abs(value), 1, 1),
}

TOOL = BuiltinTool(
    name="calculate",
    display_name="Calculate",
    description=(
        "Evaluates an arithmetic expression exactly: numbers, + - * / // % ** and parentheses, sqrt, min, max, "
        "abs, and round, which rounds half away from zero. Example: round(19.99 * 3 / 7, 2)."
    ),
    input_schema=input_object(
        expression={
            "type": "string",
            "minLength": 1,
            "maxLength": EXPRESSION_MAX_CHARS,
            "description": "The expression.",
        }
    ),
    price=MICRO // 10,
    execute=calculate,
)
