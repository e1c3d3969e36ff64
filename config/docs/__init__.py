"""``/docs``: the Markdown files of this repository as pages. Nothing here knows what a page says."""
