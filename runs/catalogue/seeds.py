"""The catalogue that a new installation starts with, as column values. Plain data: migrations read it.

Amounts are micro-credits: 1 credit is 1,000,000.
"""

from typing import Any

MODELS: list[dict[str, Any]] = [
    {
        "name": "demo",
        "display_name": "Demo (offline)",
        "provider": "demo",
        "provider_model": "demo",
        "price_in": 500_000,
        "price_out": 1_500_000,
        "is_default": True,
        "enabled": True,
    },
]

TOOLS: list[dict[str, Any]] = [
    {
        "name": "ask_user",
        "display_name": "Ask the user",
        "description": (
            "Asks the user one question and waits for the answer. Use it when the task can't go on without something "
            "that only the user knows or may decide."
        ),
        "node_type": "builtin",
        "input_schema": {
            "type": "object",
            "properties": {
                "question": {"type": "string", "minLength": 1, "maxLength": 10000, "description": "What to ask."},
                "options": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": 500},
                    "minItems": 1,
                    "maxItems": 20,
                    "description": "Answers to choose from, if there are only a few.",
                },
            },
            "required": ["question"],
            "additionalProperties": False,
        },
        "price": 0,
        "repeatable": True,
    },
    {
        "name": "web_fetch",
        "display_name": "Fetch a web page",
        "description": "Reads a public web page or text file and returns its text.",
        "node_type": "builtin",
        "input_schema": {
            "type": "object",
            "properties": {
                "url": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 2048,
                    "description": "The absolute http(s) address.",
                },
            },
            "required": ["url"],
            "additionalProperties": False,
        },
        "price": 1_000_000,
        "repeatable": True,
    },
    {
        "name": "create_file",
        "display_name": "Create a file",
        "description": "Writes a text file that the user can download, and returns its address.",
        "node_type": "builtin",
        "input_schema": {
            "type": "object",
            "properties": {
                "fileName": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 100,
                    "pattern": r"^\w(?:[\w .,()+@=-]*[\w)])?$",
                    "description": "A name without folders, such as report.md.",
                },
                "content": {"type": "string", "description": "The whole text of the file."},
            },
            "required": ["fileName", "content"],
            "additionalProperties": False,
        },
        "price": 1_000_000,
        "repeatable": True,
    },
    {
        "name": "draw_chart",
        "display_name": "Draw a chart",
        "description": "Draws a series of numbers as an SVG chart, bars for up to 24 values and a line for more.",
        "node_type": "builtin",
        "input_schema": {
            "type": "object",
            "properties": {
                "title": {"type": "string", "minLength": 1, "maxLength": 200, "description": "The chart's heading."},
                "series": {
                    "type": "array",
                    "items": {"type": "number", "minimum": -1e15, "maximum": 1e15},
                    "minItems": 1,
                    "maxItems": 1000,
                    "description": "The values, in order.",
                },
            },
            "required": ["title", "series"],
            "additionalProperties": False,
        },
        "price": 12_000_000,
        "repeatable": True,
    },
    {
        "name": "calculate",
        "display_name": "Calculate",
        "description": (
            "Evaluates an arithmetic expression exactly: numbers, + - * / // % ** and parentheses, sqrt, min, max, "
            "abs, and round, which rounds half away from zero. Example: round(19.99 * 3 / 7, 2)."
        ),
        "node_type": "builtin",
        "input_schema": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1000,
                    "description": "The expression.",
                },
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
        "price": 100_000,
        "repeatable": True,
    },
]
