"""The rules of docs/architecture.md that no linter checks."""

import ast
import re
from pathlib import Path

import pytest
from django.apps import apps
from django.conf import settings

from tests.documentation import settings_page

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {"auth": 0, "contenttypes": 0, "api": 1, "webhooks": 2, "apikeys": 3, "credits": 3, "chats": 3, "runs": 4}
OWN_APPS = ["config", "chats", "runs", "credits", "apikeys", "webhooks"]


def sources() -> list[Path]:
    return [path for app in OWN_APPS for path in (ROOT / app).rglob("*.py") if "migrations" not in path.parts]


def test_foreign_keys_point_downwards() -> None:
    wrong = [
        f"{model._meta.label}.{field.name}"
        for model in apps.get_models()
        if LAYERS.get(model._meta.app_label, 0) > 0
        for field in model._meta.get_fields()
        if field.concrete
        and field.is_relation
        and model._meta.app_label != field.related_model._meta.app_label
        and LAYERS[field.related_model._meta.app_label] >= LAYERS[model._meta.app_label]
    ]
    assert wrong == []


def test_no_type_checking_import_hides_a_cycle_in_a_package() -> None:
    """``if TYPE_CHECKING:`` may import from other packages only."""
    wrong = [
        f"{path.relative_to(ROOT)}:{imported.lineno}"
        for path in sources()
        for block in ast.walk(ast.parse(path.read_text()))
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for imported in ast.walk(block)
        if imports_from(imported, ".".join(path.relative_to(ROOT).parent.parts))
    ]
    assert wrong == []


def imports_from(node: ast.AST, package: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or node.module == package or str(node.module).startswith(f"{package}.")
    return isinstance(node, ast.Import) and any(name.name.startswith(f"{package}.") for name in node.names)


def test_the_page_of_settings_is_generated_from_their_declarations() -> None:
    written = settings_page.PAGE.read_text()
    assert written == settings_page.page(settings_page.SOURCE.read_text()), "run make docs"
    assert set(settings.ENV.known) == set(re.findall(r"^\| `(\w+)` \|", written, re.MULTILINE))


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ('X = ENV.text("X")', "Describe in config/settings.py"),
        ('#: a\nX = ENV.text("PORT")\n#: b\nY = ENV.text("PORT")', "twice"),
    ],
)
def test_a_setting_without_a_clear_description_is_refused(source: str, refused: str) -> None:
    with pytest.raises(ValueError, match=refused):
        settings_page.page(f"# --- core ---\n{source}\n")


# Only the settings, the URLs and config/local may name apps. config/local prints first calls to make.
MAY_NAME_APPS = ("settings.py", "components.py", "urls.py", "local")


def strings(path: Path) -> list[tuple[int, str]]:
    """Return the strings of a module with their line numbers, without its docstrings."""
    tree = ast.parse(path.read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in texts]
    return [(node.lineno, node.value) for node in constants if isinstance(node.value, str)]


def test_no_string_in_config_names_an_app() -> None:
    """The settings hold every label, model, table, dotted name and path of an app."""
    apps_of_ours = [label for label in OWN_APPS if label != "config"]
    models = [model._meta.model_name for label in apps_of_ours for model in apps.get_app_config(label).get_models()]
    labels, names = "|".join(apps_of_ours), "|".join(set(models) - {"message"})
    named = re.compile(rf"^({labels}|{names})$|\b({labels})([._-]\w|/)|/({labels})\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted((ROOT / "config").rglob("*.py"))
        if not set(path.relative_to(ROOT / "config").parts) & set(MAY_NAME_APPS)
        for line, text in strings(path)
        if named.search(text)
    ]
    wrong += [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "config" / "templates").rglob("*.html"))
        if re.search(rf"\b({labels})[._]", path.read_text())
    ]
    assert wrong == []


def test_tasks_take_ids_only() -> None:
    """A model object in the arguments would be out of date when the task runs."""
    wrong = []
    for path in sources():
        if path.name != "tasks.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("shared_task" in ast.unparse(d) for d in node.decorator_list):
                wrong += [
                    f"{path.parent.name}.{node.name}({argument.arg})"
                    for argument in node.args.args
                    if argument.annotation is None or ast.unparse(argument.annotation) not in ("str", "int")
                ]
    assert wrong == []
