"""`python -m kvkeep` is the command line."""

from kvkeep.cli import app

if __name__ == "__main__":
    app(prog_name="kvkeep")
