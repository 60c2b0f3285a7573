"""The command line: parses options, calls the library and prints results. `app.py` lists the
commands. Each command imports its dependencies when it runs."""

from kvkeep.extras import needed_by

with needed_by("The command kvkeep", "cli"):
    import rich  # noqa: F401 (every module here may import these)
    import typer  # noqa: F401
