"""Shoal as the sandbox of other projects. Each module needs the extra of its name: `pip install shoal[inspect]`."""
