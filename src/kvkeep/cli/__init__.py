"""The command line, which parses options, calls the library and prints results; `app.py` has the
list of commands. Each imports what it needs when it runs."""

from kvkeep.extras import needed_by

with needed_by("The command kvkeep", "cli"):
    import rich  # noqa: F401 (every module here may import these)
    import typer  # noqa: F401
