"""The built-in tool ``calculate``: decimal arithmetic with far more digits than a result shows, so 0.1 + 0.2 is 0.3.
Only the operators and functions declared here are evaluated. The context bounds the size of each number.
"""

import ast
import decimal
import operator
from collections.abc import Callable
from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow, Subnormal, localcontext
from typing import Any

from config.kernel.money import MICRO
from runs.tools.base import BuiltinTool, ToolContext, ToolDefinition, ToolResult, input_object, text_input, tool_error

EXPRESSION_MAX_CHARS = 1000
DIGITS_MAX = 1000
_SIZE: dict[str, Any] = {"Emin": -DIGITS_MAX, "Emax": DIGITS_MAX - 1}
_WORKING = Context(prec=DIGITS_MAX + 200, traps=[InvalidOperation, DivisionByZero, Overflow, Subnormal], **_SIZE)
_RESULT = Context(prec=DIGITS_MAX + 100, **_SIZE)  # rounds off the last digits, so that the result of 1 / 3 * 3 is 1
_SHOWN = Context(prec=28, **_SIZE)  # for numbers with a fraction
ROOT_DIGITS = 60  # digits of powers with a fractional exponent, which take long with more


async def calculate(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    return ToolResult(await context.threads.run(context.user_id, evaluate, input["expression"]))


def evaluate(expression: str) -> str:
    """``"0.1 + 0.2"`` → ``"0.3"``. Raises ToolFailure."""
    expression = " ".join(expression.split())
    try:
        tree = ast.parse(expression.encode("ascii"), mode="eval")  # offsets in the tree count bytes
        with localcontext(_WORKING):
            return _to_text(_value(expression, tree.body))
    except ZeroDivisionError:
        raise tool_error("Division by zero.") from None
    except (Overflow, Subnormal):
        raise tool_error(f"A number has more than {DIGITS_MAX} digits.") from None
    except InvalidOperation:
        raise tool_error("This can't be calculated.") from None
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise tool_error("This is not an arithmetic expression, or too long a one.") from None


def _value(expression: str, node: ast.expr) -> Decimal:
    match node:
        case ast.Constant() if type(node.value) in (int, float):
            # The source text has all digits; a float has lost some.
            return +Decimal(expression[node.col_offset : node.end_col_offset])
        case ast.UnaryOp() if type(node.op) in SIGNS:
            return SIGNS[type(node.op)](_value(expression, node.operand))
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](_value(expression, node.left), _value(expression, node.right))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*[_value(expression, argument) for argument in node.args])
    raise tool_error(f"Only numbers, + - * / // % **, parentheses and {', '.join(FUNCTIONS)} can be used.")


def _floor(left: Decimal, right: Decimal) -> Decimal:
    return (left / right).to_integral_value(decimal.ROUND_FLOOR)


def _power(base: Decimal, exponent: Decimal) -> Decimal:
    if not base and exponent < 0:
        raise ZeroDivisionError  # Decimal's own result is infinite
    if exponent == exponent.to_integral_value():
        return base**exponent
    with localcontext(prec=ROOT_DIGITS):
        return base**exponent


def _round(value: Decimal, places: Decimal = Decimal(0)) -> Decimal:
    return value.quantize(Decimal(1).scaleb(-int(places)), decimal.ROUND_HALF_UP)


def _to_text(value: Decimal) -> str:
    number = _RESULT.plus(value)
    if number == number.to_integral_value():
        return f"{number:f}".partition(".")[0] if number else "0"
    number = _SHOWN.plus(number).normalize()
    return f"{number:f}" if number.adjusted() >= -20 else f"{number:E}"


SIGNS: dict[type[ast.unaryop], Callable[[Decimal], Decimal]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
OPERATORS: dict[type[ast.operator], Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: _floor,
    ast.Mod: lambda left, right: left - right * _floor(left, right),  # has the sign of ``right``
    ast.Pow: _power,
}
FUNCTIONS: dict[str, Any] = {"sqrt": Decimal.sqrt, "round": _round, "min": min, "max": max, "abs": abs}

TOOL = BuiltinTool(
    name="calculate",
    display_name="Calculate",
    description=(
        "Evaluates an arithmetic expression exactly: numbers, + - * / // % ** and parentheses, sqrt, min, max, "
        "abs, and round, which rounds half away from zero. Example: round(19.99 * 3 / 7, 2)."
    ),
    input_schema=input_object(expression=text_input(EXPRESSION_MAX_CHARS, "The expression.")),
    price=MICRO // 10,
    execute=calculate,
)
