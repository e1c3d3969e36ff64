"""The tools that runs call: ``dispatch`` calls them, ``schema`` reads a call's input."""
