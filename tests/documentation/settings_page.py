"""``python -m tests.documentation.settings_page`` writes docs/settings.md: each variable of config/settings.py with its
limits and the ``#:`` comment above it. ``tests/architecture/test_rules.py`` compares the file with the settings.
"""

import re

from config import settings

SOURCE = settings.BASE_DIR / "config" / "settings.py"
PAGE = settings.BASE_DIR / "docs" / "settings.md"
INTRODUCTION = """# Settings

All settings are environment variables. On a local machine, you need to set none of them.
[.env.example](../.env.example) has those that a deployment sets. `manage.py check` names each
variable with a wrong value and says how to correct it.

Other limits and intervals are constants beside the code that uses them.

This page is generated from [config/settings.py](../config/settings.py). To change it, change the
declaration or the `#:` comment above the declaration, and run `make docs`.
"""
# The variables that nearly every deployment sets come first.
COMMON = (
    "DATABASE_URL", "REDIS_URL", "SECRET_KEY", "ENCRYPTION_KEYS", "BASE_URL", "ALLOWED_HOSTS", "TRUST_FORWARDED_PROTO",
    "TRUSTED_PROXIES", "SESSION_ISSUER", "SESSION_AUDIENCE", "SESSION_JWKS_URL", "SIGNUP_CREDITS", "METRICS_TOKEN",
)  # fmt: skip
# A section's title; within a section, a comment, and the comment of a variable with its name.
SECTION = re.compile(r"^# --- (.+?)(?: \(.+\))? -+$", re.MULTILINE)
COMMENT = re.compile(r"#: (.+)")
DESCRIBED = re.compile(r"((?:^ *#: .+\n)+).*\bENV\.\w+\(\s*\"(\w+)\"", re.MULTILINE)


def page(source: str) -> str:
    found = {"Most deployments set": dict.fromkeys(COMMON, "")} | rows(source)
    every = {name: row for variables in found.values() for name, row in variables.items()}
    if missing := sorted(settings.ENV.known.keys() - every.keys()):
        raise ValueError(f"Describe in config/settings.py, by a #: comment above: {', '.join(missing)}")
    parts = [INTRODUCTION]
    for title, variables in found.items():
        shown = [name for name in variables if name not in COMMON or not variables[name]]
        if shown:
            table = "".join(every[name] for name in shown)
            parts.append(f"## {title}\n\n| Variable | Default | Values | Meaning |\n|---|---|---|---|\n{table}")
    return "\n".join(parts)


def rows(source: str) -> dict[str, dict[str, str]]:
    """The row of each described variable, by the title of its section and its name."""
    _, *parts = SECTION.split(source)
    found: dict[str, dict[str, str]] = {}
    for title, section in zip(parts[::2], parts[1::2], strict=True):
        of_section = found.setdefault(title[0].upper() + title[1:], {})
        for comment, name in DESCRIBED.findall(section):
            if any(name in variables for variables in found.values()):
                raise ValueError(f"config/settings.py describes {name} twice.")
            default, values = settings.ENV.known[name]
            text = " ".join(COMMENT.findall(comment))
            if values == "comma-separated":
                default = default.replace(",", ", ")  # a browser breaks no line in a text without spaces
            shown = f"`{default}`" if default and "(default: " not in text else ""
            of_section[name] = f"| `{name}` | {shown} | {values} | {text} |\n"
    return found


if __name__ == "__main__":
    PAGE.write_text(page(SOURCE.read_text()))
