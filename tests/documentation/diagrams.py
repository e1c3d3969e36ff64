"""The pictures of the diagrams: ``python -m tests.documentation.diagrams`` draws them with mermaid.

It needs npm, its registry and Chromium.
"""

import re
import subprocess
import tempfile
from pathlib import Path

from config.api.documentation import FOLDER
from mkdocs_hooks import DIAGRAM, picture
from tests.stack.browser import chromium

MERMAID = "mermaid@12.3.0"
THEMES = {"light": "default", "dark": "dark"}
# Text and not HTML, which some viewers of SVG do not show.
DRAW = """async ([source, theme]) => {
  mermaid.initialize({startOnLoad: false, theme, htmlLabels: false, fontFamily: "system-ui, sans-serif"});
  return (await mermaid.render("diagram", source)).svg;
}"""


def sources() -> set[str]:
    """The Mermaid source of every diagram of the documentation."""
    return {found[1] for file in FOLDER.rglob("*.md") for found in DIAGRAM.finditer(file.read_text())}


def expected() -> dict[str, tuple[str, str]]:
    """The picture's file, below docs, to its source and scheme."""
    return {picture(source, scheme): (source, scheme) for source in sources() for scheme in THEMES}


def draw() -> None:
    with tempfile.TemporaryDirectory() as folder:
        npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", MERMAID]
        subprocess.run(npm, cwd=folder, check=True)
        mermaid = (Path(folder) / "node_modules" / "mermaid" / "dist" / "mermaid.min.js").read_text()
    with chromium() as browser:
        for name, (source, scheme) in expected().items():
            page = browser.new_page()
            page.add_script_tag(content=mermaid)
            svg = page.evaluate(DRAW, [source, THEMES[scheme]])
            _, _, width, height = re.findall(r"[\d.-]+", re.findall(r'viewBox="([^"]+)"', svg)[0])
            svg = svg.replace('width="100%"', f'width="{width}" height="{height}"', 1)
            (FOLDER / name).write_text(svg + "\n")
    for old in set(FOLDER.glob("images/diagram-*.svg")) - {FOLDER / name for name in expected()}:
        old.unlink()


if __name__ == "__main__":
    draw()
