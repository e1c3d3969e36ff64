"""The built-in tool ``ask_user``: a question to the user. The engine opens a waitpoint and calls no function."""

from runs.tools.base import ASK_USER, BuiltinTool, input_object, text_input

TOOL = BuiltinTool(
    name=ASK_USER,
    display_name="Ask the user",
    description=(
        "Asks the user one question and waits for the answer. Use it when the task needs information or a decision "
        "that only the user can give."
    ),
    input_schema=input_object(
        question=text_input(10_000, "What to ask."),
        options={
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 500},
            "minItems": 1,
            "maxItems": 20,
            "description": "Answers to choose from, if there are only a few.",
        },
        optional=["options"],
    ),
    price=0,
    execute=None,
)
