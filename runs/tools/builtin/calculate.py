"""The built-in tool ``calculate``: decimal arithmetic with far more digits than a result shows, so 0.1 + 0.2 is 0.3.

Only the operators and functions declared here are evaluated. The context bounds the size of each number.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal, Inexact, InvalidOperation, Overflow, Subnormal, localcontext
from typing import Any

from config.kernel.money import MICRO
from runs.tools.base import BuiltinTool, ToolContext, ToolDefinition, ToolResult, in_thread, input_object, tool_error

EXPRESSION_MAX_CHARS = 1000
DEPTH_MAX = 100
DIGITS_MAX = 1000
ROUND_PLACES_MAX = 100
_SIZE: dict[str, Any] = {"Emin": -DIGITS_MAX, "Emax": DIGITS_MAX - 1}
_WORKING = Context(prec=DIGITS_MAX + 200, traps=[InvalidOperation, Overflow, Subnormal], **_SIZE)
# Rounds off the last digits, so that the result of 1 / 3 * 3 is 1.
_RESULT = Context(prec=DIGITS_MAX + 100, **_SIZE)
_EXACT = Context(prec=40, traps=[Inexact], **_SIZE)
_SHOWN = Context(prec=20, **_SIZE)
# Powers and roots take long with more digits.
ROOT_DIGITS = 60


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
        with localcontext(_WORKING):
            return _to_text(_value(expression, tree.body, 1))
    except ZeroDivisionError:
        raise CalculationError("Division by zero.") from None
    except (Overflow, Subnormal):
        raise CalculationError(f"A number has more than {DIGITS_MAX} digits.") from None
    except InvalidOperation:
        raise CalculationError("This can't be calculated.") from None


def _value(expression: str, node: ast.expr, depth: int) -> Decimal:
    if depth > DEPTH_MAX:
        raise CalculationError(f"The expression is nested more than {DEPTH_MAX} deep.")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # The source text has all digits; a float has lost some.
        text = expression[node.col_offset : node.end_col_offset]
        return +Decimal(node.value if type(node.value) is int else text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        operand = _value(expression, node.operand, depth + 1)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        # The tree of a long sum nests on the left only; a loop over that side does not count as nesting.
        steps: list[ast.BinOp] = []
        leftmost: ast.expr = node
        while isinstance(leftmost, ast.BinOp) and type(leftmost.op) in OPERATORS:
            steps.append(leftmost)
            leftmost = leftmost.left
        result = _value(expression, leftmost, depth + 1)
        for step in reversed(steps):
            result = OPERATORS[type(step.op)](result, _value(expression, step.right, depth + 1))
        return result
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        raise CalculationError("Write powers with **, not ^.")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        arguments = [_value(expression, argument, depth + 1) for argument in node.args]
        name = node.func.id
        if name not in FUNCTIONS:
            raise CalculationError(f"There is no function {name[:40]}; there are {', '.join(FUNCTIONS)}.")
        function, least, most = FUNCTIONS[name]
        if not least <= len(arguments) <= most:
            raise CalculationError(f"{name} does not take {len(arguments)} numbers.")
        return function(*arguments)
    raise CalculationError(f"Only numbers, + - * / // % **, parentheses and {', '.join(FUNCTIONS)} can be used.")


def _divide(left: Decimal, right: Decimal) -> Decimal:
    if not right:
        raise ZeroDivisionError
    return left / right


def _remainder(left: Decimal, right: Decimal) -> Decimal:
    """Has the sign of ``right``; Decimal's has that of ``left``."""
    if not right:
        raise ZeroDivisionError
    rest = left % right
    return rest + right if rest and (rest < 0) != (right < 0) else rest


def _power(base: Decimal, exponent: Decimal) -> Decimal:
    if not exponent:
        return Decimal(1)
    if not base and exponent < 0:
        raise ZeroDivisionError
    if exponent == exponent.to_integral_value():
        return base**exponent
    if base < 0:
        raise CalculationError("A negative number has no fractional power.")
    with localcontext(prec=ROOT_DIGITS):
        return base**exponent


def _sqrt(value: Decimal) -> Decimal:
    if value < 0:
        raise CalculationError("A negative number has no square root.")
    return value.sqrt()


def _round(value: Decimal, places: Decimal = Decimal(0)) -> Decimal:
    """Half away from zero."""
    if places != places.to_integral_value() or abs(places) > ROUND_PLACES_MAX:
        raise CalculationError(f"round takes a whole number of places up to {ROUND_PLACES_MAX}.")
    return value.quantize(Decimal(1).scaleb(-int(places)), ROUND_HALF_UP)


def _to_text(value: Decimal) -> str:
    number = _RESULT.plus(value)
    if not number:
        return "0"
    if number == number.to_integral_value():
        return f"{number:f}".partition(".")[0]
    try:
        number = _EXACT.plus(number)
    except Inexact:
        number = _SHOWN.plus(number)
    number = number.normalize()
    return f"{number:f}" if -20 <= number.adjusted() <= 40 else f"{number:E}"


OPERATORS: dict[type[ast.operator], Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: lambda left, right: _divide(left - _remainder(left, right), right).to_integral_value(),
    ast.Mod: _remainder,
    ast.Pow: _power,
}
# Each with the minimum and the maximum number of arguments.
FUNCTIONS: dict[str, tuple[Callable[..., Decimal], int, int]] = {
    "sqrt": (_sqrt, 1, 1),
    "round": (_round, 1, 2),
    "min": (min, 1, EXPRESSION_MAX_CHARS),
    "max": (max, 1, EXPRESSION_MAX_CHARS),
    "abs": (abs, 1, 1),
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
